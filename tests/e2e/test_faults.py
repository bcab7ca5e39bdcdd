"""What does a client see when a process dies or hangs? The undisturbed stream, or UNAVAILABLE soon.

Every test ends with a whole cluster in which nothing of the request is left.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, repeat

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
    kill_processes,
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
LEASES_S = 20.0
MAX_TIMES = 6
"""A retry costs up to two leases and waits on dead lanes, and beside whatever starts a second
prefill takes some times what an undisturbed answer took. Ray takes a minute."""


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


Workers = dict[str, WorkerReport]
Look = Callable[[Workers, Workers], WorkerReport | None]
"""Of the workers before a stream and now, the one that is to be hurt; None for none yet."""


def prefilling(before: Workers, now: Workers) -> WorkerReport | None:
    """The encoder in the middle of a prompt, soon after its first steps."""
    for worker in now.values():
        old = before[worker.worker_id].stats
        is_busy = worker.kind is WorkerKind.ENCODER and worker.stats.num_running
        if is_busy and worker.stats.num_encoder_rows > old.num_encoder_rows:
            return worker
    return None


def receiving(before: Workers, now: Workers) -> WorkerReport | None:
    """The decode worker to which a part of a prompt's state has come."""
    for worker in now.values():
        old = before[worker.worker_id].stats.counters
        is_waited_for = worker.kind is WorkerKind.DECODE and worker.stats.num_waiting
        if is_waited_for and worker.stats.counters.transfer_bytes > old.transfer_bytes:
            return worker
    return None


def catch(
    split: ServedCluster, questions: Iterable[Question], look: Look
) -> tuple[Question, Stream, WorkerReport]:
    """The first question that is caught in its prefill, its stream, and a worker of it.

    The next one is asked where a busy machine lets nobody look in time.
    """
    for question in questions:
        before = split.workers()
        stream = split.open(question)

        def check(before: Workers = before) -> WorkerReport | None:
            now = split.workers()
            found = look(before, now)
            is_over = any(
                worker.stats.num_decoder_rows > before[worker.worker_id].stats.num_decoder_rows
                for worker in now.values()
            )
            assert found or is_over, "no worker is at it yet"
            return found

        found = eventually(check)
        if found is not None:
            return question, stream, found
        stream.end()
        split.assert_idle()
    raise AssertionError("every prefill was over before anybody looked")


def patience_s(split: ServedCluster, question: Question) -> float:
    """Within which a disturbed answer comes on this machine as it is now."""
    return LEASES_S + MAX_TIMES * split.ask(question).seconds


def assert_survived(
    answer: Answer, question: Question, reference: ReferenceEngine, within_s: float
) -> None:
    """The undisturbed stream, or a clear status; both far sooner than anything of Ray's notices."""
    assert answer.seconds < within_s
    if answer.code is grpc.StatusCode.OK:
        assert answer.tokens == reference.answer(question)
        return
    assert answer.code is grpc.StatusCode.UNAVAILABLE, answer.details
    assert answer.details


def test_killed_encoder_in_mid_prefill(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    _, stream, worker = catch(split, repeat(question), prefilling)
    kill(worker)
    # There is a second encoder, so the request succeeds.
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_in_mid_transfer(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    _, stream, worker = catch(split, repeat(question), receiving)
    kill(worker)
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_in_mid_stream(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    workers = split.listed()
    stream = split.open(question)
    stream.read(5)
    assert stream.answer.started is not None
    kill(workers[stream.answer.started.worker_id])
    # The answer goes on elsewhere, by the same recipe, where it stood.
    assert stream.end().tokens == reference.answer(question)


def test_killed_decode_worker_under_a_constraint(split: ServedCluster, question: Question) -> None:
    """What the other worker allows next follows from the tokens that were streamed."""
    request = generate_request(replace(question, token_ids=question.token_ids[:600], max_tokens=90))
    request.sampling.ignore_eos = False
    request.sampling.constraint.regex = "([a-z][0-9]){20,24}(, [A-Z]{2}){6}"
    undisturbed = split.ask(request)
    assert re.fullmatch(request.sampling.constraint.regex, undisturbed.text)
    workers = split.listed()
    stream = split.open(request)
    stream.read(7)
    assert stream.answer.started is not None
    kill(workers[stream.answer.started.worker_id])
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
    second = replace(first, token_ids=tokens, max_tokens=120, temperature=0.8, seed=77)
    request = generate_request(second)
    request.options.session_id = session
    wasted = split.metrics().get(WASTED, 0.0)
    workers = split.listed()
    stream = split.open(request)
    stream.read(3)
    started = stream.answer.started
    assert started is not None
    kill(workers[started.worker_id])
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
    head = Question(unique_tokens("killed encoder", 1200), max_tokens=1, reads_cache=True)
    assert split.ask(head).tokens
    second = replace(head, max_tokens=8, temperature=0.8, seed=78)
    # Each finds the head and no more.
    tails = (unique_tokens(f"tail {number}", 3000) for number in count())
    questions = (replace(second, token_ids=head.token_ids + tail) for tail in tails)
    question, stream, worker = catch(split, questions, prefilling)
    kill(worker)
    answer = stream.end()
    followed = recipe(answer)
    assert followed.write_floor >= 1024
    assert answer.tokens == reference.follow(question, followed)


def test_both_encoders_killed(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    within_s = patience_s(split, question)
    encoders = split.workers(WorkerKind.ENCODER).values()
    _, stream, _ = catch(split, repeat(question), prefilling)
    kill_processes(worker.pid for worker in encoders)
    answer = stream.end()
    assert_survived(answer, question, reference, within_s)


@pytest.mark.parametrize("look", [prefilling, receiving], ids=["encoder", "decode worker"])
def test_hanging_worker(
    split: ServedCluster, question: Question, reference: ReferenceEngine, look: Look
) -> None:
    within_s = patience_s(split, question)
    _, stream, worker = catch(split, repeat(question), look)
    with stopped(worker):
        answer = stream.end()
        # Others are served meanwhile.
        short = Question(question.token_ids[:40], max_tokens=3)
        assert split.ask(short).tokens == reference.answer(short)
    assert_survived(answer, question, reference, within_s)


def test_decode_worker_hangs_in_mid_stream(
    split: ServedCluster, question: Question, reference: ReferenceEngine
) -> None:
    within_s = patience_s(split, question)
    workers = split.listed()
    stream = split.open(question)
    stream.read(3)
    assert stream.answer.started is not None
    with stopped(workers[stream.answer.started.worker_id]):
        answer = stream.end()
    assert_survived(answer, question, reference, within_s)


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
    # It goes on for seconds: long enough to be caught.
    question = replace(question, token_ids=question.token_ids[:600], max_tokens=150)
    gateways = split.pids(GATEWAY)
    started: Stream = split.open(question)
    started.read(2)
    kill_processes(gateways)
    answer = started.end()
    assert answer.code is grpc.StatusCode.UNAVAILABLE
    assert tuple(answer.token_ids) == reference.answer(question)[: len(answer.token_ids)]
    # The client's policy waits for the gateway's successor.
    short = Question(question.token_ids[:40], max_tokens=3)
    with Client(split.address, connect_timeout_s=300) as client:
        answer = client.generate(
            short.token_ids,
            return_token_ids=True,
            timeout_s=600,
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
