"""Do the turns of an opened session keep to its format, one behind the other and in branches?

The model is one of noise, so whatever fits the schema here does so for the schema's sake.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from engine_gateway import CONFIG, noise_runner
from engine_router import EngineRouter

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.sessions.store import LocalSessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import InvalidArgument

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[a-f]{4,9}$"},
    },
    "required": ["on", "code"],
    "additionalProperties": False,
}


@pytest.fixture
async def service(demo: Tokenizer, encoding: ChatEncoding) -> AsyncIterator[InferenceService]:
    runner = noise_runner()
    engine = DecodeEngine("d0", runner, CONFIG)
    await engine.start()
    model = ServedModel("demo", runner.max_model_len, demo.num_ids, runner.eos_token_id, "ab12")
    service = InferenceService(
        EngineRouter(engine),
        model,
        demo,
        GatewayMetrics(),
        encoding=encoding,
        window=runner.window,
    )
    service.keep_sessions(LocalSessionStore())
    yield service
    assert service.num_running == 0
    engine.check_integrity()
    await engine.stop()
    service.close()


async def opened(service: InferenceService, constraint: pb.OutputConstraint | None = None) -> None:
    config = pb.ConversationConfig(thinking=pb.Thinking(enabled=False), response_format=constraint)
    opening = pb.OpenSessionRequest(session_id="mine", config=config)
    assert service.sessions is not None
    await service.sessions.open(opening, Call("open"))


async def answer(service: InferenceService, parent: str, seed: int, **sampling: Any) -> pb.Finished:
    request = pb.ChatRequest(
        options=pb.RequestOptions(session_id="mine"),
        turn=pb.SessionTurn(
            parent_turn_id=parent, messages=[pb.Message(role=pb.ROLE_USER, content="Go on.")]
        ),
        sampling=pb.SamplingParams(max_tokens=200, seed=seed, **sampling),
    )
    told = [message async for message in service.chat(request, Call(f"turn-{seed}"))]
    assert told[-1].HasField("completed")
    (finished,) = (message.finished for message in told if message.HasField("finished"))
    return finished


async def test_every_turn_keeps_to_the_session_s_format(service: InferenceService) -> None:
    await opened(service, pb.OutputConstraint(json_schema=json.dumps(SCHEMA)))
    one = await answer(service, "", 1)
    two = await answer(service, one.turn_id, 2)
    branch = await answer(service, one.turn_id, 3)
    for finished in (one, two, branch):
        assert finished.reason == pb.FINISH_REASON_STOP
        jsonschema.validate(json.loads(finished.message.content), SCHEMA)
    assert len({finished.message.content for finished in (one, two, branch)}) == 3
    wanted = pb.OutputConstraint(regex="[0-9]+")
    with pytest.raises(InvalidArgument, match="contradicts") as refused:
        await answer(service, two.turn_id, 4, constraint=wanted)
    assert refused.value.field == "sampling.constraint.regex"


async def test_a_turn_may_have_a_format_of_its_own(service: InferenceService) -> None:
    await opened(service)
    one = await answer(service, "", 1, constraint=pb.OutputConstraint(regex="[0-9]{3,9}"))
    assert 3 <= len(one.message.content) <= 9
    assert one.message.content.isdigit()
    words = pb.OutputConstraint(regex="(yes|no), (yes|no)")
    two = await answer(service, one.turn_id, 2, constraint=words)
    assert set(two.message.content.split(", ")) <= {"yes", "no"}
