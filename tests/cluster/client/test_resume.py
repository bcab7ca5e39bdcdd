"""Does a stream that breaks go on where it stopped, at whatever gateway, and end when it cannot?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_inference import Script, chat_script, scripted_gateways
from suspensions import Cancelling, for_every_wait

from ripresa.cluster.client import (
    Answer,
    AsyncClient,
    Client,
    Event,
    NotFoundError,
    ServerError,
    UnavailableError,
    user,
)
from ripresa.cluster.client.exchange import MAX_RESUMES, Exchange
from ripresa.cluster.client.requests import generate_request
from ripresa.protos import ripresa_pb2 as pb


def text_script() -> list[pb.GenerateResponse]:
    events = [
        pb.GenerateResponse(started=pb.Started(stream_id="stream-1")),
        *(pb.GenerateResponse(delta=pb.TokenDelta(text=text, token_ids=[7])) for text in "abc"),
        pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH)),
        pb.GenerateResponse(completed=pb.Completed()),
    ]
    for sequence, event in enumerate(events):
        event.sequence = sequence
    return events


def chat_events(addresses: Sequence[str]) -> tuple[list[Event], Answer]:
    with Client(*addresses, api_key="k") as client:
        stream = client.chat([user("hi")])
        return list(stream), stream.answer()


@pytest.fixture(scope="module")
def whole() -> tuple[list[Event], Answer]:
    """What an unbroken stream gives."""
    with scripted_gateways(Script(chat_script())) as addresses:
        return chat_events(addresses)


def test_an_unbroken_stream_is_asked_for_once(whole: tuple[list[Event], Answer]) -> None:
    events, answer = whole
    assert len(events) == 10
    assert answer.message == chat_script()[-2].finished.message
    assert (answer.turn_id, answer.tool_calls[0].arguments()) == ("t1", {"city": "Oslo"})


@given(data=st.data(), ends_early=st.booleans())
@settings(max_examples=12, deadline=None)
def test_wherever_streams_break_the_events_are_the_same(
    whole: tuple[list[Event], Answer], data: st.DataObject, ends_early: bool
) -> None:
    """The first call brings at least `started`; each resume at least one message more."""
    script = Script(chat_script(), ends_early=ends_early)
    left = len(script.responses)
    while left > 1 and data.draw(st.booleans()):
        script.breaks.append(data.draw(st.integers(1, left - 1)))
        left -= script.breaks[-1]
    starts = [sum(script.breaks[:number]) for number in range(1, len(script.breaks) + 1)]
    with scripted_gateways(script) as addresses:
        assert chat_events(addresses) == whole
    request, *resumes = script.asked
    assert isinstance(request, pb.ChatRequest)
    assert [(resume.stream_id, resume.next_sequence) for resume in resumes] == [
        ("stream-1", start) for start in starts
    ]
    assert {told.get("authorization") for told in script.metadata} == {"Bearer k"}


async def test_a_broken_stream_goes_on_asynchronously(whole: tuple[list[Event], Answer]) -> None:
    script = Script(chat_script(), breaks=[3, 2, 1])
    with scripted_gateways(script) as addresses:
        async with AsyncClient(*addresses) as client:
            stream = client.chat([user("hi")])
            events = [event async for event in stream]
            assert (events, await stream.answer()) == whole
    assert len(script.asked) == 4


async def test_whoever_cancels_leaves_nothing_running() -> None:
    """At every await of an answer whose stream breaks and goes on."""

    async def scenario(cancelling: Cancelling[Answer]) -> bool:
        script = Script(chat_script(), breaks=[3])
        with scripted_gateways(script) as addresses:
            async with AsyncClient(*addresses) as client:
                answer = await cancelling(lambda: client.chat([user("hi")]).answer())
                for _ in range(len(script.asked)):
                    await asyncio.to_thread(script.ended.get, timeout=30)
        return answer is not None

    assert await for_every_wait(scenario) > 4


def test_a_completion_goes_on(whole: tuple[list[Event], Answer]) -> None:
    script = Script(text_script(), breaks=[2])
    with scripted_gateways(script) as addresses, Client(*addresses) as client:
        answer = client.generate("hi").answer()
    assert (answer.text, answer.token_ids, answer.reason) == ("abc", (7, 7, 7), "length")


@pytest.mark.parametrize("kill_after", [1, 4, 8])
def test_a_dead_gateways_stream_goes_on_at_another(
    whole: tuple[list[Event], Answer], kill_after: int
) -> None:
    script = Script(chat_script(), kill_after=kill_after)
    with scripted_gateways(script, count=2) as addresses:
        assert chat_events(addresses) == whole
    assert [type(request) for request in script.asked] == [pb.ChatRequest, pb.ResumeRequest]


async def test_a_dead_gateways_stream_goes_on_at_another_asynchronously(
    whole: tuple[list[Event], Answer],
) -> None:
    script = Script(chat_script(), kill_after=4)
    with scripted_gateways(script, count=2) as addresses:
        async with AsyncClient(*addresses) as client:
            stream = client.chat([user("hi")])
            assert [event async for event in stream] == whole[0]


def test_a_refused_resume_tells_what_broke_the_stream() -> None:
    script = Script(chat_script(), breaks=[3])
    script.refusal = (grpc.StatusCode.NOT_FOUND, "no such stream")
    with scripted_gateways(script) as addresses, Client(*addresses) as client:
        stream = client.chat([user("hi")])
        with pytest.raises(UnavailableError, match="Socket closed") as broken:
            stream.answer()
    assert isinstance(broken.value.__cause__, NotFoundError)
    assert len(script.asked) == 2


def test_resumes_that_bring_nothing_come_to_an_end() -> None:
    script = Script(chat_script(), breaks=[3] + [0] * 100, ends_early=True)
    with scripted_gateways(script) as addresses, Client(*addresses) as client:
        with pytest.raises(UnavailableError) as broken:
            client.chat([user("hi")]).answer()
        assert broken.value.reason == "STREAM_BROKEN"
    assert len(script.asked) == 1 + MAX_RESUMES


def test_a_stream_without_an_id_cannot_go_on() -> None:
    script = Script(chat_script(stream_id=""), breaks=[3])
    with (
        scripted_gateways(script) as addresses,
        Client(*addresses) as client,
        pytest.raises(UnavailableError, match="Socket closed"),
    ):
        client.chat([user("hi")]).answer()
    assert len(script.asked) == 1


def test_a_gap_is_an_error_and_a_repetition_none() -> None:
    messages = text_script()
    exchange = Exchange(generate_request("hi", {}, {}, False), 10)
    for message in [*messages[:3], *messages[:4]]:
        list(exchange.read(message))
    assert exchange.reader.answer.text == "abc"
    with pytest.raises(ServerError) as gap:
        list(exchange.read(messages[5]))
    assert gap.value.reason == "STREAM_GAP"


@given(st.lists(st.floats(0.0, 3.0), max_size=12))
def test_calls_keep_to_one_deadline(passed: list[float]) -> None:
    now = 0.0
    exchange = Exchange(generate_request("hi", {}, {}, False), 10, clock=lambda: now)
    list(exchange.read(text_script()[0]))
    for seconds in passed:
        call = exchange.next_call()
        assert call.timeout_s == pytest.approx(max(0.0, 10 - now) - call.pause_s)
        assert call.pause_s >= 0
        assert call.timeout_s >= 0
        now += seconds
        try:
            exchange.ended()
        except UnavailableError:
            break
