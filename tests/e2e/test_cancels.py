"""Do deadlines, cancels and Abort end the work everywhere within a step?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from reference_engine import Question
from served_cluster import ServedCluster, Stream, eventually, generate_request

from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub
from ripresa.workers.address import WorkerKind

ENCODER_STEP = 256
"""Rows of one encoder step in this cluster."""


@pytest.fixture
def endless(agent_tokens: tuple[int, ...]) -> Question:
    """A prompt of some seconds and an answer of minutes."""
    return Question((agent_tokens * 2)[:5000], max_tokens=3000)


def in_prefill(split: ServedCluster, question: Question) -> tuple[Stream, tuple[int, int]]:
    """A stream whose prompt is being computed and not half done, and the rows before it.

    It is asked again where a busy machine lets nobody look in time.
    """
    while True:
        split.assert_idle()
        before = split.rows()
        stream = split.open(question)

        def num_done(before: tuple[int, int] = before) -> int:
            done = split.rows()[0] - before[0]
            assert done > 0
            return done

        if 2 * eventually(num_done) <= len(question.token_ids):
            return stream, before
        stream.cancel()
        stream.end()


def assert_stops(split: ServedCluster, before: tuple[int, int], num_tokens: int) -> None:
    """All is free again long before the work would have been done."""
    split.assert_idle()
    rows = split.rows()
    assert rows[0] - before[0] < num_tokens
    assert split.rows() == rows


def by_cancel(split: ServedCluster, stream: Stream) -> None:
    stream.cancel()


def by_abort(split: ServedCluster, stream: Stream) -> None:
    """From another connection."""
    stream.read(0)
    assert stream.answer.started is not None
    with grpc.insecure_channel(split.address) as channel:
        request = pb.AbortRequest(request_id=stream.answer.started.request_id)
        assert InferenceStub(channel).Abort(request, timeout=60).found
        assert not InferenceStub(channel).Abort(request, timeout=60).found


@pytest.mark.parametrize("end", [by_cancel, by_abort])
def test_ended_in_mid_prefill(
    split: ServedCluster, endless: Question, end: Callable[[ServedCluster, Stream], None]
) -> None:
    stream, before = in_prefill(split, endless)
    end(split, stream)
    assert stream.end().code is grpc.StatusCode.CANCELLED
    assert_stops(split, before, len(endless.token_ids))


@pytest.mark.parametrize("end", [by_cancel, by_abort])
def test_ended_in_mid_stream(
    split: ServedCluster, endless: Question, end: Callable[[ServedCluster, Stream], None]
) -> None:
    split.assert_idle()
    before = split.rows()
    stream = split.open(endless)
    stream.read(3)
    end(split, stream)
    assert stream.end().code is grpc.StatusCode.CANCELLED
    assert_stops(split, before, len(endless.token_ids) + endless.max_tokens)


@pytest.mark.parametrize("tokens_before", [0, 1], ids=["in the prefill", "in the stream"])
def test_deadline(split: ServedCluster, endless: Question, tokens_before: int) -> None:
    question = Question(endless.token_ids if not tokens_before else endless.token_ids[:50], 3000)
    timeout_s, is_reached = 1.0, False
    while not is_reached:
        split.assert_idle()
        before = split.rows()
        answer = split.ask(question, timeout_s=timeout_s)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert_stops(split, before, len(question.token_ids) + question.max_tokens)
        # How far a stream comes in a second is the machine's affair.
        is_reached = bool(answer.token_ids) is bool(tokens_before)
        timeout_s *= 2 if tokens_before else 0.5


def test_a_cancel_stops_within_a_step(split: ServedCluster, endless: Question) -> None:
    """After the idle cluster's next report not one more row is computed; and the last row was at
    most one step beyond what the encoder had done when the client cancelled."""

    def check() -> None:
        stream, _ = in_prefill(split, endless)
        stream.cancel()
        at_cancel = split.rows()[0]
        split.assert_idle()
        # One step was running, and another may have started before the cancel arrived. On a busy
        # machine it may be under way for longer, but not every time.
        assert split.rows()[0] - at_cancel <= 2 * ENCODER_STEP

    eventually(check)


def test_abort_of_nothing(split: ServedCluster) -> None:
    assert not split.stub.Abort(pb.AbortRequest(request_id="nobody"), timeout=60).found
    with pytest.raises(grpc.RpcError) as caught:
        split.stub.Abort(pb.AbortRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_full_pool_lets_wait_or_refuses(split: ServedCluster, endless: Question) -> None:
    """Each of these takes 8,000 of a decode worker's 40,960 positions: two workers hold ten.

    No two of them begin alike, or they would share blocks. None ends before all were asked.
    """
    prompts = [(first, *endless.token_ids[1:4000]) for first in range(100, 112)]
    endless = replace(endless, max_tokens=4000)
    requests = [generate_request(replace(endless, token_ids=prompt)) for prompt in prompts]
    for request in requests:
        request.options.max_queue_time.FromSeconds(0)
    streams = [split.open(request) for request in requests]
    with ThreadPoolExecutor(len(streams)) as threads:
        # The refused end by themselves.
        list(threads.map(lambda stream: stream.read(0), streams))
    refused = [s for s in streams if s.answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    placed = [s for s in streams if s.answer.started is not None]
    assert len(placed) == 10
    assert len(refused) == 2
    assert all("retry" in s.answer.details for s in refused)
    requests[-1].options.max_queue_time.FromSeconds(100)
    requests[-1].sampling.max_tokens = 1
    waiting = split.open(requests[-1])
    eventually(lambda: _has_waiting(split))
    placed[0].cancel()
    assert waiting.end().code is grpc.StatusCode.OK
    for stream in placed[1:]:
        stream.cancel()
    for stream in placed:
        assert stream.end().code is grpc.StatusCode.CANCELLED
    split.assert_idle()
    for worker in split.workers(WorkerKind.DECODE).values():
        assert worker.stats.num_free_blocks == worker.stats.num_blocks


def _has_waiting(split: ServedCluster) -> None:
    assert split.metrics()["ripresa_num_requests_waiting"] == 1
