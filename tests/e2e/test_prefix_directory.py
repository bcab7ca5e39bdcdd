"""Does a cluster of several workers act as one cache, and is only speed lost with its parts?"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from click.testing import CliRunner
from reference_engine import Question, ReferenceEngine
from served_cluster import Answer, ServedCluster, eventually, generate_request, kill

from ripresa.cluster.cli import cli
from ripresa.cluster.directory.link import NAMESPACE
from ripresa.cluster.directory.prefix_directory import ACTOR_NAME
from ripresa.cluster.gateway.recording import recipe_of
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.replay import PlanKind, Recipe

WINDOW, REWIND = 128, 6
NUM_TURNS = 20
NUM_AGENTS = 8
MAX_TOKENS = 4


def tokens_of(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(10, 4000), k=length))


def request_of(
    token_ids: tuple[int, ...], session: str = "", request_id: str = ""
) -> pb.GenerateRequest:
    question = Question(token_ids, max_tokens=MAX_TOKENS, reads_cache=True)
    request = generate_request(question, request_id)
    request.options.session_id = session
    return request


def recipe(answer: Answer) -> Recipe:
    assert answer.completed is not None, answer.details
    return recipe_of(answer.completed.cache, answer.completed.build.seed)


def check(reference: ReferenceEngine, token_ids: tuple[int, ...], answer: Answer) -> None:
    """The answer is what its recipe gives on an empty cache."""
    question = Question(token_ids, max_tokens=MAX_TOKENS, seed=recipe(answer).seed)
    assert answer.tokens == reference.follow(question, recipe(answer))


def encoder_rows(cluster: ServedCluster) -> int:
    """Of all workers. AssertionError while one is listed that cannot be reached: it is gone, or
    has started a moment ago."""
    return sum(worker.stats.num_encoder_rows for worker in cluster.workers().values())


def tool_loop(
    cluster: ServedCluster, reference: ReferenceEngine, name: str, num_turns: int, session: str
) -> list[Recipe]:
    """Turns of a loop, each of which computes exactly the rows of its plan."""
    tokens, processed = tokens_of(name, 300), 0
    found = []
    for number in range(num_turns):
        before = encoder_rows(cluster)
        answer = cluster.ask(request_of(tokens, session))
        followed = recipe(answer)
        rows = len(tokens) - followed.start
        assert encoder_rows(cluster) - before == rows + MAX_TOKENS - 1
        new = len(tokens) - processed
        assert number == 0 or rows <= max(3 * WINDOW + REWIND - 1, new + 2 * WINDOW)
        if session and number:
            assert followed.kind is PlanKind.RESUME
            assert rows == new
        if number % 6 == 5:
            check(reference, tokens, answer)
        found.append(followed)
        processed = len(tokens) + MAX_TOKENS - 1
        tokens += answer.tokens + tokens_of(f"{name} {number}", 20 + 13 * number % 90)
    return found


@pytest.mark.parametrize("session", ["", "a tool loop"])
def test_a_tool_loop_computes_what_is_new(
    spread: ServedCluster, reference: ReferenceEngine, session: str
) -> None:
    tool_loop(spread, reference, f"loop {session}", NUM_TURNS, session)


@pytest.mark.parametrize("session", ["", "another tool loop"])
def test_the_same_without_encoders(
    without_encoders: ServedCluster, reference: ReferenceEngine, session: str
) -> None:
    tool_loop(without_encoders, reference, f"loop {session}", NUM_TURNS, session)


def sub_agents(cluster: ServedCluster, name: str) -> tuple[list[tuple[int, ...]], list[Answer]]:
    """Eight with one prefix of 2,000 tokens, started together, and what each was told."""
    shared = tokens_of(name, 2000)
    prompts = [shared + tokens_of(f"{name} {k}", 90) for k in range(NUM_AGENTS)]
    with ThreadPoolExecutor(NUM_AGENTS) as threads:
        return prompts, list(threads.map(lambda p: cluster.ask(request_of(p)), prompts))


def test_eight_sub_agents_compute_their_prefix_once(
    spread: ServedCluster, reference: ReferenceEngine
) -> None:
    before = encoder_rows(spread)
    prompts, answers = sub_agents(spread, "agents")
    starts = sorted(recipe(answer).start for answer in answers)
    assert starts[0] == 0
    # The others go on from a boundary of the shared part, or from one window before it.
    assert starts[1] >= 2000 // WINDOW * WINDOW - WINDOW
    own = NUM_AGENTS * len(prompts[0]) - sum(starts)
    assert encoder_rows(spread) - before == own + NUM_AGENTS * (MAX_TOKENS - 1)
    check(reference, prompts[3], answers[3])


def test_a_cancelled_leader_is_succeeded(spread: ServedCluster) -> None:
    shared = tokens_of("cancelled", 2000)
    leader = spread.open(request_of(shared + tokens_of("leader", 60)))
    with ThreadPoolExecutor(NUM_AGENTS) as threads:
        prompts = [shared + tokens_of(f"cancelled {k}", 60) for k in range(NUM_AGENTS - 1)]
        pending = [threads.submit(spread.ask, request_of(prompt)) for prompt in prompts]
        leader.cancel()
        answers = [one.result() for one in pending]
    starts = sorted(recipe(answer).start for answer in answers)
    assert starts[1] >= 2000 // WINDOW * WINDOW - WINDOW
    spread.assert_idle()


def test_losing_parts_costs_speed_alone(spread: ServedCluster, reference: ReferenceEngine) -> None:
    """A decode worker, an encoder worker, the directory, all that any worker holds: each gone once,
    between two turns. The turn after it computes more, and as much as it says."""
    tokens = tokens_of("losses", 700)
    starts = []
    for number in range(9):
        before = eventually(lambda: encoder_rows(spread))
        answer = spread.ask(request_of(tokens, "losses", f"loss-{number}"))
        assert answer.started is not None
        check(reference, tokens, answer)
        starts.append(recipe(answer).start)
        after = eventually(lambda: encoder_rows(spread))
        assert after - before == len(tokens) - starts[-1] + MAX_TOKENS - 1
        workers = spread.listed()
        match number:
            case 1:
                kill(workers[answer.started.worker_id])
            case 3:
                kill(next(w for w in workers.values() if w.kind == "encoder"))
            case 5:
                actor = ray.get_actor(f"{ACTOR_NAME}-0", namespace=NAMESPACE)
                ray.kill(actor, no_restart=False)
            case 7:
                where = ("--address", spread.cluster.admin_address)
                flushed = CliRunner().invoke(cli, ["admin", "flush", "--all", *where])
                assert flushed.exit_code == 0, flushed.output
        tokens += answer.tokens + tokens_of(f"losses {number}", 40)
    # With nothing left the whole prompt is computed; with all parts there, only what is new.
    assert starts[0] == starts[8] == 0
    assert min(starts[1], starts[3], starts[5], starts[7]) >= 700
    spread.wait_until_whole()
    spread.assert_idle()


def test_a_restarted_directory_is_told_everything(spread: ServedCluster) -> None:
    """A prefix of before is found again: by its first request, or by one of the next ones."""
    tokens = tokens_of("told again", 900)
    spread.ask(request_of(tokens))
    ray.kill(ray.get_actor(f"{ACTOR_NAME}-0", namespace=NAMESPACE), no_restart=False)
    number = 0

    def is_found() -> None:
        nonlocal number
        number += 1
        asked = request_of((*tokens, 5, 6, number))
        asked.options.cache_policy.disable_write = True
        name = f"told-again-{number}"
        asked.options.request_id = name
        spread.ask(asked)
        lines = spread.explained(name)
        assert any("directory: answered" in line for line in lines)
        assert any("planned hit: window, rows from 768" in line for line in lines), lines

    eventually(is_found)


def test_a_request_is_explained(spread: ServedCluster) -> None:
    tokens = tokens_of("explained", 600)
    spread.ask(request_of(tokens))
    answer = spread.ask(request_of(tokens, request_id="why"))
    assert answer.started is not None
    text = "\n".join(spread.explained("why"))
    assert text.startswith("request why, 600 prompt tokens")
    for part in (answer.started.worker_id, "planned hit", "real hit", "instead", "recipe"):
        assert part in text
    missing = CliRunner().invoke(
        cli, ["explain", "nobody", "--address", spread.cluster.http_address]
    )
    assert missing.exit_code != 0
    assert "no plan of request nobody is remembered" in missing.output


def test_two_tenants_share_nothing(spread: ServedCluster) -> None:
    tokens = tokens_of("tenants", 700)
    for salt in ("one", "two"):
        request = request_of(tokens, "their session")
        request.options.cache_salt = salt
        answer = spread.ask(request)
        assert recipe(answer).kind is PlanKind.COLD
        assert answer.completed is not None
        assert answer.completed.usage.cached_tokens == 0


def test_tokens_of_peers_are_counted(spread: ServedCluster) -> None:
    """Sub-agents go to several encoders, and those bring what one of them computes."""

    def pulled() -> int:
        return sum(w.stats.pulls.received_bytes for w in spread.workers().values())

    before, metrics = pulled(), spread.metrics()
    number = 0

    def is_counted() -> None:
        nonlocal number
        number += 1
        sub_agents(spread, f"peers {number}")
        assert pulled() > before

    eventually(is_counted)
    after = spread.metrics()
    for name in ("ripresa_prompt_tokens_total", "ripresa_plan_kind_total"):
        assert after[name] > metrics.get(name, 0.0)
