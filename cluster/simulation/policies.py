"""Who serves the prompts of a trace? Three plain policies, and the cluster's own.

    round robin       the next worker, whatever it holds
    sticky sessions   a conversation's worker for ever
    one cache         no cluster at all: one worker with all the memory
    directory         index, routing and placement as they run in a cluster

Every worker evicts in the real order; what is reused of a chain says the real replay planner. There
is no time: a prompt is over before the next one comes, and a finished turn's window is always held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ripresa.cluster.directory.events import (
    Accepted,
    Epoch,
    HeldKind,
    Report,
    Run,
    SendAll,
    Tier,
)
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.placement import computing_worker, keeping_worker
from ripresa.cluster.simulation.arrivals import BlockTree, Prompt
from ripresa.cluster.simulation.worker_memory import Evicted, WorkerMemory
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry

MOVED_TOGETHER = 64
"""Blocks that make room for which a keeper is chosen at once."""


class Policy(Protocol):
    """Serves prompts one after the other.

    Attributes:
        name: for the table.
        work: uncached tokens by worker.
        num_reused_tokens: of all prompts so far.
        num_pulled_tokens: those of them that another worker held.
        num_moved_tokens: of blocks that went to another worker instead of going away.
    """

    name: str
    work: dict[str, int]
    num_reused_tokens: int
    num_pulled_tokens: int
    num_moved_tokens: int

    def serve(self, prompt: Prompt) -> None: ...


class Ledger:
    """What is counted of a policy."""

    def __init__(self, name: str, workers: Sequence[str], geometry: ReplayGeometry) -> None:
        self.name = name
        self.work = dict.fromkeys(workers, 0)
        self.num_reused_tokens = 0
        self.num_pulled_tokens = 0
        self.num_moved_tokens = 0
        self._geometry = geometry

    def book(self, worker: str, prompt: Prompt, num_held: int) -> None:
        """The worker computes what the replay rules leave of a prompt."""
        chain = [_EXACT] * num_held
        query = PrefillQuery(self._geometry, prompt.num_tokens, chain, _EVERY_WINDOW)
        reused = plan_prefill(query).num_skipped
        self.num_reused_tokens += reused
        self.work[worker] += prompt.num_tokens - reused


_EXACT = BlockIdentity(b"", ())
_EVERY_WINDOW = frozenset({_EXACT})


class LocalCaches(Ledger):
    """Workers that know nothing of each other.

    Args:
        sticky: a conversation stays with the worker of its first prompt; otherwise every prompt
            goes to the next one. The first prompts go round as well.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[str],
        capacity_blocks: int,
        geometry: ReplayGeometry,
        *,
        sticky: bool,
    ) -> None:
        super().__init__(name, workers, geometry)
        self._memories = {worker: WorkerMemory(capacity_blocks) for worker in workers}
        self._sticky = sticky
        self._home: dict[int, str] = {}
        self._workers = tuple(workers)
        self._next = 0

    def serve(self, prompt: Prompt) -> None:
        worker = self._home.get(prompt.conversation) if self._sticky else None
        if worker is None:
            worker = self._home[prompt.conversation] = self._workers[self._next]
            self._next = (self._next + 1) % len(self._workers)
        memory = self._memories[worker]
        blocks = prompt.blocks[: memory.capacity_blocks]
        num_held = memory.num_held(blocks)
        self.book(worker, prompt, num_held)
        held = [block for block in blocks if block in memory]
        memory.take(held)
        memory.make_room(len(blocks) - len(held))
        memory.put_back(held, prompt.at_s)
        memory.put(blocks, prompt.at_s)


