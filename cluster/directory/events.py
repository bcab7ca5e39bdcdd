"""What do workers, gateways and the prefix directory say to each other?

worker  ── Report ──▶ directory ── Accepted | SendAll | Refused ──▶ worker
gateway ── hashes ──▶ directory ── Answer: hints, and Lead | Follow ──▶ gateway
gateway ── Receipt ─▶ directory

Everything the directory says is a hint: the worker that is named checks it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ripresa.workers.cache.cache_events import CopyAdvice, Room
from ripresa.workers.cache.cache_events import HeldKind as HeldKind
from ripresa.workers.cache.cache_events import Tier as Tier

Lineage = tuple[int, ...]
"""Restarts of a block (replay rules, section 5)."""


class Standing(StrEnum):
    """How far a worker's entries can be trusted.

    EXACT: everything it reported is known, without a gap. CATCHING_UP: it has to send, or is
    sending, everything again. BLIND: it has not been heard of in time.
    """

    EXACT = "exact"
    CATCHING_UP = "catching_up"
    BLIND = "blind"


class Epoch(NamedTuple):
    """Names one demand to send everything; the worker quotes it, which no late message can.

    Attributes:
        directory: incarnation of the directory.
        demand: rises with every demand.
    """

    directory: str
    demand: int


class Run(NamedTuple):
    """Consecutive blocks of one chain, or single windows, that came or went.

    Attributes:
        is_held: they are held from now on; False if they are gone.
        tenant: whom their memory in the directory is charged to.
        parent: hash of the block before the first one; None for a prompt's first block, or if it
            is not known. It orders what the directory forgets; nothing else depends on it.
        hashes: each the child of the one before it.
    """

    is_held: bool
    kind: HeldKind
    tier: Tier
    tenant: str
    restarts: Lineage
    parent: bytes | None
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What changed in a worker's pools; also its sign of life, then without runs.

    Attributes:
        epoch: of the demand that number 0 answered; None before the first demand.
        number: counts the reports of an epoch from 0. Number 0 makes all earlier ones void.
        is_complete: False while more parts of what number 0 began are to follow.
        leading: requests whose missing blocks this worker is computing.
        ended: requests that it led and does not lead any more, finished or not.
        room: for blocks that other workers have to evict; None while it takes none.
    """

    worker: str
    incarnation: int
    epoch: Epoch | None
    number: int
    runs: tuple[Run, ...] = ()
    is_complete: bool = True
    leading: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    room: Room | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The report counts.

    Attributes:
        not_leading: requests of `leading` that hold no claim (any more).
        advice: which of the worker's blocks others keep, as far as it has changed.
    """

    not_leading: tuple[str, ...] = ()
    advice: CopyAdvice | None = None


@dataclass(frozen=True, slots=True)
class SendAll:
    """The report did not count: begin again with number 0 of this epoch and everything held."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Refused:
    """This incarnation is dead for the directory.

    Attributes:
        lowest_incarnation: the worker may come back with this one or a later one.
    """

    lowest_incarnation: int


Reply = Accepted | SendAll | Refused


class Holder(NamedTuple):
    worker: str
    incarnation: int
    standing: Standing


class Prefix(NamedTuple):
    """A worker's longest chain of one lineage: blocks [0, num_blocks) of the prompt."""

    holder: Holder
    restarts: Lineage
    num_blocks: int


class Chain(NamedTuple):
    """The longest chain of one lineage that workers hold together, blind ones left out."""

    restarts: Lineage
    num_blocks: int


class Holding(NamedTuple):
    kind: HeldKind
    restarts: Lineage
    tier: Tier
    worker: str
    incarnation: int


class Stretch(NamedTuple):
    """Who holds each of the blocks [start, stop) of the prompt, in every lineage and tier.

    A window holding means one window at the end of each of these blocks.
    """

    start: int
    stop: int
    holdings: tuple[Holding, ...]


class HotPrefix(NamedTuple):
    """A prefix that is asked for often.

    Attributes:
        last_hash: of its last block, the tenant's salt included.
        num_hits: lookups that ended with it, or parted behind it.
        workers: who holds its last block.
        age_s: seconds since the last of them.
    """

    last_hash: bytes
    num_blocks: int
    num_hits: int
    workers: tuple[str, ...]
    age_s: float


class Lookup(NamedTuple):
    """What is known of a prompt's blocks.

    Attributes:
        prefixes: longest chains by worker and lineage.
        chains: longest chains by lineage, whoever holds their blocks.
        stretches: contiguous from block 0 to the first block that nobody holds.
    """

    prefixes: tuple[Prefix, ...]
    chains: tuple[Chain, ...]
    stretches: tuple[Stretch, ...]

    def windows(self, num_blocks: int) -> tuple[Holding, ...]:
        """Holders of `swa@X`, X the end of the prompt's first `num_blocks` blocks."""
        return tuple(
            holding
            for stretch in self.stretches
            if stretch.start < num_blocks <= stretch.stop
            for holding in stretch.holdings
            if holding.kind is HeldKind.WINDOW
        )


class Lead(NamedTuple):
    """The caller computes blocks [first, stop); others wait for them.

    Attributes:
        claim_s: seconds within which its worker must confirm by a report, and so on.
    """

    first: int
    stop: int
    claim_s: float


class Follow(NamedTuple):
    """Somebody computes blocks [first, stop): ask its worker for them, then look up again.

    Attributes:
        request: the leader.
        worker, incarnation: who computes for it; None until it confirms.
    """

    request: str
    first: int
    stop: int
    worker: str | None
    incarnation: int | None


class Answer(NamedTuple):
    """Hints, and who computes the first missing block; None if none is missing or the directory
    cannot keep another claim."""

    lookup: Lookup
    flight: Lead | Follow | None


@dataclass(frozen=True, slots=True)
class PlanByLoad:
    """There are no hints; `reason` says why, for the plan's log line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an admission really found of a planned hit.

    Attributes:
        hashes, restarts: the planned chain, at least `num_planned` hashes of it.
        num_planned, num_real: blocks of it that were planned and that were there.
        missing_windows: planned windows that were not there, each by the number of blocks
            before it.
    """

    worker: str
    incarnation: int
    hashes: tuple[bytes, ...]
    restarts: Lineage
    num_planned: int
    num_real: int
    missing_windows: tuple[int, ...] = ()
