"""Are parked states kept within their budget, for their own tokens and tenant only?"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ripresa.workers.cache.parked_states import (
    TOKEN_BYTES,
    ParkedState,
    ParkedStates,
    Preempted,
)
from ripresa.workers.replay import TailVariant, cold_recipe

RECIPE = cold_recipe(5, 8, TailVariant.FLOORED, 0)
IDS = 3 * TOKEN_BYTES


def state(size: int = 10, expires: float = 100.0) -> ParkedState[torch.Tensor]:
    payload = torch.zeros(size, dtype=torch.uint8)
    return ParkedState((1, 2, 3), RECIPE, payload, expires)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 12))))
def test_any_history_keeps_the_newest_within_the_budget(actions: list[tuple[str, int]]) -> None:
    states: ParkedStates[torch.Tensor] = ParkedStates(30 + 2 * IDS)
    model: dict[str, int] = {}
    for session, size in actions:
        states.put(b"", session, state(size))
        model.pop(session, None)
        model[session] = size + IDS
        while sum(model.values()) > 30 + 2 * IDS:
            del model[next(iter(model))]
        assert states.num_bytes == sum(model.values())
        found = {s for s in "abcde" if states.find(b"", s, (1, 2, 3, 4), 0.0) is not None}
        assert found == set(model)


def test_a_state_is_for_its_tokens_tenant_and_time() -> None:
    states: ParkedStates[torch.Tensor] = ParkedStates(30 + 2 * IDS)
    states.put(b"a", "s", state())
    assert states.find(b"a", "s", (1, 2, 3, 4), 99.0) is not None
    assert states.find(b"b", "s", (1, 2, 3, 4), 0.0) is None
    assert states.find(b"a", "s", (1, 2, 3), 0.0) is None
    assert states.find(b"a", "s", (1, 9, 3, 4), 0.0) is None
    assert states.find(b"a", "s", (1, 2, 3, 4), 100.0) is None
    assert len(states) == 0


def test_sessions_make_room_before_requests_that_run() -> None:
    states: ParkedStates[torch.Tensor] = ParkedStates(30 + 2 * IDS)
    running = Preempted("r")
    states.put(b"", running, state())
    states.put(b"", "old", state())
    states.put(b"", "new", replace(state(), blocks=torch.zeros(5, dtype=torch.uint8)))
    assert states.num_bytes == 25 + 2 * IDS
    assert states.find(b"", "old", (1, 2, 3, 4), 0.0) is None
    assert states.find(b"", running, (1, 2, 3, 4), 0.0) is not None
    assert states.find(b"", "r", (1, 2, 3, 4), 0.0) is None
    states.put(b"", Preempted("q"), state(25))
    assert states.find(b"", running, (1, 2, 3, 4), 0.0) is None
    assert states.num_bytes == 25 + IDS
