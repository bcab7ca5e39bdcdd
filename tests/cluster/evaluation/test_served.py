"""Are a served model's answers compared as they were said, every mode with caches of its own?"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from gateway_thread import GatewayThread
from in_process_router import InProcessRouter

from ripresa.cluster.client import Client
from ripresa.cluster.evaluation.cases import Answer, Case
from ripresa.cluster.evaluation.experiments import Experiment, Result
from ripresa.cluster.evaluation.report import About, page
from ripresa.cluster.evaluation.served import ARMS, ask, check_served
from ripresa.cluster.evaluation.summary import ALL, summarise
from ripresa.cluster.routing.prompt import PromptRequest, RouterEvent
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.request import Tokens

EOS = 1
PROMPT = tuple(range(4, 24))
RIGHT, LONGER, OTHER = (40, 41, EOS), (40, 41, 42, EOS), (40, 50, EOS)
"""The gateway's model always says the first one."""
TOKENS = (*PROMPT, *RIGHT, 9, *LONGER, 9, *OTHER)
CASE = Case(
    3,
    TOKENS,
    None,
    None,
    (Answer("T1 call", 20, 23), Answer("T2 read near", 24, 28), Answer("T3 read far", 29, 32)),
)


@pytest.fixture
def talking(gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch) -> GatewayThread:
    """A gateway whose stop tokens are, like an engine's, in no event but the last."""
    scripted = InProcessRouter._events

    async def events(router: InProcessRouter, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        async for event in scripted(router, prompt):
            if not (isinstance(event, Tokens) and event.token_ids == (EOS,)):
                yield event

    monkeypatch.setattr(InProcessRouter, "_events", events)
    gateway.router.script = RIGHT
    return gateway


def test_only_the_whole_message_matches(talking: GatewayThread) -> None:
    gateway = talking
    with Client(gateway.address) as client:
        matches, hits = ask(client, CASE, "ab12")
    names = [arm.name for arm in ARMS]
    assert [(m.arm, m.task, m.is_exact) for m in matches] == [
        (name, task, task == "T1 call")
        for name in names
        for task in ("T1 call", "T2 read near", "T3 read far")
    ]
    assert [(hit.arm, hit.num_tokens) for hit in hits[:3]] == [("exact", n) for n in (20, 24, 29)]
    assert {hit.kind for hit in hits} == {"cold"}
    by_salt: dict[bytes, list[tuple[object, ...]]] = {}
    for prompt in gateway.router.seen:
        assert prompt.sampling.temperature == 0
        way = (prompt.cache.mode, prompt.tail, tuple(prompt.token_ids))
        by_salt.setdefault(prompt.tenant_salt, []).append(way)
    expected = [
        [(arm.mode, arm.tail, TOKENS[: answer.start]) for answer in CASE.answers] for arm in ARMS
    ]
    assert sorted(by_salt.values(), key=repr) == sorted(expected, key=repr)
    summary = summarise(
        [Result(Experiment.SERVED, 3, matches=tuple(matches), hits=tuple(hits))], seed=0
    )
    whole = [row for row in summary.matches if row.task == ALL]
    assert [(row.arm, row.exact.mean) for row in whole] == [(name, 1 / 3) for name in names]
    assert [(row.arm, row.kinds, row.skipped) for row in summary.served] == [
        (name, {"cold": 3}, 0.0) for name in names
    ]
    text = page(summary, About("ripresa eval replay", {}, 8, 32), {})
    assert "Through the server" in text
    assert "| `both layer_exact` | 3 | cold 3 |" in text


def test_other_weights_are_refused(talking: GatewayThread) -> None:
    with Client(talking.address) as client:
        check_served(client, 4, "ab12")
        for refused_by in (
            lambda: ask(client, CASE, "cd34"),
            lambda: check_served(client, 4, "cd34"),
        ):
            with pytest.raises(RipresaError) as refused:
                refused_by()
            assert refused.value.code is ErrorCode.FAILED_PRECONDITION
            assert "--checkpoint" in refused.value.message
