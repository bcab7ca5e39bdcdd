"""Does a session go on elsewhere as if it had never moved, and only from a state that is whole?

The first turn runs on d0, the second one on d1, which brings the state. The reference knows no
cache, and follows the recipe that the second turn reports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from await_points import numbers_of_turns
from hash_machine import WINDOW, reference_stream
from hash_requests import ask, prompt, recipe_of
from peer_cluster import PeerCluster, outcome_of, peer_cluster
from split_cluster import CONFIG, IMPATIENT, PATIENT, Stream

from ripresa.workers.cache.parked_states import ParkedStates
from ripresa.workers.config import ParkConfig, TransferConfig, WindowConfig, WindowPolicy
from ripresa.workers.prefix_sources import BlockSource, ImageSource, PrefixSources
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import CacheUse, GenerationRequest
from ripresa.workers.transfer.faults import drop, kill, repeat

ZERO = replace(CONFIG, windows=WindowConfig(WindowPolicy.ZERO))
HASTY = replace(ZERO, transfer=TransferConfig(2, pull_timeout_s=0.2))
Change = Callable[[GenerationRequest], GenerationRequest]


@dataclass(frozen=True)
class Turns:
    """Two turns of a session: the first is over on d0, the second brings its state from there."""

    first: Recipe
    num_parked: int
    second: GenerationRequest


async def first_turn(
    cluster: PeerCluster, length: int, num_new: int, cache: CacheUse | None = None
) -> Turns:
    tokens = prompt(1, length)
    asked = replace(ask(tokens, cache=cache), session_id="s")
    if asked.cache.mode is ReplayMode.EXACT:
        asked = replace(asked, tail=TailVariant.EXACT)
    stream = await cluster.run("d0", asked)
    num_parked = length + len(stream.tokens) - 1
    home = cluster.address("d0")
    sources = PrefixSources(
        (BlockSource(home, (), 0, num_parked // WINDOW),),
        image=ImageSource(home, num_parked),
    )
    second = replace(
        asked,
        request_id="next",
        token_ids=tokens + stream.tokens + prompt(2, num_new),
        num_prompt_tokens=length + len(stream.tokens) + num_new,
        sources=sources,
    )
    return Turns(recipe_of(stream), num_parked, second)


def check(request: GenerationRequest, stream: Stream) -> Recipe:
    """The stream is what its recipe defines."""
    recipe = recipe_of(stream)
    stream.assert_equals(reference_stream(request, recipe=recipe))
    return recipe


def parked(cluster: PeerCluster, name: str) -> ParkedStates[torch.Tensor]:
    return cluster.decoder(name)._core._prefixes.parked


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
async def test_a_session_moves_with_its_state_and_its_blocks(transport: str) -> None:
    async with peer_cluster(config=ZERO, transport=transport) as cluster:
        turns = await first_turn(cluster, 43, 30)
        stream = await cluster.run("d1", turns.second)
        recipe = check(turns.second, stream)
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, turns.num_parked)
        outcome = outcome_of(stream)
        assert outcome.has_image
        assert outcome.from_peers == ((0, turns.num_parked // WINDOW),)
        assert cluster.ends("d1") == {"complete": 2}


@pytest.mark.parametrize("length", range(2 * WINDOW, 3 * WINDOW + 2))
@pytest.mark.parametrize("num_new", [0, 1, WINDOW])
async def test_the_cap_is_no_rule_for_it(length: int, num_new: int) -> None:
    """Blocks right below the state come along, however little is new; so does an open pair."""
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, length, num_new)
        recipe = check(turns.second, await cluster.run("d1", turns.second))
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, turns.num_parked)


async def test_a_chain_of_exact_turns_moves_in_mode_exact() -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 5, CacheUse(ReplayMode.EXACT))
        recipe = check(turns.second, await cluster.run("d1", turns.second))
        assert (recipe.kind, recipe.start) == (PlanKind.RESUME, turns.num_parked)


async def test_it_moves_back_and_forth() -> None:
    async with peer_cluster(0, 2, config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 5)
        request, num_parked = turns.second, turns.num_parked
        for number in range(4):
            here = ("d1", "d0")[number % 2]
            stream = await cluster.run(here, request)
            recipe = check(request, stream)
            assert (recipe.kind, recipe.start) == (PlanKind.RESUME, num_parked)
            num_parked = request.num_tokens + len(stream.tokens) - 1
            tokens = request.token_ids + stream.tokens + prompt(number, 3)
            home = cluster.address(here)
            sources = PrefixSources(
                (BlockSource(home, (), 0, num_parked // WINDOW),),
                image=ImageSource(home, num_parked),
            )
            request = replace(
                request,
                request_id=f"turn {number}",
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                sources=sources,
            )


def other_tokens(request: GenerationRequest) -> GenerationRequest:
    tokens = (request.token_ids[0] ^ 2, *request.token_ids[1:])
    return replace(request, token_ids=tokens)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, session_id="another"),
        lambda r: replace(r, tenant_salt=b"another"),
        other_tokens,
        lambda r: replace(r, cache=CacheUse(resumes=False)),
        lambda r: replace(r, cache=CacheUse(reads=False)),
        lambda r: replace(r, cache=CacheUse(ReplayMode.EXACT)),
    ],
    ids=["session", "tenant", "tokens", "resumes", "reads", "mode"],
)
async def test_another_request_does_not_get_it(change: Change) -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 30)
        request = change(turns.second)
        stream = await cluster.run("d1", request)
        assert check(request, stream).kind is not PlanKind.RESUME


async def test_what_is_parked_here_is_not_asked_for() -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 5)
        image = turns.second.sources.image
        assert image is not None
        wrong = replace(image, holder=cluster.address("d1"))
        request = replace(turns.second, sources=PrefixSources(image=wrong))
        recipe = check(request, await cluster.run("d0", request))
        assert recipe.kind is PlanKind.RESUME
        assert not cluster.was_asked("d1")


async def test_the_state_comes_and_its_blocks_do_not() -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 30)
        request = replace(turns.second, sources=replace(turns.second.sources, blocks=()))
        stream = await cluster.run("d1", request)
        assert check(request, stream).kind is PlanKind.COLD
        assert outcome_of(stream).has_image


async def test_an_overdue_state_stays() -> None:
    now = time.time()
    config = replace(ZERO, parked=ParkConfig(time_to_live_s=60.0))
    async with peer_cluster(config=config) as cluster:
        turns = await first_turn(cluster, 43, 30)
        cluster.decoder("d0")._core._prefixes.clock = lambda: now + 3600
        stream = await cluster.run("d1", turns.second)
        assert check(turns.second, stream).kind is PlanKind.BOUNDED
        assert cluster.ends("d1") == {"refused": 1, "complete": 1}


async def test_a_session_that_moved_pins_nothing_where_it_was() -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 5)
        left = cluster.decoder("d0")
        assert left.lease("r", ["search"])
        assert left.stats().leases.num_pinned_blocks > 0
        await cluster.run("d1", turns.second)
        await left.exchange.drain()
        assert left.stats().leases.num_pinned_blocks == 0


async def test_a_state_that_moved_makes_room_first() -> None:
    async with peer_cluster(config=ZERO) as cluster:
        turns = await first_turn(cluster, 43, 5)
        await cluster.run("d0", replace(ask(prompt(9, 20), "other"), session_id="newer"))
        await cluster.run("d1", turns.second)
        assert [session for _, session in parked(cluster, "d0")._held] == ["s", "newer"]
        assert len(parked(cluster, "d1")) == 1


@pytest.mark.parametrize("what", ["damaged", "layout", "rules", "size"])
async def test_a_state_that_does_not_fit_is_refused(what: str) -> None:
    layouts = {"d1": b"another"} if what == "layout" else None
    async with peer_cluster(config=ZERO, layouts=layouts) as cluster:
        turns = await first_turn(cluster, 43, 30)
        spoil(cluster, what)
        request = replace(turns.second, sources=replace(turns.second.sources, blocks=()))
        stream = await cluster.run("d1", request)
        cluster.loopback.damage = None
        assert check(request, stream).kind is PlanKind.COLD
        assert not outcome_of(stream).has_image
        assert cluster.ends("d1") == {"refused" if what == "layout" else "failed": 1}
        # Only the turn that is over has left a state.
        assert len(parked(cluster, "d1")) == 1


def spoil(cluster: PeerCluster, what: str) -> None:
    """Make what d0 sends unfit."""
    held = parked(cluster, "d0")._held
    ((owner, state),) = held.items()
    match what:
        case "rules":
            held[owner] = replace(state, recipe=replace(state.recipe, rules_version="0"))
        case "size":
            held[owner] = replace(state, payload=state.payload[:-8].clone())
        case "damaged":

            def damage(payload: torch.Tensor) -> torch.Tensor:
                flipped = payload.clone()
                flipped[3] ^= 16
                return flipped

            cluster.loopback.damage = damage


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("fault", [drop, kill, repeat])
@pytest.mark.parametrize("end", ["d0", "d1"])
async def test_a_fault_at_any_message(fault: object, number: int, end: str) -> None:
    """The turn goes on from the state, or is an ordinary one."""
    config, lanes = (ZERO, PATIENT) if fault is repeat else (HASTY, IMPATIENT)
    async with peer_cluster(config=config, lanes=lanes) as cluster:
        turns = await first_turn(cluster, 43, 5)
        cluster.fault(end, {number: fault})  # type: ignore[dict-item]
        stream = await cluster.run("d1", turns.second)
        recipe = check(turns.second, stream)
        is_whole = outcome_of(stream).num_held == turns.num_parked // WINDOW
        assert (recipe.kind is PlanKind.RESUME) is (outcome_of(stream).has_image and is_whole)
        # On a loaded machine a mover in a hurry may give up without any fault.
        if fault is repeat:
            assert recipe.kind is PlanKind.RESUME
        cluster.fault(end, {})


async def test_a_cancel_at_every_await_point() -> None:
    """The mover is cancelled after n turns of the event loop, for every n until it is through."""
    for num_turns in numbers_of_turns():
        async with peer_cluster(config=ZERO) as cluster:
            turns = await first_turn(cluster, 43, 5)
            task = asyncio.create_task(cluster.run("d1", turns.second))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_through = cluster.ends("d1").get("complete") == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await cluster.settle()
            again = replace(turns.second, request_id="again")
            assert check(again, await cluster.run("d1", again)).kind is PlanKind.RESUME
        if is_through:
            break
