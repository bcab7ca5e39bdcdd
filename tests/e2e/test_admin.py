"""Can an operator look after a running cluster, and do workers leave without losing anything?"""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reference_engine import Question, ReferenceEngine
from served_cluster import Answer, ServedCluster, eventually, generate_request

from ripresa.cluster.cli import cli
from ripresa.cluster.client.admin import AdminClient
from ripresa.cluster.client.errors import UnavailableError
from ripresa.cluster.gateway.recording import recipe_of
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.address import WorkerKind
from ripresa.workers.replay import PlanKind, Recipe

MAX_TOKENS = 4


def tokens_of(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(10, 4000), k=length))


def admin(cluster: ServedCluster, *words: str) -> Result:
    address = ("--address", cluster.cluster.admin_address)
    return CliRunner().invoke(cli, ["admin", *words, *address])


def turn(
    cluster: ServedCluster, reference: ReferenceEngine, tokens: tuple[int, ...], session: str
) -> tuple[Answer, Recipe]:
    request = generate_request(Question(tokens, max_tokens=MAX_TOKENS, reads_cache=True))
    request.options.session_id = session
    answer = cluster.ask(request)
    assert answer.completed is not None, answer.details
    recipe = recipe_of(answer.completed.cache, answer.completed.build.seed)
    question = Question(tokens, max_tokens=MAX_TOKENS, seed=recipe.seed)
    assert answer.tokens == reference.follow(question, recipe)
    return answer, recipe


def loop(
    cluster: ServedCluster, reference: ReferenceEngine, session: str
) -> tuple[str, tuple[int, ...]]:
    """Two turns of a tool loop: its worker, and the next turn's tokens."""
    tokens = tokens_of(session, 300)
    for number in range(2):
        answer, _ = turn(cluster, reference, tokens, session)
        assert answer.started is not None
        tokens += answer.tokens + tokens_of(f"{session} {number}", 20)
    return answer.started.worker_id, tokens


def resumed_rows(tokens: tuple[int, ...], recipe: Recipe) -> int:
    assert recipe.kind is PlanKind.RESUME
    return len(tokens) - recipe.start


def test_a_drained_worker_s_session_goes_on_elsewhere(
    spread: ServedCluster, reference: ReferenceEngine
) -> None:
    home, tokens = loop(spread, reference, "moves")
    try:
        done = admin(spread, "drain", home)
        assert done.exit_code == 0, done.output
        lines = done.output.splitlines()
        assert re.fullmatch(r"drained: 0 requests and 0 sessions left, [\d.]+ MB moved", lines[-1])
        eventually(lambda: _assert_listed(spread, home, "drained"))
        answer, recipe = turn(spread, reference, tokens, "moves")
        assert answer.started is not None
        assert answer.started.worker_id != home
        # Only the tools' answers, and the last token that was said.
        assert resumed_rows(tokens, recipe) == 21
        # Nothing else comes to it either.
        for number in range(6):
            other, _ = turn(spread, reference, tokens_of(f"other {number}", 150), "")
            assert other.started is not None
            assert other.started.worker_id != home
    finally:
        assert admin(spread, "resume", home).exit_code == 0
    eventually(lambda: _assert_state(spread, home, "ready"))


def test_without_its_state_a_session_computes_more_and_says_the_same(
    spread: ServedCluster, reference: ReferenceEngine
) -> None:
    home, tokens = loop(spread, reference, "stays")
    try:
        done = admin(spread, "drain", home, "--no-migrate")
        assert done.exit_code == 0, done.output
        assert "0 sessions left" not in done.output
        assert ", 0.0 MB moved" in done.output
        answer, _ = turn(spread, reference, tokens, "stays")
        assert answer.started is not None
        assert answer.started.worker_id != home
    finally:
        assert admin(spread, "resume", home).exit_code == 0
    eventually(lambda: _assert_state(spread, home, "ready"))


