"""How do tests speak to the directory? Short hashes, a worker that follows the protocol."""

from __future__ import annotations

from collections.abc import Iterable

from ripresa.cluster.directory.events import (
    Accepted,
    Epoch,
    HeldKind,
    Lineage,
    Prefix,
    Reply,
    Report,
    Run,
    SendAll,
    Tier,
)
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.workers.cache.cache_events import Room

W = 8
SETTINGS = DirectorySettings(window=W, capacity_blocks=10_000)


def chain(name: str, num_blocks: int, shared: int = 0) -> tuple[bytes, ...]:
    """Hashes of a prompt; prompts have the first `shared` blocks in common."""
    return tuple(f"{name if i >= shared else '*'}{i}".encode() for i in range(num_blocks))


def lineage_at(restarts: Lineage, block: int) -> Lineage:
    """Lineage of one block of a chain whose last block has `restarts`."""
    return tuple(x for x in restarts if x < (block + 1) * W)


def runs(
    hashes: Iterable[bytes],
    restarts: Lineage = (),
    *,
    is_held: bool = True,
    kind: HeldKind = HeldKind.BLOCK,
    tier: Tier = Tier.DEVICE,
    tenant: str = "t",
) -> tuple[Run, ...]:
    """One run a block, of a chain from block 0."""
    found: list[Run] = []
    parent: bytes | None = None
    for block, block_hash in enumerate(hashes):
        at = lineage_at(restarts, block)
        found.append(Run(is_held, kind, tier, tenant, at, parent, (block_hash,)))
        parent = block_hash
    return tuple(found)


class Worker:
    """One incarnation that reports without loss, from its first report on."""

    def __init__(self, index: PrefixIndex, name: str, incarnation: int = 1, now: float = 0) -> None:
        self.index = index
        self.name = name
        self.incarnation = incarnation
        self.epoch: Epoch | None = None
        self.number = 0
        self.join(now)

    def join(self, now: float = 0, held: tuple[Run, ...] = ()) -> None:
        """Get a demand and answer it."""
        demand = self.send(now=now)
        assert isinstance(demand, SendAll)
        self.epoch, self.number = demand.epoch, 0
        assert isinstance(self.send(*held, now=now), Accepted)

    def send(
        self,
        *changes: Run,
        now: float = 0,
        is_complete: bool = True,
        leading: tuple[str, ...] = (),
        ended: tuple[str, ...] = (),
        room: Room | None = None,
    ) -> Reply:
        report = Report(
            self.name,
            self.incarnation,
            self.epoch,
            self.number,
            changes,
            is_complete,
            leading,
            ended,
            room,
        )
        reply = self.index.report(report, now)
        if isinstance(reply, Accepted):
            self.number += 1
        return reply

    def hold(self, hashes: Iterable[bytes], restarts: Lineage = (), now: float = 0) -> None:
        assert isinstance(self.send(*runs(hashes, restarts), now=now), Accepted)

    def drop(self, hashes: Iterable[bytes], restarts: Lineage = (), now: float = 0) -> None:
        changes = runs(hashes, restarts, is_held=False)
        assert isinstance(self.send(*changes, now=now), Accepted)


def summary(prefixes: Iterable[Prefix]) -> set[tuple[str, Lineage, int]]:
    return {(p.holder.worker, p.restarts, p.num_blocks) for p in prefixes}
