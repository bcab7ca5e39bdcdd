"""Does a session go on elsewhere as if it had never moved, and only from a state that is whole?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hash_machine import WINDOW, reference_stream
from hash_requests import ask, prompt, recipe_of
from routed_cluster import routed_cluster
from split_cluster import CONFIG, collect

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.config import WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.prefix_sources import BlockSource, PrefixSources
from ripresa.workers.replay import PlanKind
from ripresa.workers.request import Bringing
from ripresa.workers.session_images import SessionImage

CONFIG_OF_TEST = replace(CONFIG, windows=WindowConfig(WindowPolicy.ZERO))


async def test_a_session_moves_with_its_state_and_its_blocks() -> None:
    async with routed_cluster(0, 2, config=CONFIG_OF_TEST) as cluster:
        old, new = (cluster.workers_by_id[name].engine for name in ("d0", "d1"))
        assert isinstance(old, DecodeEngine)
        assert isinstance(new, DecodeEngine)
        tokens = prompt(1, 43)
        first = replace(ask(tokens), session_id="s")
        stream = await collect(old, first)
        tokens += stream.tokens + prompt(2, 30)
        num_parked = 43 + len(stream.tokens) - 1
        assert old.give_image(b"", "other", tokens) is None
        assert old.give_image(b"salt", "s", tokens) is None
        assert old.give_image(b"", "s", prompt(3, 80)) is None
        image = old.give_image(b"", "s", tokens)
        assert image is not None
        assert old.give_image(b"", "s", tokens) is None
        new.take_image(image)
        holder = WorkerAddress("d0", WorkerKind.DECODE)
        second = replace(
            ask(tokens, "next"),
            session_id="s",
            sources=PrefixSources((BlockSource(holder, (), 0, num_parked // WINDOW),)),
        )
        events = [event async for event in new.generate(second, local=True)]
        assert isinstance(events[0], Bringing)
        answer = replace(stream, events=tuple(events[1:]))
        recipe = recipe_of(answer)
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, num_parked)
        answer.assert_equals(reference_stream(second, recipe=recipe))


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("damaged", ErrorCode.DATA_LOSS),
        ("layout", ErrorCode.FAILED_PRECONDITION),
        ("rules", ErrorCode.FAILED_PRECONDITION),
    ],
)
async def test_a_state_that_does_not_fit_is_refused(what: str, code: ErrorCode) -> None:
    async with routed_cluster(0, 2, config=CONFIG_OF_TEST) as cluster:
        old, new = (cluster.workers_by_id[name].engine for name in ("d0", "d1"))
        assert isinstance(old, DecodeEngine)
        assert isinstance(new, DecodeEngine)
        tokens = prompt(1, 43)
        stream = await collect(old, replace(ask(tokens), session_id="s"))
        tokens += stream.tokens + prompt(2, 30)
        image = old.give_image(b"", "s", tokens)
        assert image is not None
        with pytest.raises(RipresaError) as caught:
            new.take_image(spoil(image, what))
        assert caught.value.code is code
        second = replace(ask(tokens), session_id="s")
        answer = await collect(new, second)
        assert recipe_of(answer).kind is PlanKind.COLD
        answer.assert_equals(reference_stream(second, recipe=recipe_of(answer)))


def spoil(image: SessionImage, what: str) -> SessionImage:
    state = image.state
    if what == "layout":
        return replace(image, layout_digest=b"another")
    if what == "rules":
        return replace(image, state=replace(state, recipe=replace(state.recipe, rules_version="0")))
    payload = state.payload.clone()
    payload[3] ^= 16
    return replace(image, state=replace(state, payload=payload))
