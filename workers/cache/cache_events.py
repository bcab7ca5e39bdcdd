"""Who hears of what a worker's cache holds, and in which words?

A worker tells a `CacheListener` that it was given at construction: what it holds, what it holds no
more, and for which requests it computes blocks that others wait for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple, Protocol

from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_hash import BlockIdentity


class HeldKind(StrEnum):
    """BLOCK: block KV. WINDOW: `swa@X`, named by the identity of the block that ends at X."""

    BLOCK = "block"
    WINDOW = "window"


class Tier(StrEnum):
    """Where a worker keeps what it holds."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Origin(NamedTuple):
    """Where a block stands among all prompts; a function of its hash.

    Attributes:
        tenant: `tenant_digest` of its tenant.
        first: hash of the prompt's first block.
        parent: hash of the block before it; None for a prompt's first block.
    """

    tenant: str
    first: bytes
    parent: bytes | None


def origin(tenant: str, hashes: Sequence[bytes], number: int) -> Origin:
    """Origin of block `number` of a prompt with these block hashes."""
    return Origin(tenant, hashes[0], hashes[number - 1] if number else None)


TENANT_BYTES = 16
"""So many leading bytes of a salt name its tenant; what follows narrows reuse within him."""


def tenant_digest(tenant_salt: bytes) -> str:
    """Names a tenant without telling its salt; the same for all that he narrows it to."""
    tenant = tenant_salt[:TENANT_BYTES]
    return blake2b(tenant, digest_size=8, person=b"ripresa.tenant").hexdigest()


class CacheListener(Protocol):
    """Hears of a worker's cache, on the worker's event loop; must not block or raise."""

    def held(self, identity: BlockIdentity, origin: Origin, kind: HeldKind, tier: Tier) -> None:
        """A block or window can be had, and is kept, here from now on.

        Told once more of a block that was a copy and is used.
        """

    def dropped(self, identity: BlockIdentity, kind: HeldKind, tier: Tier) -> None:
        """A block or window cannot be had here any more."""

    def lead(self, claim: str, hashes: Sequence[bytes]) -> None:
        """Missing blocks of a prompt are computed here for the holder of a claim.

        Args:
            hashes: of the prompt's full blocks, from the first one; not empty.
        """

    def finish(self, claim: str) -> None:
        """They are computed here no more, done or not. Idempotent."""


class CopyAdvice(NamedTuple):
    """Which of a worker's blocks others keep; a hint for what makes room first.

    Attributes:
        is_new: forget what was said before.
        copied: another worker keeps these.
        kept: this worker keeps these.
    """

    is_new: bool = False
    copied: tuple[BlockIdentity, ...] = ()
    kept: tuple[BlockIdentity, ...] = ()


class Room(NamedTuple):
    """How much a worker would lose by keeping another block.

    Attributes:
        kind: of the worker.
        age_s: for how long its next block to go has not been used; infinity while it has free
            pages or copies.
    """

    kind: WorkerKind
    age_s: float


class Unkept(NamedTuple):
    """A block that its worker is about to evict.

    Attributes:
        age_s: seconds since its last use.
    """

    identity: BlockIdentity
    origin: Origin
    age_s: float


FindKeepers = Callable[[Sequence[Unkept]], Awaitable[Sequence[WorkerAddress | None]]]
"""Asks who should keep each of these blocks instead of the worker that asks. None: nobody, because
nobody's blocks are older, or another worker holds it anyway. Raises RipresaError if it cannot be
known."""


class CacheAnnouncer(CacheListener, Protocol):
    """A listener that carries what it hears out of the process."""

    def advise(self, take: Callable[[CopyAdvice], None]) -> None:
        """From now on tell `take`, on the event loop, what others keep of what was told."""

    def describe(self, room: Callable[[], Room | None]) -> None:
        """From now on ask `room`, on the event loop, for what goes with every report.

        None: this worker takes nothing that others have to evict.
        """

    async def find_keepers(self, blocks: Sequence[Unkept]) -> Sequence[WorkerAddress | None]:
        """See `FindKeepers`."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


AnnouncerFactory = Callable[[str], Awaitable[CacheAnnouncer]]
"""Makes a worker's announcer from its id, in the worker's process."""


class Unheard:
    """The listener of a worker that nobody asks."""

    def held(self, identity: BlockIdentity, origin: Origin, kind: HeldKind, tier: Tier) -> None:
        return None

    def dropped(self, identity: BlockIdentity, kind: HeldKind, tier: Tier) -> None:
        return None

    def lead(self, claim: str, hashes: Sequence[bytes]) -> None:
        return None

    def finish(self, claim: str) -> None:
        return None

    def advise(self, take: Callable[[CopyAdvice], None]) -> None:
        return None

    def describe(self, room: Callable[[], Room | None]) -> None:
        return None

    async def find_keepers(self, blocks: Sequence[Unkept]) -> Sequence[WorkerAddress | None]:
        return [None] * len(blocks)

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None


async def unheard(worker_id: str) -> CacheAnnouncer:
    """The announcer factory of a cluster without a directory."""
    return Unheard()