def test_workers_that_all_leave_at_once_lose_no_stream(
    spread: ServedCluster, reference: ReferenceEngine
) -> None:
    """They know of each other when their grace ends; new requests hear that all of them leave."""
    decoders = list(spread.workers(WorkerKind.DECODE))
    questions = [Question(tokens_of(f"long {n}", 40), max_tokens=100) for n in range(3)]
    streams = [spread.open(question) for question in questions]
    for stream in streams:
        stream.read(3)
    with AdminClient(spread.cluster.admin_address) as client:
        try:
            with ThreadPoolExecutor(len(decoders)) as pool:
                drains = list(pool.map(lambda name: [*client.drain(name, grace_s=2.0)], decoders))
            for question, stream in zip(questions, streams, strict=True):
                assert stream.end().tokens == reference.answer(question)
            assert {told[-1].state for told in drains} == {pb.WORKER_STATE_DRAINED}
            late = generate_request(questions[0])
            late.options.max_queue_time.SetInParent()
            refused = spread.ask(late)
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert "every decode worker is leaving" in refused.details
        finally:
            for name in decoders:
                client.resume(name)
    for name in decoders:
        eventually(partial(_assert_state, spread, name, "ready"))


def test_a_drain_that_is_called_off_says_so(spread: ServedCluster) -> None:
    stream = spread.open(Question(tokens_of("called off", 40), max_tokens=150))
    stream.read(3)
    assert stream.answer.started is not None
    home = stream.answer.started.worker_id
    with AdminClient(spread.cluster.admin_address) as client:
        told = client.drain(home)
        assert next(told).state == pb.WORKER_STATE_DRAINING
        client.resume(home)
        with pytest.raises(UnavailableError, match="the drain was called off"):
            list(told)
    assert len(stream.end().tokens) == 150


def test_what_is_flushed_is_computed_again(
    spread: ServedCluster, reference: ReferenceEngine
) -> None:
    for number in range(3):
        session = f"flushed {number}"
        _, tokens = loop(spread, reference, session)
    stats = admin(spread, "prefix-stats", "--top", "3")
    assert stats.exit_code == 0, stats.output
    assert re.search(r"^[\d,]+ lookups of [\d,]+ tokens; [\d,]+ of them", stats.output)
    assert len(stats.output.splitlines()) == 4
    flushed = admin(spread, "flush", "--all")
    assert flushed.exit_code == 0, flushed.output
    assert int(flushed.output.split()[0].replace(",", "")) >= 256
    _, recipe = turn(spread, reference, tokens, session)
    assert recipe.start == 0
    spread.assert_idle()


def test_errors_help(spread: ServedCluster) -> None:
    unknown = admin(spread, "drain", "nobody")
    assert unknown.exit_code == 2
    (some,) = list(spread.listed())[:1]
    assert "no such worker reports" in unknown.output
    assert some in unknown.output
    nothing = admin(spread, "flush")
    assert nothing.exit_code == 2
    assert "--all" in nothing.output
    tenant = admin(spread, "flush", "--tenant", "acme")
    assert "gateway.api_keys_file" in tenant.output
    away = CliRunner().invoke(cli, ["admin", "status", "--address", spread.address])
    assert away.exit_code == 1
    assert "UNIMPLEMENTED" in away.output or "not found" in away.output.lower()


def test_encoders_leave_too(spread: ServedCluster, reference: ReferenceEngine) -> None:
    encoder = next(iter(spread.workers(WorkerKind.ENCODER)))
    try:
        assert admin(spread, "drain", encoder).exit_code == 0
        answer, _ = turn(spread, reference, tokens_of("encoders", 300), "")
        assert answer.code.name == "OK"
    finally:
        assert admin(spread, "resume", encoder).exit_code == 0


def _assert_listed(cluster: ServedCluster, worker_id: str, state: str) -> None:
    status = admin(cluster, "status").output
    assert re.search(rf"^{worker_id} +decode +{state} ", status, re.MULTILINE), status


def _assert_state(cluster: ServedCluster, worker_id: str, state: str) -> None:
    assert cluster.listed()[worker_id].state == state


def test_health_knows_admin(spread: ServedCluster) -> None:
    with grpc.insecure_channel(spread.cluster.admin_address) as channel:
        request = health_pb2.HealthCheckRequest(service="ripresa.v1.Admin")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
