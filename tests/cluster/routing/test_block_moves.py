"""Do last copies outlive the worker that has to evict them, and does moving them come to an end?

Router, directory, publishers, engines and transfers are the real ones; see `routed_cluster`.
"""

from __future__ import annotations

from dataclasses import replace

from hash_machine import WINDOW, reference_stream
from hash_requests import ask, prompt, recipe_of
from peer_cluster import turns_until
from routed_cluster import RoutedCluster, routed_cluster
from split_cluster import CONFIG, Stream

from ripresa.workers.config import MoveConfig
from ripresa.workers.request import GenerationRequest, MoveCounters

EAGER = MoveConfig(ahead=0.25, blocks_a_move=2, interval_s=0.001)
MOVING = replace(CONFIG, moves=EAGER, reserved_output_tokens=8)
NUM_BLOCKS = 24
LENGTH = 6 * WINDOW + 1


async def run(cluster: RoutedCluster, worker: str, request: GenerationRequest) -> Stream:
    """A request that one worker serves from what it holds; the directory then knows."""
    events = [event async for event in cluster.calls.generate(worker, request, True)]
    await cluster.told()
    stream = Stream(tuple(events))
    stream.assert_equals(reference_stream(request, recipe=recipe_of(stream)))
    return stream


def moves(cluster: RoutedCluster, worker: str) -> MoveCounters:
    return cluster.workers_by_id[worker].engine.stats().moves


def num_held(cluster: RoutedCluster, worker: str, request: GenerationRequest) -> int:
    """Leading blocks of a prompt that a worker holds."""
    core = cluster.workers_by_id[worker].engine._core
    return len(core._prefixes.blocks.match(core._prefixes.open(request).hashes))


def prompts(num: int, first: int = 0) -> list[GenerationRequest]:
    return [ask(prompt(1000 + k, LENGTH), f"r{k}") for k in range(first, first + num)]


async def test_what_a_full_worker_evicts_is_kept_by_an_empty_one() -> None:
    asked = prompts(5)
    async with routed_cluster(0, 2, config=MOVING, num_blocks=NUM_BLOCKS) as cluster:
        blocks = cluster.workers_by_id["d0"].engine._core._prefixes.blocks
        for request in asked:
            await run(cluster, "d0", request)
            await turns_until(lambda: not blocks.at_risk(6))
        assert sum(num_held(cluster, "d0", request) for request in asked) < 5 * 6
        counters = moves(cluster, "d0")
        assert counters.num_moved == moves(cluster, "d1").num_taken > 0
        assert (counters.num_refused, counters.num_late) == (0, 0)
        assert counters.sent_bytes == counters.num_moved * WINDOW * 8
        # Each block is somewhere: the directory names all of every prompt.
        await cluster.told()
        for request in asked:
            hashes = cluster.workers_by_id["d0"].engine._core._prefixes.open(request).hashes
            found = cluster.directory.index.lookup(hashes, cluster.directory._now)
            assert max(chain.num_blocks for chain in found.chains) == len(hashes)
