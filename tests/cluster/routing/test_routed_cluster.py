"""Do routes, pulls, claims and parked states together compute no row twice, and none wrongly?

Router, directory, publishers, engines and transfers are the real ones; see `routed_cluster`.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
from hash_machine import REWIND, WINDOW
from hash_requests import prompt as tokens_of
from peer_cluster import turns_until
from routed_cluster import INTERVAL, Answered, routed_cluster
from routed_turns import WINDOWS, ask, check_tokens, turn
from split_cluster import CONFIG, StepGate
from told_index import Held, told_index

from ripresa.cluster.routing.prompt import Waste
from ripresa.workers.cache.block_hash import hash_blocks, worker_context
from ripresa.workers.replay import PlanKind, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, Tokens

TOPOLOGIES = [(0, 1), (0, 3), (3, 3)]
NUM_TURNS = 20


def most_rows(new: int) -> int:
    return max(3 * WINDOW + REWIND - 1, new + 2 * WINDOW)


@pytest.mark.parametrize(("encoders", "decoders"), TOPOLOGIES)
async def test_a_tool_loop_computes_what_is_new(encoders: int, decoders: int) -> None:
    rng = random.Random(encoders)
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        tokens = tokens_of(1, 40)
        processed = 0
        for number in range(NUM_TURNS):
            answered = await turn(cluster, ask(tokens, f"turn {number}"))
            rows = len(tokens) - answered.recipe.start
            new = len(tokens) - processed
            assert number == 0 or rows <= most_rows(new), answered.recipe
            assert not answered.planned.hit_error_tokens
            processed = len(tokens) + len(answered.tokens) - 1
            tokens += answered.tokens + tokens_of(100 + number, rng.randint(1, 18))


@pytest.mark.parametrize(("encoders", "decoders"), TOPOLOGIES)
async def test_a_session_computes_only_what_is_new(encoders: int, decoders: int) -> None:
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        tokens = tokens_of(2, 40)
        processed = 0
        for number in range(NUM_TURNS):
            answered = await turn(cluster, ask(tokens, f"turn {number}", session="loop"))
            assert answered.recipe.start == processed
            assert number == 0 or answered.recipe.kind is PlanKind.RESUME
            processed = len(tokens) + len(answered.tokens) - 1
            tokens += answered.tokens + tokens_of(200 + number, 3 + number % 11)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "without a directory"])
async def test_a_session_moves_from_a_busy_home(is_told: bool) -> None:
    """Every turn runs elsewhere, from the state that the turn before left, and says so."""
    async with routed_cluster(0, 3, config=WINDOWS) as cluster:
        cluster.directory.is_down = not is_told
        tokens = tokens_of(4, 40)
        processed, visited = 0, set[str]()
        for number in range(NUM_TURNS):
            asked = ask(tokens, f"turn {number}", session="loop")
            answered = await turn(cluster, asked)
            home = answered.placed.worker_id
            assert answered.recipe.start == processed
            assert number == 0 or answered.recipe.kind is PlanKind.RESUME
            assert answered.planned.prefix.has_image is (number > 0)
            assert not answered.planned.hit_error_tokens
            if number:
                said = cluster.router.explain(asked.request_id)
                assert any("the session's parked state from" in line for line in said), said
            processed = len(tokens) + len(answered.tokens) - 1
            tokens += answered.tokens + tokens_of(400 + number, 1 + number % 11)
            cluster.busy = {home: 10_000}
            visited.add(home)
        assert len(visited) > 1


async def test_a_session_whose_home_forgot_it_is_an_ordinary_prompt() -> None:
    async with routed_cluster(0, 3, config=WINDOWS) as cluster:
        tokens = tokens_of(5, 60)
        first = await turn(cluster, ask(tokens, "first", session="loop"))
        home = first.placed.worker_id
        cluster.busy = {home: 10_000}
        cluster.workers_by_id[home].engine._core._prefixes.parked.clear()
        tokens += first.tokens + tokens_of(500, 9)
        second = await turn(cluster, ask(tokens, "second", session="loop"))
        assert second.placed.worker_id != home
        assert second.recipe.kind is not PlanKind.RESUME
        # Its blocks came all the same.
        assert second.recipe.write_floor > 0


@pytest.mark.parametrize("session", [None, "loop"])
@pytest.mark.parametrize(("encoders", "decoders"), [(0, 3), (3, 3)])
async def test_whatever_is_lost_between_turns_costs_rows_alone(
    encoders: int, decoders: int, session: str | None
) -> None:
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        tokens = tokens_of(3, 60)
        for number in range(12):
            answered = await turn(cluster, ask(tokens, f"turn {number}", session=session))
            match number:
                case 2:
                    await cluster.kill(answered.placed.worker_id)
                case 4:
                    cluster.directory.restart()
                case 6:
                    cluster.evict_all()
                case 8:
                    cluster.directory.is_down = True
                case 9:
                    cluster.directory.is_down = False
                case 10 if answered.placed.encoder_id is not None:
                    await cluster.kill(answered.placed.encoder_id)
            tokens += answered.tokens + tokens_of(300 + number, 9)


@pytest.mark.parametrize(("encoders", "decoders"), TOPOLOGIES)
async def test_eight_sub_agents_compute_their_prefix_once(encoders: int, decoders: int) -> None:
    shared = tokens_of(4, 20 * WINDOW)
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        agents = [ask(shared + tokens_of(400 + k, 20), f"agent {k}") for k in range(8)]
        before = cluster.rows()
        answers = await asyncio.gather(*(cluster.ask(agent) for agent in agents))
        rows = cluster.rows() - before
        for agent, answered in zip(agents, answers, strict=True):
            check_tokens(agent, answered)
    starts = sorted(answered.recipe.start for answered in answers)
    assert starts[0] == 0
    assert starts[1] >= 19 * WINDOW
    computed = sum(len(agent.token_ids) for agent in agents) - sum(starts)
    assert rows == computed + sum(len(answered.tokens) - 1 for answered in answers)


@pytest.mark.parametrize(("encoders", "decoders"), TOPOLOGIES)
async def test_a_cancelled_leader_is_succeeded_once(encoders: int, decoders: int) -> None:
    """What the leader had computed is computed once, the rest once more, by one other."""
    shared = tokens_of(5, 20 * WINDOW)
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        agents = [ask(shared + tokens_of(500 + k, 20), f"agent {k}") for k in range(8)]
        gates = [
            StepGate(worker.machine, 4)
            for name, worker in cluster.workers_by_id.items()
            if (name[0] == "e") is bool(encoders)
        ]
        tasks = [asyncio.create_task(cluster.ask(agents[0]))]
        await asyncio.wait(
            [asyncio.ensure_future(gate.reached.wait()) for gate in gates],
            return_when=asyncio.FIRST_COMPLETED,
        )
        tasks += [asyncio.create_task(cluster.ask(agent)) for agent in agents[1:]]
        # The leader waits before its fourth step; the others have asked for what it computes.
        while cluster.directory.index.counters.num_follows < len(agents) - 1:
            await cluster.directory.changed()
        tasks[0].cancel()
        for gate in gates:
            gate.open()
        await asyncio.gather(tasks[0], return_exceptions=True)
        answers = await asyncio.gather(*tasks[1:])
        for agent, answered in zip(agents[1:], answers, strict=True):
            check_tokens(agent, answered)
        rows = cluster.rows()
    starts = sorted(answered.recipe.start for answered in answers)
    # Three steps of the leader were done and found by its successor, all but a replayed window.
    done = 3 * WINDOWS.max_batched_tokens
    assert starts[0] >= done - WINDOW
    assert starts[1] >= 19 * WINDOW
    # What nobody's answer counts is the leader's: those steps, the one that was under way, and
    # at most one that began before its worker heard of the cancel.
    own = sum(len(agent.token_ids) for agent in agents[1:]) - sum(starts)
    own += sum(len(answered.tokens) - 1 for answered in answers)
    assert done <= rows - own <= done + 2 * WINDOWS.max_batched_tokens


@pytest.mark.parametrize("mode", list(ReplayMode))
async def test_a_prefill_is_taken_over_where_it_ended(mode: ReplayMode) -> None:
    """The second encoder goes on from the blocks and the window that the decode worker has."""
    config = replace(
        WINDOWS,
        max_batched_tokens=2 * WINDOW,
        transfer=replace(CONFIG.transfer, hand_over_window_blocks=1, max_section_blocks=16),
        anchor_interval=6 * WINDOW,
    )
    asked = ask(tokens_of(9, 40 * WINDOW + 3), "long", cache=CacheUse(mode))
    hashes = hash_blocks(worker_context(b"hash machine", WINDOW, b""), asked.token_ids)
    async with routed_cluster(2, 1, config=config) as cluster:
        encoders = [cluster.workers_by_id[name] for name in ("e0", "e1")]
        gates = [StepGate(worker.machine, 20) for worker in encoders]
        windows = cluster.workers_by_id["d0"].engine._core._prefixes.windows
        answer = asyncio.create_task(cluster.ask(asked))
        reached = [asyncio.create_task(gate.reached.wait()) for gate in gates]
        await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
        first = 0 if gates[0].reached.is_set() else 1
        # Only the newest window is kept.
        (newest,) = windows._held
        boundary = (hashes.index(newest.hash) + 1) * WINDOW
        for gate in gates:
            gate.open()
        await cluster.kill(f"e{first}")
        answered = await answer
        check_tokens(asked, answered)
        for task in reached:
            task.cancel()
        restarts = answered.recipe.restarts_below(len(asked.token_ids))
        most = len(asked.token_ids) - boundary + WINDOW * sum(r >= boundary for r in restarts)
        assert encoders[1 - first].engine.stats().num_encoder_rows <= most


async def test_tenants_share_nothing() -> None:
    tokens = tokens_of(6, 10 * WINDOW)
    async with routed_cluster(0, 3, config=WINDOWS) as cluster:
        first = await turn(cluster, ask(tokens, "one", salt=b"one", session="s"))
        other = await turn(cluster, ask(tokens, "two", salt=b"two", session="s"))
        longer = tokens + first.tokens + tokens_of(7, 5)
        resumed = await turn(cluster, ask(longer, "three", salt=b"two", session="s"))
        assert first.recipe.start == other.recipe.start == 0
        for salt, held in ((b"one", 10 * WINDOW), (b"three", 0)):
            assert await cluster.router.num_held_tokens((*tokens, 1, 2), salt) == held
        cluster.directory.is_down = True
        assert await cluster.router.num_held_tokens(tokens, b"one") == 0
        cluster.directory.is_down = False
        # Its own turn had the same tokens, so it goes on from that one.
        assert resumed.recipe.kind is PlanKind.RESUME
        stranger = await turn(cluster, ask(longer, "four", salt=b"three", session="s"))
        assert stranger.recipe.kind is PlanKind.COLD
        pulls = [w.engine.stats().pulls for w in cluster.workers_by_id.values()]
        assert all(pull.received_bytes == 0 for pull in pulls)


async def test_tenants_at_once_lead_their_own_claims() -> None:
    tokens = tokens_of(8, 10 * WINDOW)
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        asked = [ask(tokens, f"tenant {k}", salt=bytes([k])) for k in range(4)]
        answers = await asyncio.gather(*(cluster.ask(one) for one in asked))
        assert [answered.recipe.start for answered in answers] == [0] * 4
        assert cluster.directory.index.counters.num_follows == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("encoders", "decoders"), [(0, 2), (2, 2)])
async def test_a_directory_of_lies_changes_no_answer(
    encoders: int, decoders: int, seed: int
) -> None:
    """Wrong holders, windows that are none, dead workers, lineages that nobody computed."""
    rng = random.Random(seed)
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        names = [*cluster.workers_by_id, "nobody"]
        tokens = tokens_of(seed, 50)
        for number in range(6):
            layout = b"hash machine"
            hashes = hash_blocks(worker_context(layout, WINDOW, b""), tokens)
            lies = {
                name: [
                    Held(
                        hashes,
                        stop=rng.randint(0, len(hashes)),
                        restarts=rng.choice([(), (2 * WINDOW,), (WINDOW, 3 * WINDOW)]),
                        windows=tuple(rng.sample(range(1, len(hashes) + 1), 2)),
                    )
                ]
                for name in rng.sample(names, rng.randint(1, len(names)))
            }
            now = asyncio.get_running_loop().time()
            cluster.directory.index = told_index(WINDOW, lies, now)
            asked = ask(tokens, f"turn {number}")
            answered = await cluster.ask(asked)
            check_tokens(asked, answered)
            tokens += answered.tokens + tokens_of(700 + number, 11)
        assert cluster.directory.receipts


async def test_a_lie_is_counted_and_corrected() -> None:
    tokens = tokens_of(9, 10 * WINDOW)
    hashes = hash_blocks(worker_context(b"hash machine", WINDOW, b""), tokens)
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        now = asyncio.get_running_loop().time()
        index = told_index(WINDOW, {"d1": [Held(hashes, 8)]}, now)
        cluster.directory.index = index
        answered = await cluster.ask(ask(tokens, "misled"))
        assert answered.placed.worker_id == "d1"
        assert answered.planned.hit_error_tokens == 8 * WINDOW
        assert index.counters.num_overestimated_blocks == 8
        assert answered.recipe.kind is PlanKind.COLD


async def test_a_plan_explains_itself() -> None:
    tokens = tokens_of(10, 10 * WINDOW)
    async with routed_cluster(2, 2, config=WINDOWS) as cluster:
        await turn(cluster, ask(tokens, "first"))
        again = await turn(cluster, ask(tokens, "second"))
        lines = cluster.router.explain("second")
        text = "\n".join(lines)
        assert lines[0] == f"request second, {len(tokens)} prompt tokens"
        assert f"{again.placed.worker_id}, encoder {again.placed.encoder_id}" in text
        assert "planned hit: window" in text
        assert "real hit: " in text
        assert "instead: " in text
        assert "recipe: window" in text


async def test_working_copies_make_room_before_last_copies() -> None:
    """Blocks that another worker has used since go before older ones that nobody else holds."""
    shared, own = tokens_of(11, 10 * WINDOW), tokens_of(12, 10 * WINDOW)
    async with routed_cluster(0, 2, config=WINDOWS, num_blocks=24) as cluster:
        cluster.busy = {"d1": 10_000}
        before = await turn(cluster, ask(own, "own"))
        first = await turn(cluster, ask(shared, "first"))
        cluster.busy = {"d0": 10_000}
        copied = await turn(cluster, ask(shared, "copied"))
        assert copied.placed.worker_id == "d1"
        assert copied.planned.prefix.num_from_peers == copied.recipe.write_floor // WINDOW
        # The answer to its next report tells d0 which of its blocks are copies now.
        blocks = cluster.workers_by_id["d0"].engine._core._prefixes.blocks
        await turns_until(lambda: not blocks.at_risk(9))
        cluster.busy = {"d1": 10_000}
        pressed = await turn(cluster, ask(tokens_of(13, 8 * WINDOW), "pressure"))
        again = await turn(cluster, ask(own, "own again"))
        places = {answered.placed.worker_id for answered in (before, first, pressed, again)}
        assert places == {"d0"}
        assert again.recipe.write_floor == copied.recipe.write_floor
        # Nothing of it had to be brought.
        assert not again.planned.prefix.num_from_peers


@pytest.mark.parametrize(("encoders", "decoders"), [(0, 2), (2, 2)])
@pytest.mark.parametrize(
    ("mode", "tail"),
    [
        (ReplayMode.EXACT, TailVariant.FLOORED),
        (ReplayMode.EXACT, TailVariant.EXACT),
        (ReplayMode.CANONICAL, TailVariant.FLOORED),
    ],
)
async def test_other_modes_find_what_was_planned(
    mode: ReplayMode, tail: TailVariant, encoders: int, decoders: int
) -> None:
    config = replace(WINDOWS, anchor_interval=INTERVAL)
    async with routed_cluster(encoders, decoders, config=config) as cluster:
        tokens = tokens_of(14, 100)
        for number in range(6):
            asked = replace(ask(tokens, f"turn {number}", cache=CacheUse(mode=mode)), tail=tail)
            answered = await cluster.ask(asked)
            await cluster.told()
            check_tokens(asked, answered)
            assert not answered.planned.hit_error_tokens
            assert (answered.recipe.write_floor > 0) is (number > 0)
            tokens += answered.tokens + tokens_of(800 + number, 13)


@pytest.mark.parametrize(("encoders", "decoders"), [(0, 2), (2, 2)])
async def test_a_request_cancelled_at_any_moment_leaves_no_claim(
    encoders: int, decoders: int
) -> None:
    async with routed_cluster(encoders, decoders, config=WINDOWS) as cluster:
        for number in range(0, 120, 4):
            tokens = tokens_of(900 + number, 6 * WINDOW)
            tasks = [
                asyncio.create_task(cluster.ask(ask(tokens, f"cancelled {number} {k}")))
                for k in range(2)
            ]
            for _ in range(number):
                await asyncio.sleep(0)
            tasks[0].cancel()
            (_, answered) = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answered, Answered), answered
            check_tokens(ask(tokens, "its twin"), answered)
            await cluster.told()
        while cluster.directory.index.num_claims:
            await cluster.directory.changed()


async def test_a_waste_is_told() -> None:
    """A decode worker that dies after the prompt was computed makes another compute it again."""
    async with routed_cluster(0, 2, config=WINDOWS) as cluster:
        asked = ask(tokens_of(15, 5 * WINDOW), "r", max_tokens=30)
        events = cluster.router.generate(asked)
        answered = Answered()
        async with aclosing(events):
            async for event in events:
                answered.events.append(event)
                if isinstance(event, Tokens) and cluster.dead == set():
                    await cluster.kill(answered.placed.worker_id)
        check_tokens(asked, answered)
        assert cluster.wasted == [(Waste.RETRIED, 5 * WINDOW)]
