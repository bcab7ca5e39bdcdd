"""Is a stream the same without encoder workers, and do several gateways act as one?"""

from __future__ import annotations

import grpc
import pytest
from reference_engine import Question, ReferenceEngine
from served_cluster import ServedCluster

from ripresa.cluster.app import GATEWAY
from ripresa.cluster.client import Client
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos.ripresa_pb2_grpc import InferenceStub
from ripresa.workers.address import WorkerKind
from ripresa.workers.replay import TailVariant

WINDOW = 128


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 200, "seed": 99}])
def test_a_real_prompt(
    without_encoders: ServedCluster,
    reference: ReferenceEngine,
    agent_tokens: tuple[int, ...],
    sampling: dict[str, float],
) -> None:
    question = Question(agent_tokens, max_tokens=16, **sampling)  # type: ignore[arg-type]
    assert without_encoders.ask(question).tokens == reference.answer(question)


@pytest.mark.parametrize("tail", [TailVariant.FLOORED, TailVariant.LAYER_EXACT, TailVariant.FULL])
def test_tail_variants(
    without_encoders: ServedCluster,
    reference: ReferenceEngine,
    agent_tokens: tuple[int, ...],
    tail: TailVariant,
) -> None:
    question = Question(agent_tokens[: 3 * WINDOW + 45], max_tokens=6, tail=tail)
    assert without_encoders.ask(question).tokens == reference.answer(question)


def test_rows_of_a_local_prefill(
    without_encoders: ServedCluster, agent_tokens: tuple[int, ...]
) -> None:
    before = without_encoders.rows()
    assert len(without_encoders.ask(Question(agent_tokens[:1000], max_tokens=4)).tokens) == 4
    after = without_encoders.rows()
    assert after[0] - before[0] == 1000 + 3
    assert after[1] - before[1] == WINDOW + 3
    (worker,) = without_encoders.workers().values()
    assert worker.kind is WorkerKind.DECODE
    assert worker.stats.counters.transfer_bytes == 0


def connections(cluster: ServedCluster, count: int) -> list[grpc.Channel]:
    """Connections of their own; the kernel gives each to one of the listening gateways."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.insecure_channel(cluster.address, options=options) for _ in range(count)]


def test_gateways_share_the_port(
    without_encoders: ServedCluster, agent_tokens: tuple[int, ...]
) -> None:
    """The gateway that runs a request refuses its id; behind another one, the worker does."""
    stream = without_encoders.open(Question(agent_tokens[:9], max_tokens=8000), request_id="one")
    stream.read(1)
    channels = connections(without_encoders, 24)
    refusals = set()
    try:
        for channel in channels:
            again = Question(agent_tokens[:5], max_tokens=1)
            stub = InferenceStub(channel)
            answer = without_encoders.ask(again, request_id="one", stub=stub)
            assert answer.code is grpc.StatusCode.ALREADY_EXISTS
            refusals.add(answer.details)
    finally:
        for channel in channels:
            channel.close()
    assert len(refusals) == 2, refusals
    stream.cancel()
    assert stream.end().code is grpc.StatusCode.CANCELLED
    without_encoders.assert_idle()


def test_abort_from_every_connection(
    without_encoders: ServedCluster, agent_tokens: tuple[int, ...]
) -> None:
    channels = connections(without_encoders, 8)
    try:
        for channel in channels:
            stream = without_encoders.open(Question(agent_tokens[:20], max_tokens=3000))
            stream.read(1)
            assert stream.answer.started is not None
            request = pb.AbortRequest(request_id=stream.answer.started.request_id)
            assert InferenceStub(channel).Abort(request, timeout=60).found
            assert stream.end().code is grpc.StatusCode.CANCELLED
    finally:
        for channel in channels:
            channel.close()
    without_encoders.assert_idle()


def test_one_gateway_killed_of_two(
    without_encoders: ServedCluster, reference: ReferenceEngine, agent_tokens: tuple[int, ...]
) -> None:
    without_encoders.kill_replicas(GATEWAY, at_most=1)
    question = Question(agent_tokens[:30], max_tokens=3)
    for _ in range(4):
        with Client(without_encoders.address, connect_timeout_s=300) as client:
            answer = client.generate(
                question.token_ids,
                return_token_ids=True,
                timeout_s=600,
                max_tokens=3,
                temperature=0.0,
                ignore_eos=True,
            ).answer()
        assert answer.token_ids == reference.answer(question)
    without_encoders.assert_idle()
