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
from ripresa.cluster.simulation.worker_memory import WorkerMemory
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import PrefillQuery, ReplayGeometry

PLACED_TOGETHER = 64
"""New blocks of a prompt for which a keeper is chosen at once."""


class Policy(Protocol):
    """Serves prompts one after the other.

    Attributes:
        name: for the table.
        work: uncached tokens by worker.
        num_reused_tokens: of all prompts so far.
        num_pulled_tokens: those of them that another worker kept.
    """

    name: str
    work: dict[str, int]
    num_reused_tokens: int
    num_pulled_tokens: int

    def serve(self, prompt: Prompt) -> None: ...


class _Ledger:
    """What is counted of a policy."""

    def __init__(self, name: str, workers: Sequence[str], geometry: ReplayGeometry) -> None:
        self.name = name
        self.work = dict.fromkeys(workers, 0)
        self.num_reused_tokens = 0
        self.num_pulled_tokens = 0
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


class LocalCaches(_Ledger):
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


class DirectoryPolicy(_Ledger):
    """The real prefix index, fed by reports, with the cluster's own routing and placement.

    A computing worker pulls what it lacks. Its new blocks are kept where the placement rule says.

    Args:
        keeps_copies: what was pulled, and new blocks that another worker keeps, stay as working
            copies, which take room and are the first to go. Otherwise they are gone with the
            prompt, as if room for running prompts were apart.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[str],
        capacity_blocks: int,
        geometry: ReplayGeometry,
        tree: BlockTree,
        *,
        keeps_copies: bool = False,
    ) -> None:
        super().__init__(name, workers, geometry)
        settings = DirectorySettings(
            window=geometry.window,
            # Every block of every worker: what is forgotten here is another bench's affair.
            capacity_blocks=2 * capacity_blocks * len(workers),
        )
        self._index = PrefixIndex(settings, "simulation")
        self._tree = tree
        self._keeps_copies = keeps_copies
        self._memories = {worker: WorkerMemory(capacity_blocks) for worker in workers}
        self._voices = {worker: _Voice(worker, self._index, tree.hashes) for worker in workers}

    def serve(self, prompt: Prompt) -> None:
        blocks = prompt.blocks[: min(m.capacity_blocks for m in self._memories.values())]
        hashes = [self._tree.hashes[block] for block in blocks]
        found = self._index.lookup(hashes, 0.0)
        num_found = max((chain.num_blocks for chain in found.chains), default=0)
        held: dict[str, list[int]] = {}
        kept: dict[str, list[int]] = {}
        for stretch in found.stretches:
            part = blocks[stretch.start : stretch.stop]
            holders = [holding.worker for holding in stretch.holdings]
            for holder in holders:
                held.setdefault(holder, []).extend(part)
            if len(holders) == 1:
                kept.setdefault(holders[0], []).extend(part)
                continue
            for block in part:
                keeper = next((h for h in holders if self._memories[h].keeps(block)), holders[0])
                kept.setdefault(keeper, []).append(block)
        worker = computing_worker(
            {holder: len(theirs) for holder, theirs in held.items()}, self.work
        )
        self.book(worker, prompt, num_found)
        self._compute(worker, prompt.at_s, blocks, num_found, held.get(worker, []), kept)
        for voice in self._voices.values():
            voice.report()

    def _compute(
        self,
        worker: str,
        at_s: float,
        blocks: Sequence[int],
        num_found: int,
        own: Sequence[int],
        kept: dict[str, list[int]],
    ) -> None:
        new, copies = blocks[num_found:], self._keeps_copies
        memory = self._memories[worker]
        for keeper, theirs in kept.items():
            self._memories[keeper].take(theirs)
        kept_here = set(kept.get(worker, ()))
        copies_held = [block for block in own if block not in kept_here]
        memory.take(copies_held)
        here = set(own)
        pulled = [block for block in blocks[:num_found] if block not in here]
        self.num_pulled_tokens += len(pulled) * self._geometry.window
        if copies:
            self._make_room(worker, len(pulled) + len(new))
        for start in range(0, len(new), PLACED_TOGETHER):
            part = new[start : start + PLACED_TOGETHER]
            ages = {name: at_s - other.oldest for name, other in self._memories.items()}
            keeper = keeping_worker(worker, ages)
            if keeper != worker or not copies:
                self._make_room(keeper, len(part))
            if keeper != worker and copies:
                memory.put_copies(part)
                self._voices[worker].hold(blocks, num_found + start, len(part))
            self._memories[keeper].put(part, at_s)
            self._voices[keeper].hold(blocks, num_found + start, len(part))
        memory.put_back_copies(copies_held)
        if copies:
            memory.put_copies(pulled)
            self._voices[worker].hold_all(pulled)
        for keeper, theirs in kept.items():
            self._memories[keeper].put_back(theirs, at_s)

    def _make_room(self, worker: str, num_blocks: int) -> None:
        self._voices[worker].drop(self._memories[worker].make_room(num_blocks))


class _Voice:
    """What one worker tells the index, one report a prompt."""

    def __init__(self, worker: str, index: PrefixIndex, hashes: Sequence[bytes]) -> None:
        self._worker = worker
        self._index = index
        self._hashes = hashes
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

    def drop(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._tell(False, None, blocks)

    def _tell(self, is_held: bool, parent: bytes | None, blocks: Sequence[int]) -> None:
        hashes = tuple(self._hashes[block] for block in blocks)
        self._runs.append(Run(is_held, HeldKind.BLOCK, Tier.DEVICE, "", (), parent, hashes))

    def report(self) -> None:
        if self._number and not self._runs:
            return
        runs, self._runs = tuple(self._runs), []
        reply = self._index.report(Report(self._worker, 0, self._epoch, self._number, runs), 0.0)
        assert isinstance(reply, Accepted)
        self._number += 1
