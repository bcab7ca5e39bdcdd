"""Does the client say and hear what the gateway does, and repeat only what may be repeated?"""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from chat_support import calls_block, encode_output
from gateway_thread import GatewayThread, gateway_thread

from ripresa.cluster.client import (
    AsyncClient,
    CancelledError,
    Client,
    Completed,
    Content,
    DeadlineError,
    Finished,
    InvalidRequestError,
    NotAuthenticatedError,
    NotFoundError,
    OverloadedError,
    PreconditionError,
    Reasoning,
    Started,
    Text,
    Tokens,
    ToolCallPart,
    ToolCallReady,
    UnavailableError,
    system,
    tool,
    tool_result,
    user,
)
from ripresa.cluster.client.errors import call_error
from ripresa.cluster.client.policy import CHANNEL_OPTIONS
from ripresa.cluster.gateway.api_keys import KeyFile, key_digest
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub
from ripresa.workers.errors import (
    ErrorCode,
    InvalidArgument,
    ResourceExhausted,
    RipresaError,
    Unavailable,
    Unreachable,
)

EOS = 1
WEATHER = tool(
    "get_weather",
    "Weather",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
CALL = "Look it up.</think>One moment.\n\n" + calls_block(
    [("get_weather", [("city", "true", "Oslo")]), ("get_weather", [("city", "true", "Rome")])]
)


def test_an_answer(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        stream = client.generate("hi", return_token_ids=True, max_tokens=2, seed=3)
        events = list(stream)
        answer = stream.answer()
    kinds = [type(event) for event in events]
    assert (kinds[0], kinds[-2:]) == (Started, [Finished, Completed])
    assert set(kinds[1:-2]) == {Tokens, Text}
    assert answer.started is not None
    assert (answer.started.seed, answer.started.worker_id) == (3, "decode-0")
    assert (answer.token_ids, answer.reason) == ((40, 41), "length")
    assert answer.text == "".join(event.text for event in events if isinstance(event, Text))
    assert answer.usage.computed_tokens == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 2


async def test_the_same_answer_asynchronously(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        expected = client.generate("hi", max_tokens=2).answer()
    async with AsyncClient(gateway.address) as aio:
        stream = aio.generate("hi", max_tokens=2)
        texts = [event.text async for event in stream if isinstance(event, Text)]
        answer = await stream.answer()
    assert answer.text == "".join(texts) == expected.text
    assert answer.usage == expected.usage


def test_choices_are_kept_apart(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        answer = client.generate("hi", return_token_ids=True, max_tokens=3, n=2).answer()
    ids = {number: tuple(choice.token_ids) for number, choice in answer.choices.items()}
    assert ids == {0: (40, 41, 42), 1: (40, 41, 42)}


async def test_small_questions(gateway: GatewayThread, tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("hi"))
    with Client(gateway.address) as client:
        assert client.tokenize("hi") == ids
        assert client.detokenize(ids) == "hi"
        assert [model.id for model in client.models()] == ["tiny"]
        assert not client.abort("nobody")
    async with AsyncClient(gateway.address) as aio:
        assert await aio.tokenize("hi") == ids
        assert await aio.detokenize(ids) == "hi"
        assert [model.id for model in await aio.models()] == ["tiny"]
        assert not await aio.abort("nobody")


async def test_a_chat_with_tools(chatting: GatewayThread, demo: Tokenizer) -> None:
    chatting.router.script = (*encode_output(CALL), EOS)
    messages = [system("Be brief."), user("Weather?")]
    with Client(chatting.address) as client:
        stream = client.chat(messages, tools=[WEATHER], effort="low", max_tokens=300)
        events = list(stream)
        answer = stream.answer()
    assert (answer.reasoning, answer.content) == ("Look it up.", "One moment.")
    assert answer.reason == "tool_calls"
    assert [call.arguments() for call in answer.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [call.id for call in answer.message.tool_calls] == [c.id for c in answer.tool_calls]
    # The first tool may start before the second call is written.
    ready = [event for event in events if isinstance(event, ToolCallReady)]
    assert [event.call for event in ready] == list(answer.tool_calls)
    second = next(
        place
        for place, event in enumerate(events)
        if isinstance(event, ToolCallPart) and event.index == 1
    )
    assert events.index(ready[0]) < second
    said = {Reasoning: "", Content: ""}
    for event in events:
        if isinstance(event, Reasoning | Content):
            said[type(event)] += event.text
    assert said == {Reasoning: answer.reasoning, Content: answer.content}

    results = [tool_result(call.id, "-3") for call in answer.tool_calls]
    history = [*messages, answer.message, *results]
    chatting.router.script = (*encode_output("It is cold.</think>-3"), EOS)
    async with AsyncClient(chatting.address) as aio:
        end = await aio.chat(history, tools=[WEATHER], effort="low", max_tokens=300).answer()
        prompt = await aio.tokenize_chat(history, tools=[WEATHER], effort="low")
    with Client(chatting.address) as client:
        assert prompt == client.tokenize_chat(history, tools=[WEATHER], effort="low")
        with pytest.raises(InvalidRequestError) as too_long:
            client.tokenize_chat(history, cache_salt="x" * 2000)
    assert too_long.value.field == "cache_salt"
    assert (end.content, end.reason, end.tool_calls) == ("-3", "stop", ())
    first, last = (prompt.token_ids for prompt in chatting.router.seen)
    assert last == tuple(prompt.token_ids)
    assert last[: len(first)] == first
    assert "Reasoning Effort: 50" in prompt.prompt


def test_a_cut_call_says_so(chatting: GatewayThread) -> None:
    chatting.router.script = tuple(encode_output(CALL))
    with Client(chatting.address) as client:
        tokens = len(encode_output(CALL.partition("Oslo")[0]))
        answer = client.chat([user("?")], tools=[WEATHER], max_tokens=tokens).answer()
    (call,) = answer.tool_calls
    assert answer.reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        call.arguments()


def test_options_travel(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        client.generate(
            [40, 41],
            max_tokens=1,
            options={"request_id": "mine", "session_id": "s", "cache_salt": "x", "tail": "full"},
        ).answer()
        refused = client.generate("hi", options={"priority": 3}, max_tokens=1)
        assert refused.request.options.priority == 3
    (seen,) = gateway.router.seen
    assert (seen.request_id, seen.token_ids, seen.tail) == ("mine", (40, 41), "full")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_q": 2.0}, "sampling.top_q: cannot be sent"),
        ({"max_tokens": -1}, "sampling.max_tokens: cannot be sent"),
        ({"options": {"sesion_id": "a"}}, "options: sesion_id: there is no such option"),
        ({"options": {"tail": "long"}}, "options.tail: cannot be sent.*LONG"),
        ({"options": {"request_id": 7}}, "options.request_id: cannot be sent"),
        ({"options": {"max_queue_time_s": 1e300}}, "options.max_queue_time_s: cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(
    gateway: GatewayThread, arguments: dict[str, object], words: str
) -> None:
    with Client(gateway.address) as client, pytest.raises(InvalidArgument, match=words):
        client.generate("hi", **arguments)  # type: ignore[arg-type]


def test_an_error_says_everything(gateway: GatewayThread) -> None:
    gateway.router.failure = Unavailable("the worker died", retry_after_s=2.5)
    with Client(gateway.address) as client:
        with pytest.raises(UnavailableError) as lost:
            client.generate("hi", options={"request_id": "mine"}).answer()
        with pytest.raises(InvalidRequestError) as wrong:
            client.generate("hi", top_p=2.0).answer()
        with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
            client.detokenize([10**6])
        with pytest.raises(NotFoundError) as absent:
            client.generate("hi", options={"model": "other"}).answer()
    error = lost.value
    assert isinstance(error, RipresaError)
    assert (error.code, error.message) == (ErrorCode.UNAVAILABLE, "the worker died")
    assert (error.reason, error.request_id, error.retry_after_s) == ("UNAVAILABLE", "mine", 2.5)
    assert (wrong.value.field, wrong.value.reason) == ("sampling.top_p", "INVALID_REQUEST")
    assert (absent.value.field, absent.value.reason) == ("options.model", "MODEL_NOT_FOUND")
    assert absent.value.message.startswith("model 'other'")
    assert absent.value.metadata == {}
    advice = {error.advice, wrong.value.advice, absent.value.advice}
    assert len(advice) == 3
    copy = pickle.loads(pickle.dumps(wrong.value))
    assert (type(copy), vars(copy), str(copy)) == (
        InvalidRequestError,
        vars(wrong.value),
        str(wrong.value),
    )


async def test_an_error_asynchronously(gateway: GatewayThread) -> None:
    async with AsyncClient(gateway.address) as client:
        with pytest.raises(InvalidRequestError) as wrong:
            await client.generate("hi", top_p=2.0).answer()
        with pytest.raises(PreconditionError, match="use Generate"):
            await client.tokenize_chat([user("hi")])
    assert wrong.value.field == "sampling.top_p"


@pytest.mark.parametrize("refusal", [Unavailable, ResourceExhausted])
def test_an_unavailable_or_full_start_is_repeated(
    gateway: GatewayThread, refusal: type[Unavailable]
) -> None:
    gateway.router.refusals = [refusal("not yet", retry_after_s=0.01)] * 2
    with Client(gateway.address) as client:
        client.generate("hi", max_tokens=1, options={"request_id": "same"}).answer()
    assert [prompt.request_id for prompt in gateway.router.seen] == ["same"] * 3


def test_a_lost_stream_is_asked_for_once(gateway: GatewayThread) -> None:
    """The pause that its status names is one before the request, which is sent again."""
    asked = []

    async def find_stream(stream_id: str, worker_id: str) -> None:
        asked.append(stream_id)
        raise Unreachable(f"decode worker {worker_id} is gone")

    gateway.router.find_stream = find_stream  # type: ignore[method-assign]
    with grpc.insecure_channel(gateway.address, options=CHANNEL_OPTIONS) as channel:
        call = InferenceStub(channel).Resume(pb.ResumeRequest(stream_id="s.decode-0"), timeout=60)
        with pytest.raises(grpc.RpcError) as lost:
            next(call)
    error = call_error(lost.value)
    assert (type(error), error.reason, error.retry_after_s) == (UnavailableError, "WORKER_LOST", 1)
    assert asked == ["s"]


def test_a_full_cluster_is_told_in_the_end(gateway: GatewayThread) -> None:
    gateway.router.refusals = [ResourceExhausted("full", retry_after_s=0.01)] * 9
    with Client(gateway.address) as client, pytest.raises(OverloadedError) as full:
        client.generate("hi", max_tokens=1).answer()
    assert full.value.retry_after_s == 0.01
    ids = [prompt.request_id for prompt in gateway.router.seen]
    assert ids == [full.value.request_id] * 5


def test_an_aborted_request_is_not_repeated(gateway: GatewayThread) -> None:
    gateway.router.refusals = [RipresaError(ErrorCode.CANCELLED, "aborted while it waited")]
    with Client(gateway.address) as client, pytest.raises(CancelledError, match="while it waited"):
        client.generate("hi", max_tokens=1).answer()
    assert len(gateway.router.seen) == 1


def test_a_stream_that_the_server_ends_is_not_repeated(gateway: GatewayThread) -> None:
    gateway.router.failure = Unavailable("the worker died")
    with Client(gateway.address) as client, pytest.raises(UnavailableError, match="worker died"):
        client.generate("hi", max_tokens=3).answer()
    assert len(gateway.router.seen) == 1


def test_a_restart_between_calls_does_not_show(model: ServedModel, tokenizer: Tokenizer) -> None:
    answers = []
    with socket.socket() as held:
        # Does not listen; keeps others from the port while nobody else does.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with gateway_thread(model, tokenizer, port) as first:
            client = Client(first.address)
            answers.append(client.generate("hi", max_tokens=1).answer())
        later = threading.Thread(
            target=lambda: answers.append(client.generate("hi", max_tokens=1).answer())
        )
        later.start()  # nobody listens now
        with client, gateway_thread(model, tokenizer, port):
            later.join(60)
    assert [answer.reason for answer in answers] == ["length", "length"]


def hold(gateway: GatewayThread) -> None:
    """Streams stop behind their first token."""
    asyncio.run_coroutine_threadsafe(_clear(gateway.router.hold), gateway.loop).result(30)


async def _clear(event: asyncio.Event) -> None:
    event.clear()


def wait_until_closed(gateway: GatewayThread) -> None:
    closed = asyncio.run_coroutine_threadsafe(gateway.router.all_closed.wait(), gateway.loop)
    assert closed.result(30)


def test_leaving_a_stream_cancels_the_request(gateway: GatewayThread) -> None:
    hold(gateway)
    with Client(gateway.address) as client:
        with client.generate("hi", max_tokens=9) as stream:
            assert isinstance(next(stream), Started)
        wait_until_closed(gateway)
        assert list(stream) == []


async def test_leaving_a_stream_cancels_the_request_asynchronously(gateway: GatewayThread) -> None:
    hold(gateway)
    async with AsyncClient(gateway.address) as client:
        async with client.generate("hi", max_tokens=9) as stream:
            assert isinstance(await anext(stream), Started)
        await asyncio.to_thread(wait_until_closed, gateway)
        stream = client.generate("hi", max_tokens=9)
        assert isinstance(await anext(stream), Started)
        reading = asyncio.create_task(stream.answer())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.to_thread(wait_until_closed, gateway)


def test_another_thread_ends_a_stream(gateway: GatewayThread) -> None:
    hold(gateway)
    with Client(gateway.address) as client:
        stream = client.generate("hi", max_tokens=9)
        next(stream)
        threading.Timer(0.05, stream.close).start()
        assert Completed not in {type(event) for event in stream}
        wait_until_closed(gateway)


async def test_a_deadline_is_told(gateway: GatewayThread) -> None:
    hold(gateway)
    with Client(gateway.address) as client, pytest.raises(DeadlineError):
        client.generate("hi", max_tokens=9, timeout_s=0.2).answer()
    async with AsyncClient(gateway.address, timeout_s=0.2) as aio:
        with pytest.raises(DeadlineError):
            await aio.generate("hi", max_tokens=9).answer()
    await asyncio.to_thread(wait_until_closed, gateway)


async def test_nobody_there() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match="ripresa serve"):
        client.wait_until_connected(0.1)
    with Client("127.0.0.1:1", connect_timeout_s=0.1) as client:
        with pytest.raises(UnavailableError) as nobody:
            client.models()
        assert nobody.value.reason == "NO_GATEWAY"
    async with AsyncClient("127.0.0.1:1", connect_timeout_s=0.1) as aio:
        with pytest.raises(UnavailableError, match="ripresa serve"):
            await aio.generate("hi").answer()


@pytest.mark.parametrize("addresses", [(), ("a:1", "127.0.0.1:2"), ("127.0.0.1:1", "[::1]:2")])
def test_addresses_that_cannot_stand_together(addresses: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument, match="addresses"):
        Client(*addresses)


def test_the_readme_runs(
    chatting: GatewayThread, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatting.router.script = (*encode_output("Hm.</think>Good day."), EOS)
    text = (repository / "cluster" / "client" / "README.md").read_text()
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    assert len(lines) > 5
    exec("\n".join(lines).replace("127.0.0.1:9000", chatting.address), {})
    assert capsys.readouterr().out.startswith("Good day.")


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = (
        *("torch", "ray", "numpy", "fastapi", "tokenizers", "deepseek_recipe", "click", "yaml"),
        *("ripresa.cluster.gateway", "ripresa.cluster.config"),
    )
    code = (
        "import sys, ripresa.cluster.client;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_that_asks_for_a_key(
    model: ServedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants: {{red: {{keys: ['{key_digest('rk-red')}'], tokens_per_minute: 1}}}}")
    with gateway_thread(model, tokenizer, keys=KeyFile(path)) as running:
        with Client(running.address, api_key="rk-red") as client:
            assert client.tokenize("hi")
            assert client.generate("hi", max_tokens=1).answer().reason == "length"
            # Minutes are not waited without a word.
            with pytest.raises(OverloadedError) as limited:
                client.generate("hi", max_tokens=1).answer()
            assert limited.value.reason == "TENANT_QUOTA"
            assert (limited.value.retry_after_s or 0) > 60
        with Client(running.address) as client, pytest.raises(NotAuthenticatedError) as refused:
            client.generate("hi", max_tokens=1).answer()
        assert (refused.value.code, refused.value.reason) == (
            ErrorCode.UNAUTHENTICATED,
            "BAD_KEY",
        )