class DirectoryPolicy(Ledger):
    """The real prefix index, fed by reports, with the cluster's own routing and placement.

    A computing worker pulls what it lacks; copies take room like everything else. What a worker
    has to evict moves where the placement rule says; a move is never late.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[str],
        capacity_blocks: int,
        geometry: ReplayGeometry,
        tree: BlockTree,
    ) -> None:
        super().__init__(name, workers, geometry)
        settings = DirectorySettings(
            window=geometry.window,
            # Every block of every worker: what is forgotten here is another bench's affair.
            capacity_blocks=2 * capacity_blocks * len(workers),
        )
        self._index = PrefixIndex(settings, "simulation")
        self._tree = tree
        self._memories = {worker: WorkerMemory(capacity_blocks) for worker in workers}
        self._voices = {
            worker: _Voice(worker, self._index, tree.hashes, memory)
            for worker, memory in self._memories.items()
        }

    def serve(self, prompt: Prompt) -> None:
        blocks = prompt.blocks[: min(m.capacity_blocks for m in self._memories.values())]
        hashes = [self._tree.hashes[block] for block in blocks]
        found = self._index.lookup(hashes, 0.0)
        num_found = max((chain.num_blocks for chain in found.chains), default=0)
        held: dict[str, list[int]] = {}
        for stretch in found.stretches:
            for holding in stretch.holdings:
                part = blocks[stretch.start : stretch.stop]
                held.setdefault(holding.worker, []).extend(part)
        worker = computing_worker(
            {holder: len(theirs) for holder, theirs in held.items()}, self.work
        )
        self.book(worker, prompt, num_found)
        self._compute(worker, prompt.at_s, blocks, num_found, held)
        for voice in self._voices.values():
            voice.report()

    def _compute(
        self,
        worker: str,
        at_s: float,
        blocks: Sequence[int],
        num_found: int,
        held: dict[str, list[int]],
    ) -> None:
        memory, own = self._memories[worker], held.pop(worker, [])
        here = set(own)
        pulled = [block for block in blocks[:num_found] if block not in here]
        self.num_pulled_tokens += len(pulled) * self._geometry.window
        lent: dict[str, list[int]] = {}
        for block in pulled:
            holder = next(h for h in self._memories if h != worker and block in self._memories[h])
            lent.setdefault(holder, []).append(block)
        for holder, theirs in lent.items():
            self._memories[holder].take(theirs)
        memory.take(own)
        self._make_room(worker, len(blocks) - len(own), at_s)
        for holder, theirs in lent.items():
            self._memories[holder].put_back(theirs, at_s)
        copies = [block for block in own if memory.claim(block)]
        memory.put_back(own, at_s)
        self._voices[worker].hold_all(copies)
        memory.put([block for block in blocks if block not in here], at_s)
        self._voices[worker].hold_all(pulled)
        self._voices[worker].hold(blocks, num_found, len(blocks) - num_found)

    def _make_room(self, worker: str, num_blocks: int, at_s: float) -> None:
        gone = self._memories[worker].make_room(num_blocks)
        last = [block for block in gone if block.is_last]
        for start in range(0, len(last), MOVED_TOGETHER):
            self._move(worker, last[start : start + MOVED_TOGETHER], at_s)
        self._voices[worker].drop(gone)

    def _move(self, worker: str, offered: Sequence[Evicted], at_s: float) -> None:
        """Let another worker keep what this one has to evict, if that one's are older."""
        ages = {name: memory.age(at_s) for name, memory in self._memories.items()}
        ages[worker] = at_s - offered[-1].used_at
        keeper = keeping_worker(worker, ages)
        if keeper == worker:
            return
        memory = self._memories[keeper]
        num_kept = memory.room_for(offered)
        if num_kept:
            kept = offered[-num_kept:]
            self._voices[keeper].drop(memory.make_room(num_kept))
            memory.take_in(kept)
            self._voices[keeper].hold_all([block for block, _, _ in kept])
            self.num_moved_tokens += num_kept * self._geometry.window


class _Voice:
    """What one worker tells the index, one report a prompt, and what it hears of its copies."""

    def __init__(
        self, worker: str, index: PrefixIndex, hashes: Sequence[bytes], memory: WorkerMemory
    ) -> None:
        self._worker = worker
        self._index = index
        self._hashes = hashes
        self._memory = memory
        self._numbers: dict[bytes, int] = {}
        self._runs: list[Run] = []
        self._number = 0
        reply = index.report(Report(worker, 0, None, 0), 0.0)
        assert isinstance(reply, SendAll)
        self._epoch: Epoch = reply.epoch
        self.report()

    def hold(self, chain: Sequence[int], start: int, num_blocks: int) -> None:
        """Blocks [start, start + num_blocks) of a chain are held from now on."""
        parent = self._hashes[chain[start - 1]] if start else None
        self._tell(True, parent, chain[start : start + num_blocks])

    def hold_all(self, blocks: Sequence[int]) -> None:
        """Blocks that the index knows already are held here too."""
        if blocks:
            self._tell(True, None, blocks)

    def drop(self, gone: Sequence[Evicted]) -> None:
        if gone:
            self._tell(False, None, [block for block, _, _ in gone])

    def _tell(self, is_held: bool, parent: bytes | None, blocks: Sequence[int]) -> None:
        hashes = tuple(self._hashes[block] for block in blocks)
        self._numbers.update(zip(hashes, blocks, strict=True))
        self._runs.append(Run(is_held, HeldKind.BLOCK, Tier.DEVICE, "", (), parent, hashes))

    def report(self) -> None:
        runs, self._runs = tuple(self._runs), []
        reply = self._index.report(Report(self._worker, 0, self._epoch, self._number, runs), 0.0)
        assert isinstance(reply, Accepted)
        self._number += 1
        if reply.advice is not None:
            for identity in reply.advice.copied:
                self._memory.mark_copy(self._numbers[identity.hash], is_copy=True)
            for identity in reply.advice.kept:
                self._memory.mark_copy(self._numbers[identity.hash], is_copy=False)
