"""Do streams and sessions survive their gateways and workers, one after the other?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import grpc
import jsonschema
import pytest
from chat_support import encode_output
from reference_engine import Question, ReferenceEngine
from served_cluster import (
    ServedCluster,
    Stream,
    eventually,
    generate_request,
    kill,
    kill_processes,
)

from ripresa.cluster.app import GATEWAY
from ripresa.cluster.client import Client
from ripresa.cluster.client.policy import CHANNEL_OPTIONS
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub, SessionsStub

REGEX = "[a-z]{6,9}( [0-9]{3}){60}"
SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-f]{12,16}$"},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["code", "numbers"],
    "additionalProperties": False,
}


@pytest.fixture
def question(agent_tokens: tuple[int, ...]) -> Question:
    """A stream that takes seconds: longer than it takes to end whoever tells it."""
    return Question(agent_tokens[:300], max_tokens=300, temperature=0.8, top_p=0.9, seed=1234)


@pytest.fixture(autouse=True)
def whole_again(resumable: ServedCluster) -> Iterator[None]:
    """The cluster is whole before the test, and whole and idle after it."""
    resumable.wait_until_whole()
    yield
    resumable.wait_until_whole()
    resumable.assert_idle()


def test_a_stream_goes_on_from_another_gateway(
    resumable: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    stream = resumable.open(question)
    stream.read(5)
    resumable.kill_gateway_of(stream)
    assert 5 <= len(stream.answer.token_ids) < question.max_tokens
    assert resumable.resume(stream).end().tokens == reference.answer(question)


def test_a_constrained_stream_goes_on_from_another_gateway(
    resumable: ServedCluster, question: Question
) -> None:
    request = generate_request(question)
    request.sampling.ignore_eos = False
    request.sampling.constraint.regex = REGEX
    undisturbed = resumable.ask(request)
    assert re.fullmatch(REGEX, undisturbed.text)
    stream = resumable.open(request)
    stream.read(5)
    resumable.kill_gateway_of(stream)
    resumed = resumable.resume(stream)
    # Another worker goes on in the middle of the grammar.
    resumed.read(5)
    assert resumed.answer.started is not None
    kill(resumable.listed()[resumed.answer.started.worker_id])
    assert resumed.end().tokens == undisturbed.tokens


def test_the_client_goes_on_by_itself_when_every_gateway_dies(
    resumable: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    gateways = resumable.pids(GATEWAY)
    with Client(resumable.address, timeout_s=600) as client:
        stream = client.generate(
            question.token_ids,
            return_token_ids=True,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            top_p=question.top_p,
            seed=question.seed,
            ignore_eos=True,
            options={"disable_cache_read": True},
        )
        for _ in range(5):
            next(stream)
        kill_processes(gateways)
        answer = stream.answer()
    assert answer.token_ids == reference.answer(question)
    # Who saw the beginning is dead: the end was told by a gateway that was asked to resume.
    assert answer.completed is not None
    assert answer.completed.timings.time_to_first_token_s is None


def test_a_resumed_stream_outlives_its_worker(
    resumable: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    question = replace(question, seed=77)
    stream = resumable.open(question)
    stream.read(5)
    resumable.kill_gateway_of(stream)
    resumed = resumable.resume(stream)
    resumed.read(5)
    assert resumed.answer.started is not None
    kill(resumable.listed()[resumed.answer.started.worker_id])
    assert resumed.end().tokens == reference.answer(question)


def test_a_stream_that_lost_gateway_and_worker_says_so(
    resumable: ServedCluster, question: Question
) -> None:
    stream: Stream = resumable.open(question)
    stream.read(5)
    assert stream.answer.started is not None
    worker = resumable.listed()[stream.answer.started.worker_id]
    resumable.kill_gateway_of(stream)
    kill(worker)
    answer = resumable.resume(stream).end()
    assert answer.code is grpc.StatusCode.UNAVAILABLE
    assert "send the request again" in answer.details


def test_what_the_model_said_outlives_the_gateway_that_heard_it(resumable: ServedCluster) -> None:
    config = pb.ConversationConfig(tools=[pb.ToolDefinition(name="search")])
    messages = [
        pb.Message(role=pb.ROLE_SYSTEM, content="You are terse. " * 50),
        pb.Message(role=pb.ROLE_USER, content="Is it cold in Oslo?"),
    ]

    def tokenized(channel: grpc.Channel) -> list[int]:
        """The conversation's next prompt."""
        asked = pb.TokenizeRequest(
            conversation=pb.FullConversation(config=config, messages=messages)
        )
        answer = InferenceStub(channel).Tokenize(asked, timeout=600, wait_for_ready=True)
        return list(answer.token_ids)

    request = pb.ChatRequest(
        full=pb.FullConversation(config=config, messages=messages),
        # A model of noise thinks for some tokens, then says what it must, and calls nothing.
        sampling=pb.SamplingParams(
            max_tokens=500,
            seed=2,
            temperature=1.0,
            logit_bias={encode_output("</think>")[0]: 15.5, encode_output("It is cold.")[0]: 20.0},
            constraint=pb.OutputConstraint(regex="It is cold\\."),
        ),
        return_token_ids=True,
    )
    held = tokenized(resumable.channel)
    for message in resumable.stub.Chat(request, timeout=600, wait_for_ready=True):
        if message.HasField("delta"):
            held += message.delta.tokens.token_ids
        elif message.HasField("finished"):
            answer = message.finished.message
    assert answer.reasoning_content
    assert answer.content == "It is cold."
    answer.ClearField("reasoning_content")
    messages += [answer, pb.Message(role=pb.ROLE_USER, content="And in Rome?")]

    def told() -> None:
        assert resumable.metrics()["ripresa_said_answers_total"] >= 1

    eventually(told)
    resumable.kill_replicas(GATEWAY)

    def knows() -> None:
        with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
            assert tokenized(channel)[: len(held)] == held

    eventually(knows)


