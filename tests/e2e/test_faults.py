"""What does a client see when a process dies or hangs? The undisturbed stream, or UNAVAILABLE soon.

Every test ends with a whole cluster in which nothing of the request is left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest
import ray
from reference_engine import Question, ReferenceEngine
from served_cluster import (
    CONTROLLER,
    Answer,
    ServedCluster,
    Stream,
    eventually,
    generate_request,
    kill,
    stopped,
)

from ripresa.cluster.app import GATEWAY
from ripresa.cluster.client import Client
from ripresa.cluster.gateway.recording import recipe_of
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.address import WorkerKind
from ripresa.workers.errors import RipresaError
from ripresa.workers.replay import PlanKind, Recipe
from ripresa.workers.report import WorkerReport

WASTED = "ripresa_wasted_tokens_total"
PATIENCE_S = 50.0
"""A retry costs up to two leases and a second prefill on a busy machine; Ray takes a minute."""


@pytest.fixture
def question(agent_tokens: tuple[int, ...]) -> Question:
    """Long enough to be caught in its prefill and in its transfer."""
    return Question((agent_tokens * 2)[:5000], max_tokens=16, temperature=0.8, top_p=0.9, seed=1234)


@pytest.fixture(autouse=True)
def whole_again(split: ServedCluster) -> Iterator[None]:
    """The cluster is whole and idle before the test and after it."""
    split.wait_until_whole()
    split.assert_idle()
    before = set(split.listed())
    yield
    split.wait_until_whole()
    split.assert_idle()
    # At most one worker of each kind was hurt: the others are the same processes as before.
    assert len(before & set(split.listed())) >= 2


def prefilling(split: ServedCluster, before: dict[str, WorkerReport]) -> WorkerReport:
    """The encoder in the middle of a prompt, soon after its first steps."""

    def check() -> WorkerReport:
        for worker in split.workers(WorkerKind.ENCODER).values():
            old = before[worker.worker_id].stats
            if worker.stats.num_running and worker.stats.num_encoder_rows > old.num_encoder_rows:
                return worker
        raise AssertionError("no encoder works")

    return eventually(check)


def receiving(split: ServedCluster, before: dict[str, WorkerReport]) -> WorkerReport:
    """The decode worker to which a part of a prompt's state has come."""

    def check() -> WorkerReport:
        for worker in split.workers(WorkerKind.DECODE).values():
            old = before[worker.worker_id].stats.counters
            if (
                worker.stats.num_waiting
                and worker.stats.counters.transfer_bytes > old.transfer_bytes
            ):
                return worker
        raise AssertionError("no decode worker receives")

    return eventually(check)


def assert_survived(answer: Answer, question: Question, reference: ReferenceEngine) -> None:
    """The undisturbed stream, or a clear status; both far sooner than anything of Ray's notices."""
    assert answer.seconds < PATIENCE_S
    if answer.code is grpc.StatusCode.OK:
        assert answer.tokens == reference.answer(question)
        return
    assert answer.code is grpc.StatusCode.UNAVAILABLE, answer.details
    assert answer.details


