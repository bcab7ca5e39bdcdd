"""Does an opened session keep the conversation, exactly, whatever dies, ends early or expires?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from chat_support import calls_block, encode_output
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from resumable_gateways import Gateways, Response, TestGateway, resumable_gateways

from ripresa.cluster.gateway.api_keys import KeyFile, key_digest
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.grpc_server import GrpcServer
from ripresa.cluster.gateway.sessions import Sessions
from ripresa.cluster.gateway.status import RequestError, to_rpc_status
from ripresa.cluster.gateway.validation import ConversationBounds
from ripresa.cluster.sessions.store import LocalSessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable

EOS = 1
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
WEATHER = pb.ToolDefinition(name="get_weather", description="Weather", parameters_json=SCHEMA)
CONFIG = pb.ConversationConfig(tools=[WEATHER])
PREAMBLE = [pb.Message(role=pb.ROLE_SYSTEM, content="You are terse, and know the weather.")]
CALL = calls_block([("get_weather", [("city", "true", "Oslo")])])
# Compact JSON and odd splits: no encoder would write these tokens again.
ANSWERS = {
    1: [*encode_output("Need"), *encode_output("it.</think>"), *encode_output(f"\n\n{CALL}"), EOS],
    2: [*encode_output("Fine.</think>It is "), *encode_output("co"), *encode_output("ld."), EOS],
    3: [*encode_output("Other.</think>No."), EOS],
    4: [*encode_output("Other.</think>Yes."), EOS],
}


def opening(session_id: str = "mine", **changes: Any) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        session_id=session_id, **{"config": CONFIG, "preamble": PREAMBLE, **changes}
    )


def turn(parent: str, *messages: pb.Message, seed: int = 1, **sampling: Any) -> pb.ChatRequest:
    return pb.ChatRequest(
        options=pb.RequestOptions(session_id="mine"),
        turn=pb.SessionTurn(parent_turn_id=parent, messages=messages),
        sampling=pb.SamplingParams(**{"max_tokens": 200, "seed": seed, **sampling}),
        return_token_ids=True,
    )


def user(text: str) -> pb.Message:
    return pb.Message(role=pb.ROLE_USER, content=text)


def service(gateway: TestGateway) -> Sessions:
    sessions = gateway.service.sessions
    assert sessions is not None
    return sessions


async def opened(gateway: TestGateway, request: pb.OpenSessionRequest | None = None) -> pb.Session:
    return await service(gateway).open(request or opening(), Call("open"))


async def found(gateway: TestGateway) -> pb.Session:
    return await service(gateway).get(pb.GetSessionRequest(session_id="mine"), Call("get"))


def ended(messages: Sequence[Response]) -> pb.Finished:
    (finished,) = (message.finished for message in messages if message.HasField("finished"))
    return finished


def generated(messages: Sequence[Any]) -> list[int]:
    return [t for m in messages if m.HasField("delta") for t in m.delta.tokens.token_ids]


def prompts(gateways: Gateways) -> list[tuple[int, ...]]:
    """The prompts that workers got, in order."""
    return [prompt.token_ids for prompt in gateways.asked]


async def refusal(doing: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await doing
    return caught.value


async def test_only_what_is_new_travels_and_every_answer_stands_as_it_was_said() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        first, second = gateways.another(), gateways.another()
        assert (await opened(first)).session_id == "mine"
        told = await first.ask(turn("", user("Weather in Oslo?")))
        one = ended(told)
        assert one.reason == pb.FINISH_REASON_TOOL_CALLS
        call = one.message.tool_calls[0]
        result = pb.Message(role=pb.ROLE_TOOL, tool_call_id=call.id, content="-3")
        # Another gateway, which has never heard of the conversation.
        again = await second.ask(turn(one.turn_id, result, seed=2))
        two = ended(again)
        assert two.message.content == "It is cold."
        before, after = prompts(gateways)[-2:]
        assert after[: len(before)] == before
        assert after[len(before) :][: len(ANSWERS[1])] == tuple(ANSWERS[1])
        session = await found(first)
        assert session.head_turn_id == two.turn_id
        assert session.total_tokens == len(after) + len(ANSWERS[2])
        assert session.home_worker_id == again[0].started.worker_id


async def test_an_older_parent_makes_a_branch() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        one = ended(await gateway.ask(turn("", user("Weather?"), seed=2)))
        two, three = [
            ended(await gateway.ask(turn(one.turn_id, user("And Rome?"), seed=seed)))
            for seed in (3, 4)
        ]
        assert len({one.turn_id, two.turn_id, three.turn_id}) == 3
        ended(await gateway.ask(turn(two.turn_id, user("So?"), seed=2)))
        ended(await gateway.ask(turn(three.turn_id, user("So?"), seed=2)))
        of_two, of_three = prompts(gateways)[-2:]
        assert of_two != of_three
        assert str(tuple(ANSWERS[3]))[1:-1] in str(of_two)
        assert str(tuple(ANSWERS[4]))[1:-1] in str(of_three)


async def test_two_choices_are_two_branches() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        told = await gateway.ask(turn("", user("Rome?"), seed=3, n=2))
        ids = [message.finished.turn_id for message in told if message.HasField("finished")]
        for turn_id in ids:
            assert ended(await gateway.ask(turn(turn_id, user("So?"), seed=2))).turn_id
        assert len(set(ids)) == 2


async def test_the_head_is_computed_when_the_session_opens() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        await gateways.cluster.told()
        told = await gateway.ask(turn("", user("Weather?"), seed=2))
        assert told[0].started.cached_tokens > 0.8 * told[0].started.prompt_tokens


async def test_opening_is_idempotent_and_another_configuration_is_refused() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        first, second = gateways.another(), gateways.another()
        created = (await opened(first)).create_time
        assert (await opened(second)).create_time == created
        error = await refusal(opened(second, opening(preamble=[])))
        assert (error.code, error.reason) == (ErrorCode.ALREADY_EXISTS, "SESSION_EXISTS")
        assert (await opened(first, opening(""))).session_id not in ("", "mine")


async def test_a_closed_session_is_gone_at_once() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        ended(await gateway.ask(turn("", user("Weather?"), seed=2)))
        request = pb.CloseSessionRequest(session_id="mine")
        await service(gateway).close(request, Call("close"))
        for doing in (found(gateway), gateway.ask(turn("", user("?")))):
            error = await refusal(doing)
            assert (error.code, error.reason) == (ErrorCode.NOT_FOUND, "SESSION_NOT_FOUND")
        error = await refusal(service(gateway).close(request, Call("close")))
        assert error.reason == "SESSION_NOT_FOUND"
        resource = error_details_pb2.ResourceInfo()
        details = to_rpc_status(error, "r").details
        assert any(detail.Unpack(resource) for detail in details)
        assert (resource.resource_type, resource.resource_name) == ("session", "mine")


ORPHAN = pb.Message(role=pb.ROLE_TOOL, tool_call_id="c", content="r")


async def test_refusals() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        error = await refusal(gateway.ask(turn("x.0", user("?"))))
        assert (error.code, error.reason) == (ErrorCode.NOT_FOUND, "TURN_NOT_FOUND")
        salted = turn("", user("?"))
        salted.options.cache_salt = "another"
        error = await refusal(gateway.ask(salted))
        assert error.code is ErrorCode.FAILED_PRECONDITION
        assert error.reason == "SESSION_CONFIG_MISMATCH"
        failed = error_details_pb2.PreconditionFailure()
        assert any(detail.Unpack(failed) for detail in to_rpc_status(error, "r").details)
        assert failed.violations[0].subject == "mine"
        nameless = turn("", user("?"))
        nameless.options.session_id = ""
        for request, field in (
            (nameless, "options.session_id"),
            (turn(""), "turn.messages"),
            (turn("", pb.Message(content="?")), "turn.messages[0].role"),
            (turn("", user("?"), ORPHAN), "turn.messages[1]"),
        ):
            with pytest.raises(RipresaError) as caught:
                await gateway.ask(request)
            assert caught.value.field == field
        wrong = opening("other", preamble=[pb.Message(content="?")])
        with pytest.raises(RipresaError) as caught:
            await opened(gateway, wrong)
        assert caught.value.field == "preamble[0].role"
        tool = pb.ToolDefinition(name="a b")
        head = pb.ConversationConfig(tools=[tool])
        with pytest.raises(RipresaError) as caught:
            await opened(gateway, opening("other", config=head))
        assert caught.value.field == "config.tools[0].name"
        endless = "a word " * 4000
        too_long = pb.Message(role=pb.ROLE_SYSTEM, content=endless)
        error = await refusal(opened(gateway, opening("other", preamble=[too_long])))
        assert (error.reason, error.field) == ("CONTEXT_LENGTH_EXCEEDED", "preamble")
        error = await refusal(gateway.ask(turn("", user(endless))))
        assert (error.reason, error.field) == ("CONTEXT_LENGTH_EXCEEDED", "turn.messages")
        for ttl in (Duration(), Duration(seconds=86401), Duration(seconds=1, nanos=-5)):
            with pytest.raises(RipresaError) as caught:
                await opened(gateway, opening("other", idle_ttl=ttl))
            assert caught.value.field == "idle_ttl"


async def test_a_turn_of_too_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        monkeypatch.setattr(service(gateway), "_bounds", ConversationBounds(max_messages=2))
        with pytest.raises(InvalidArgument, match=r"gateway\.max_messages") as caught:
            await gateway.ask(turn("", *[user("?")] * 3))
        assert caught.value.field == "turn.messages"


async def test_another_tenant_has_other_sessions() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        stranger = Call("get", tenant="stranger")
        request = pb.GetSessionRequest(session_id="mine")
        error = await refusal(service(gateway).get(request, stranger))
        assert error.reason == "SESSION_NOT_FOUND"


LIMITS = {
    "models": ("models: [another]", "TENANT_FORBIDDEN"),
    "tokens": ("tokens_per_minute: 1", "TENANT_QUOTA"),
    "running": ("max_running: 1", "TENANT_QUOTA"),
}


@pytest.mark.parametrize("limit", LIMITS)
async def test_whoever_may_not_chat_opens_no_session(limit: str, tmp_path: Path) -> None:
    setting, reason = LIMITS[limit]
    file = tmp_path / "keys.yaml"
    digest = key_digest("rk")
    file.write_text(f"tenants: {{blue: {{keys: ['{digest}'], {setting}}}}}")
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another(KeyFile(file), "blue")
        running = None
        if limit == "tokens":
            await service(gateway).open(opening("first"), Call("open", tenant="blue"))
        elif limit == "running":
            running = gateway.open(pb.GenerateRequest(text="a"))
            await anext(running)
        before, num_asked = (await gateways.store.stats()).num_sessions, len(gateways.asked)
        error = await refusal(service(gateway).open(opening(), Call("open", tenant="blue")))
        assert error.reason == reason
        assert (await gateways.store.stats()).num_sessions == before
        assert len(gateways.asked) == num_asked
        if running is not None:
            await running.aclose()


async def test_a_head_that_fails_on_its_worker_is_opened_all_the_same() -> None:
    async with resumable_gateways(ANSWERS, num_decoders=1) as gateways:
        gateway = gateways.another()
        await gateways.cluster.kill("d0")
        assert (await opened(gateway)).session_id == "mine"


async def test_an_answer_that_was_cut_is_no_turn() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        stream = gateway.open(turn("", user("Weather?"), seed=2))
        for _ in range(4):
            await anext(stream)
        await stream.aclose()
        assert (await found(gateway)).head_turn_id == ""


async def test_a_turn_outlives_its_gateway() -> None:
    """The client resumes it elsewhere, and goes on from it."""
    async with resumable_gateways(ANSWERS) as gateways:
        first, second = gateways.another(), gateways.another()
        await opened(first)
        read = await first.read(turn("", user("Weather?"), seed=1), 3)
        rest = await second.resume(read[0].started.stream_id, 3)
        one = ended(rest)
        assert ended(await second.resume(read[0].started.stream_id)).turn_id == one.turn_id
        assert (await found(second)).head_turn_id == one.turn_id
        assert generated([*read, *rest]) == ANSWERS[1][:-1]
        call = one.message.tool_calls[0]
        result = pb.Message(role=pb.ROLE_TOOL, tool_call_id=call.id, content="-3")
        assert ended(await second.ask(turn(one.turn_id, result, seed=2))).turn_id


async def test_a_session_outlives_its_worker() -> None:
    async with resumable_gateways(ANSWERS, num_decoders=2) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        told = await gateway.ask(turn("", user("Weather?"), seed=2))
        await gateways.cluster.kill(told[0].started.worker_id)
        again = await gateway.ask(turn(ended(told).turn_id, user("And Rome?"), seed=3))
        assert ended(again).message.content == "No."
        before, after = prompts(gateways)[-2:]
        assert after[: len(before)] == before


def end_place(messages: list[Response]) -> int:
    """The sequence number of `finished`."""
    return next(m.sequence for m in messages if m.HasField("finished"))


async def test_an_answer_outlives_a_store_that_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)

        async def away(*_: object) -> None:
            raise Unavailable("the session store is out of reach")

        monkeypatch.setattr(gateways.store, "append", away)
        told = await gateway.ask(turn("", user("Weather?"), seed=2))
        assert told[-1].HasField("completed")
        end = ended(told)
        assert end.message.content == "It is cold."
        assert (end.turn_id, end.turn_error) == ("", "SESSION_STORE_UNAVAILABLE")
        monkeypatch.undo()
        # The stream is still kept: told again, it tells the store again.
        assert ended(await gateway.resume(told[0].started.stream_id, end_place(told))).turn_id


async def test_a_turn_of_a_closed_session_is_none_of_the_one_that_has_its_id_now() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway, second = gateways.another(), gateways.another()
        await opened(gateway)
        stream = gateway.open(turn("", user("Weather?"), seed=2))
        begun = [await anext(stream) for _ in range(3)]
        await service(gateway).close(pb.CloseSessionRequest(session_id="mine"), Call("close"))
        await opened(second, opening(preamble=[user("Another one entirely.")]))
        told = [*begun, *[message async for message in stream]]
        resumed = await second.resume(begun[0].started.stream_id)
        for messages in (told, resumed):
            one = ended(messages)
            assert one.message.content == "It is cold."
            assert (one.turn_id, one.turn_error) == ("", "SESSION_NOT_FOUND")
            assert messages[-1].HasField("completed")
        assert (await found(gateway)).head_turn_id == ""


async def test_a_turn_that_is_sent_again_to_a_session_opened_anew_is_a_turn_of_that_one() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        request = turn("", user("Weather?"), seed=2)
        request.options.request_id = "named"
        await opened(gateway)
        one = ended(await gateway.ask(request))
        assert ended(await gateway.ask(request)).turn_id == one.turn_id
        await service(gateway).close(pb.CloseSessionRequest(session_id="mine"), Call("close"))
        await opened(gateway)
        two = ended(await gateway.ask(request))
        assert two.turn_error == ""
        assert two.turn_id != one.turn_id
        assert (await found(gateway)).head_turn_id == two.turn_id
        # From now on its own answer is what is told again.
        assert ended(await gateway.ask(request)).turn_id == two.turn_id


CUT = {"its length": {"max_tokens": 3}, "a stop string": {"stop": ["co"]}}


@pytest.mark.parametrize("by", CUT)
async def test_tokens_of_an_answer_that_the_model_did_not_end_count(by: str) -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        first, second = gateways.another(), gateways.another()
        head = await opened(first)
        assert 0 < head.total_tokens == (await found(first)).total_tokens
        told = await first.ask(turn("", user("Weather?"), seed=2, **CUT[by]))
        num_prompt = told[0].started.prompt_tokens
        # The head is a prefix of the first turn's prompt, and the answer follows it.
        assert head.total_tokens < num_prompt
        assert (
            gateways.asked[-1].token_ids[head.total_tokens]
            == first.service.chat_reader().encoding.user_id
        )
        num_said = told[-1].completed.usage.completion_tokens
        assert num_said >= 3
        assert (await found(first)).total_tokens == num_prompt + num_said
        await service(first).close(pb.CloseSessionRequest(session_id="mine"), Call("close"))
        await opened(first)
        told = await first.read(turn("", user("Weather?"), seed=2, **CUT[by]), 3)
        rest = await second.resume(told[0].started.stream_id)
        num_said = rest[-1].completed.usage.completion_tokens
        assert (await found(second)).total_tokens == num_prompt + num_said


async def test_an_answer_outlives_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies during a turn; its successor knows no session."""
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        await opened(gateway)
        append, successor = gateways.store.append, LocalSessionStore()
        monkeypatch.setattr(gateways.store, "append", successor.append)
        told = await gateway.ask(turn("", user("Weather?"), seed=2))
        resumed = await gateway.resume(told[0].started.stream_id)
        for messages in (told, resumed):
            one = ended(messages)
            assert one.message.content == "It is cold."
            assert (one.turn_id, one.turn_error) == ("", "SESSION_NOT_FOUND")
            assert messages[-1].HasField("completed")
        # The same store again: a later `Resume` keeps the turn.
        monkeypatch.setattr(gateways.store, "append", append)
        one = ended(await gateway.resume(told[0].started.stream_id))
        assert (await found(gateway)).head_turn_id == one.turn_id
        assert one.turn_error == ""


async def test_turns_go_beyond_the_size_of_one_message() -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        gateway = gateways.another()
        server = GrpcServer(
            gateway.service, host="127.0.0.1", port=0, max_message_bytes=1024, drain_notice_s=0
        )
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                sessions = ripresa_pb2_grpc.SessionsStub(channel)
                await sessions.OpenSession(opening())
                stub = ripresa_pb2_grpc.InferenceStub(channel)
                parent = ""
                for _ in range(3):
                    call = stub.Chat(turn(parent, user("a word " * 100), seed=3))
                    told = [message async for message in call]
                    parent = ended(told).turn_id
                session = await sessions.GetSession(pb.GetSessionRequest(session_id="mine"))
                assert session.head_turn_id == parent
                assert session.total_tokens > 600
                await sessions.CloseSession(pb.CloseSessionRequest(session_id="mine"))
        finally:
            await server.stop(0)