def say(resumable: ServedCluster, parent: str, text: str) -> tuple[pb.Started, pb.Finished]:
    """One turn of the session, said to whichever gateway answers."""
    request = pb.ChatRequest(
        options=pb.RequestOptions(session_id="lasting"),
        turn=pb.SessionTurn(
            parent_turn_id=parent, messages=[pb.Message(role=pb.ROLE_USER, content=text)]
        ),
        sampling=pb.SamplingParams(max_tokens=8, temperature=0.0),
    )
    with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
        call = InferenceStub(channel).Chat(request, timeout=600, wait_for_ready=True)
        messages = list(call)
    assert messages[-1].HasField("completed")
    (finished,) = (message.finished for message in messages if message.HasField("finished"))
    return messages[0].started, finished


def test_a_session_outlives_its_worker_and_its_gateways(resumable: ServedCluster) -> None:
    opening = pb.OpenSessionRequest(
        session_id="lasting",
        preamble=[pb.Message(role=pb.ROLE_SYSTEM, content="You are terse. " * 100)],
    )
    sessions = SessionsStub(resumable.channel)
    sessions.OpenSession(opening, timeout=600, wait_for_ready=True)
    started, first = say(resumable, "", "One?")
    # The head was computed when the session opened.
    assert started.cached_tokens > started.prompt_tokens // 2
    kill(resumable.listed()[started.worker_id])
    started, second = say(resumable, first.turn_id, "Two?")
    resumable.kill_replicas(GATEWAY)
    again, third = say(resumable, second.turn_id, "Three?")
    assert again.prompt_tokens > started.prompt_tokens
    with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
        sessions = SessionsStub(channel)
        named = pb.GetSessionRequest(session_id="lasting")
        session = sessions.GetSession(named, timeout=600, wait_for_ready=True)
        assert session.head_turn_id == third.turn_id
        sessions.CloseSession(pb.CloseSessionRequest(session_id="lasting"), timeout=600)
        with pytest.raises(grpc.RpcError) as caught:
            sessions.GetSession(named, timeout=600)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_answer_outlives_the_store_of_its_session(resumable: ServedCluster) -> None:
    """It is told whole, and with why it is no turn; then the session is opened anew."""
    name = "forgotten"
    opening = pb.OpenSessionRequest(session_id=name)

    def open_session() -> None:
        try:
            sessions.OpenSession(opening, timeout=600, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise AssertionError("the store's successor is on its way") from error
            raise

    def turn(max_tokens: int) -> pb.ChatRequest:
        message = pb.Message(role=pb.ROLE_USER, content="One?")
        return pb.ChatRequest(
            options=pb.RequestOptions(session_id=name),
            turn=pb.SessionTurn(messages=[message]),
            sampling=pb.SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True),
        )

    def finished(messages: list[pb.ChatResponse]) -> pb.Finished:
        assert messages[-1].HasField("completed")
        (end,) = (message.finished for message in messages if message.HasField("finished"))
        return end

    with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
        sessions, stub = SessionsStub(channel), InferenceStub(channel)
        eventually(open_session)
        call = stub.Chat(turn(400), timeout=600, wait_for_ready=True)
        told = [next(call)]
        resumable.kill_session_store()
        end = finished([*told, *call])
        assert end.turn_id == ""
        assert end.turn_error in ("SESSION_NOT_FOUND", "SESSION_STORE_UNAVAILABLE")
        assert end.message.reasoning_content or end.message.content
        eventually(open_session)
        assert finished(list(stub.Chat(turn(4), timeout=600))).turn_id
        sessions.CloseSession(pb.CloseSessionRequest(session_id=name), timeout=600)