def test_killed_encoder_in_mid_prefill(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    before = split.workers()
    stream = split.open(question)
    kill(prefilling(split, before))
    # There is a second encoder, so the request succeeds.
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_in_mid_transfer(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    before = split.workers()
    stream = split.open(question)
    kill(receiving(split, before))
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_in_mid_stream(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    stream = split.open(question)
    stream.read(5)
    assert stream.answer.started is not None
    kill(split.listed()[stream.answer.started.worker_id])
    # The answer goes on elsewhere, by the same recipe, where it stood.
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_under_a_constraint(split: ServedCluster, question: Question) -> None:
    """What the other worker allows next follows from the tokens that were streamed."""
    request = generate_request(replace(question, token_ids=question.token_ids[:600], max_tokens=90))
    request.sampling.ignore_eos = False
    request.sampling.constraint.regex = "([a-z][0-9]){20,24}(, [A-Z]{2}){6}"
    undisturbed = split.ask(request)
    assert re.fullmatch(request.sampling.constraint.regex, undisturbed.text)
    stream = split.open(request)
    stream.read(7)
    assert stream.answer.started is not None
    kill(split.listed()[stream.answer.started.worker_id])
    answer = stream.end()
    assert answer.tokens == undisturbed.tokens
    assert answer.finished is not None
    assert answer.finished.reason == pb.FINISH_REASON_STOP


def unique_tokens(name: str, length: int) -> tuple[int, ...]:
    """A prompt that no other test sends."""
    return tuple(random.Random(name).choices(range(10, 4000), k=length))


def recipe(answer: Answer) -> Recipe:
    assert answer.completed is not None, answer.details
    return recipe_of(answer.completed.cache, answer.completed.build.seed)


@pytest.mark.parametrize("session", ["", "a session in danger"], ids=["a hit", "a session"])
def test_killed_decode_worker_in_mid_stream_of(
    split: ServedCluster, reference: ReferenceEngine, session: str
) -> None:
    """What was cached or parked is gone in part; the answer is by the same recipe all the same."""
    first = Question(unique_tokens(f"killed {session}", 900), max_tokens=4, reads_cache=True)
    request = generate_request(first)
    request.options.session_id = session
    tokens = first.token_ids + split.ask(request).tokens + unique_tokens("more", 20)
    second = replace(first, token_ids=tokens, max_tokens=48, temperature=0.8, seed=77)
    request = generate_request(second)
    request.options.session_id = session
    wasted = split.metrics().get(WASTED, 0.0)
    stream = split.open(request)
    stream.read(3)
    started = stream.answer.started
    assert started is not None
    kill(split.listed()[started.worker_id])
    answer = stream.end()
    # It was caught in the middle: its rows were computed twice.
    assert split.metrics()[WASTED] > wasted
    followed = recipe(answer)
    assert (followed.kind is PlanKind.RESUME) is bool(session)
    assert followed.start >= 640
    assert answer.tokens == reference.follow(second, followed)


def test_killed_encoder_in_mid_prefill_after_a_hit(
    split: ServedCluster, reference: ReferenceEngine
) -> None:
    tokens = unique_tokens("killed encoder", 4200)
    head = Question(tokens[:1200], max_tokens=1, reads_cache=True)
    assert split.ask(head).tokens
    question = replace(head, token_ids=tokens, max_tokens=8, temperature=0.8, seed=78)
    before = split.workers()
    stream = split.open(question)
    kill(prefilling(split, before))
    answer = stream.end()
    followed = recipe(answer)
    assert followed.write_floor >= 1024
    assert answer.tokens == reference.follow(question, followed)


def test_both_encoders_killed(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    before = split.workers()
    stream = split.open(question)
    first = prefilling(split, before)
    for worker in before.values():
        if worker.kind is WorkerKind.ENCODER and worker.worker_id != first.worker_id:
            kill(worker)
    kill(first)
    answer = stream.end()
    assert_survived(answer, question, reference)


@pytest.mark.parametrize("catch", [prefilling, receiving], ids=["encoder", "decode worker"])
def test_hanging_worker(
    split: ServedCluster,
    question: Question,
    reference: ReferenceEngine,
    catch: Callable[[ServedCluster, dict[str, WorkerReport]], WorkerReport],
) -> None:
    before = split.workers()
    stream = split.open(question)
    with stopped(catch(split, before)):
        answer = stream.end()
        # Others are served meanwhile.
        short = Question(question.token_ids[:40], max_tokens=3)
        assert split.ask(short).tokens == reference.answer(short)
    assert_survived(answer, question, reference)


def test_decode_worker_hangs_in_mid_stream(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    stream = split.open(question)
    stream.read(3)
    assert stream.answer.started is not None
    with stopped(split.listed()[stream.answer.started.worker_id]):
        answer = stream.end()
    assert_survived(answer, question, reference)


def test_killed_controller(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    stream = split.open(question)
    stream.read(1)
    split.kill_replicas(CONTROLLER)
    short = Question(question.token_ids[:40], max_tokens=3)
    assert split.ask(short).tokens == reference.answer(short)
    assert stream.end().tokens == reference.answer(question)


def test_killed_serve_controller(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    stream = split.open(question)
    stream.read(1)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    ray.kill(controller, no_restart=False)
    short = Question(question.token_ids[:40], max_tokens=3)
    assert split.ask(short).tokens == reference.answer(short)
    assert stream.end().tokens == reference.answer(question)


def test_killed_gateway(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    started: Stream = split.open(question)
    started.read(2)
    split.kill_replicas(GATEWAY)
    answer = started.end()
    assert answer.code is grpc.StatusCode.UNAVAILABLE
    assert tuple(answer.token_ids) == reference.answer(question)[: len(answer.token_ids)]
    # The client's policy waits for the gateway's successor.
    short = Question(question.token_ids[:40], max_tokens=3)
    with Client(split.address) as client:
        answer = client.generate(
            short.token_ids,
            return_token_ids=True,
            timeout_s=120,
            max_tokens=3,
            temperature=0.0,
            ignore_eos=True,
        ).answer()
    assert answer.token_ids == reference.answer(short)


def test_a_dead_worker_leaves_a_clear_refusal(split: ServedCluster, question: Question) -> None:
    """A report of a worker that never was is refused, not answered by another one."""
    worker = next(iter(split.workers(WorkerKind.DECODE).values()))
    handle = split.cluster.handle("DecodeWorker")
    with pytest.raises((RipresaError, ray.exceptions.RayTaskError), match="is gone"):
        handle.report.remote(worker_id=worker.worker_id + "x").result(timeout_s=30)
