"""What are leases worth? Sticky conversations on workers with the real block cache and leases.

A recorded answer that calls tools grants a lease at the time at which it was complete; which tool
that was is not recorded, so all gaps teach one estimate a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ripresa.cluster.simulation.arrivals import BlockTree, Prompt
from ripresa.cluster.simulation.policies import Ledger
from ripresa.workers.cache.block_cache import BlockCache
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_pool import BlockPool
from ripresa.workers.cache.block_record import BlockRecord, Producer
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.cache.parked_states import ParkedStates
from ripresa.workers.cache.session_leases import Arrival, EndedTurn, LeaseOutcome, SessionLeases
from ripresa.workers.config import LeaseConfig
from ripresa.workers.replay_query import ReplayGeometry

MAX_POOLS_REMEMBERED = 4


class LeasingCaches(Ledger):
    """Workers that know nothing of each other; each conversation stays with one.

    Args:
        leases: how much, and how long.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[str],
        capacity_blocks: int,
        geometry: ReplayGeometry,
        tree: BlockTree,
        leases: LeaseConfig,
    ) -> None:
        super().__init__(name, workers, geometry)
        self._tree = tree
        self._capacity_blocks = capacity_blocks
        self._workers = {
            worker: _Worker(capacity_blocks, geometry.window, leases) for worker in workers
        }
        self._names = tuple(workers)
        self._home: dict[int, str] = {}
        self._num_served = 0

    @property
    def outcomes(self) -> dict[LeaseOutcome, int]:
        """Of all workers' leases."""
        found = [worker.leases.outcomes for worker in self._workers.values()]
        return {outcome: sum(counts[outcome] for counts in found) for outcome in LeaseOutcome}

    def serve(self, prompt: Prompt) -> None:
        next_worker = self._names[len(self._home) % len(self._names)]
        name = self._home.setdefault(prompt.conversation, next_worker)
        worker = self._workers[name]
        blocks = prompt.blocks[: self._capacity_blocks]
        chain = [BlockIdentity(self._tree.hashes[block], ()) for block in blocks]
        session = f"{prompt.conversation} {prompt.thread}"
        self._num_served += 1
        self.book(name, prompt, worker.serve(str(self._num_served), session, prompt, chain))


class _Worker:
    """One worker's cache."""

    def __init__(self, capacity_blocks: int, window: int, leases: LeaseConfig) -> None:
        self._blocks = BlockCache(
            BlockPool(capacity_blocks),
            window,
            max_pinned=int(leases.max_share * capacity_blocks),
        )
        parked: ParkedStates[Any] = ParkedStates(0)
        max_blocks = MAX_POOLS_REMEMBERED * capacity_blocks
        self.leases = SessionLeases(self._blocks, parked, max_blocks, leases.max_time_s)
        self._window = window

    def serve(
        self, request_id: str, session: str, prompt: Prompt, chain: Sequence[BlockIdentity]
    ) -> int:
        """Compute a prompt; how many of its blocks were held."""
        self.leases.lapse(prompt.at_s)
        hashes = [identity.hash for identity in chain]
        held = self._blocks.match(hashes)
        adopted = self._blocks.adopt(held)
        own = self._blocks.allocate(len(chain) - len(held))
        self.leases.arrived(Arrival(b"", session, (), hashes, self._window), prompt.at_s)
        for identity, block in zip(chain[len(held) :], own, strict=True):
            record = BlockRecord(identity, Producer.PREFILL, "", _ORIGIN)
            self._blocks.acknowledge(self._blocks.offer(block, record), 0)
        last = hashes[-1] if hashes else None
        turn = EndedTurn(request_id, b"", session, tuple(chain), len(chain), last, ())
        ended_at = prompt.at_s + (prompt.calls_after_s or 0.0)
        self.leases.turn_over(turn, ended_at)
        self._blocks.release((*adopted, *own))
        if prompt.calls_after_s is not None:
            self.leases.grant(request_id, ["tool"], ended_at)
        return len(held)


_ORIGIN = Origin("", b"", None)