def test_a_session_s_format_holds_wherever_its_turns_are_told(resumable: ServedCluster) -> None:
    """Begun at one gateway, told on by another; the next turn keeps to the format, too."""
    constraint = pb.OutputConstraint(json_schema=json.dumps(SCHEMA))
    opening = pb.OpenSessionRequest(
        session_id="formatted",
        config=pb.ConversationConfig(
            thinking=pb.Thinking(enabled=False), response_format=constraint
        ),
    )
    SessionsStub(resumable.channel).OpenSession(opening, timeout=600, wait_for_ready=True)

    def turn(parent: str, text: str) -> pb.ChatRequest:
        message = pb.Message(role=pb.ROLE_USER, content=text)
        return pb.ChatRequest(
            options=pb.RequestOptions(session_id="formatted"),
            turn=pb.SessionTurn(parent_turn_id=parent, messages=[message]),
            sampling=pb.SamplingParams(max_tokens=400, seed=5),
        )

    def finished(messages: list[pb.ChatResponse]) -> pb.Finished:
        assert [message.sequence for message in messages] == list(range(len(messages)))
        assert messages[-1].HasField("completed")
        (end,) = (message.finished for message in messages if message.HasField("finished"))
        said = "".join(m.delta.content for m in messages if m.HasField("delta"))
        assert said == end.message.content
        jsonschema.validate(json.loads(said), SCHEMA)
        return end

    with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
        call = InferenceStub(channel).Chat(turn("", "One?"), timeout=600, wait_for_ready=True)
        told = [next(call) for _ in range(5)]
        resumable.kill_replicas(GATEWAY)
    resume = pb.ResumeRequest(stream_id=told[0].started.stream_id, next_sequence=len(told))
    with grpc.insecure_channel(resumable.address, CHANNEL_OPTIONS) as channel:
        stub = InferenceStub(channel)
        rest = [one.chat for one in stub.Resume(resume, timeout=600, wait_for_ready=True)]
        one = finished([*told, *rest])
        # The whole answer stands in the transcript, whoever told its end.
        two = finished(list(stub.Chat(turn(one.turn_id, "Two?"), timeout=600)))
        assert two.message.content != one.message.content
        close = pb.CloseSessionRequest(session_id="formatted")
        SessionsStub(channel).CloseSession(close, timeout=600)
