"""How does a worker keep the prefix directory informed? Batches, signs of life, and resending.

A worker tells what it publishes and evicts; one task a directory shard carries it there. The
directory may be slow, gone or new: the worker never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ripresa.cluster.directory.events import Accepted, HeldKind, Refused, Reply, Report, Tier
from ripresa.cluster.directory.index import shard_of
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.cache_events import CopyAdvice, Origin, Room, Unkept
from ripresa.workers.errors import RipresaError, Unavailable, reason_of

logger = logging.getLogger(__name__)

Ask = Callable[[Sequence[Unkept]], Awaitable[Sequence[WorkerAddress | None]]]
"""Asks one shard who should keep blocks of its; see `FindKeepers`."""

Send = Callable[[Report], Awaitable[Reply]]
"""Carries a report to one shard. Raises RipresaError if it did not arrive, or may not have."""


class DirectoryPublisher:
    """One worker's connection to all shards. Its methods belong to the loop that runs it.

    Args:
        sends: one a shard, in order.
        asks: the same for questions; nobody is named without them.
        on_refused: an incarnation was refused; the lowest one that would not be. Nothing is sent
            until `restart`.
        interval_s: changes wait so long for others to join them.
        heartbeat_s: longest silence; well below the directory's `late_s` and `claim_s`.
        timeout_s: longest wait for a reply.
    """

    def __init__(
        self,
        worker: str,
        incarnation: int,
        sends: Sequence[Send],
        on_refused: Callable[[int], None],
        asks: Sequence[Ask] = (),
        interval_s: float = 0.05,
        heartbeat_s: float = 0.3,
        timeout_s: float = 1.0,
    ) -> None:
        self._shards = [_Shard(Outbox(worker, incarnation), send) for send in sends]
        self._on_refused = on_refused
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._take_advice: Callable[[CopyAdvice], None] = lambda advice: None
        self._asks = asks
        self._room: Callable[[], Room | None] = lambda: None

    def advise(self, take: Callable[[CopyAdvice], None]) -> None:
        """From now on tell `take` what others keep of what was told."""
        self._take_advice = take

    def describe(self, room: Callable[[], Room | None]) -> None:
        """From now on ask `room` for what goes with every report."""
        self._room = room

    async def find_keepers(self, blocks: Sequence[Unkept]) -> Sequence[WorkerAddress | None]:
        """See `FindKeepers`; each block's shard is asked."""
        found: dict[BlockIdentity, WorkerAddress | None] = {}
        for number, ask in enumerate(self._asks):
            part = [b for b in blocks if shard_of(b.origin.first, len(self._asks)) == number]
            if not part:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    keepers = await ask(part)
            except TimeoutError as error:
                raise Unavailable("the prefix directory did not say who keeps a block") from error
            found.update(zip((block.identity for block in part), keepers, strict=True))
        return [found.get(block.identity) for block in blocks]

    def held(
        self,
        identity: BlockIdentity,
        origin: Origin,
        kind: HeldKind = HeldKind.BLOCK,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """A block or window can be had here from now on; its first block chooses the shard."""
        shard = self._shards[shard_of(origin.first, len(self._shards))]
        shard.outbox.hold(Item(kind, identity, tier), origin)
        shard.changed.set()

    def dropped(
        self,
        identity: BlockIdentity,
        kind: HeldKind = HeldKind.BLOCK,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """A block or window cannot be had here any more."""
        item = Item(kind, identity, tier)
        for shard in self._shards:
            if item in shard.outbox:
                shard.outbox.drop(item)
                shard.changed.set()

    @property
    def has_changes(self) -> bool:
        """Something is to be told, or was told and is not acknowledged."""
        return any(shard.is_sending or shard.outbox.has_changes for shard in self._shards)

    def lead(self, claim: str, hashes: Sequence[bytes]) -> None:
        """This worker computes for a request that holds a claim: confirm it, and keep it up.

        Args:
            hashes: of the prompt's full blocks, from the first one; not empty.
        """
        shard = self._shards[shard_of(hashes[0], len(self._shards))]
        shard.outbox.lead(claim, hashes)
        shard.changed.set()

    def finish(self, claim: str) -> None:
        """This worker does not compute for the request any more, whatever the reason."""
        for shard in self._shards:
            shard.outbox.finish(claim)
            shard.changed.set()

    def restart(self, incarnation: int) -> None:
        """Go on as another incarnation, with everything held."""
        for shard in self._shards:
            shard.outbox.restart(incarnation)
            shard.is_refused = False
            shard.changed.set()

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(shard), name=f"directory-shard-{number}")
            for number, shard in enumerate(self._shards)
        ]

    async def stop(self) -> None:
        """Stop telling; the directory notices when the lease is over."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, shard: _Shard) -> None:
        clock = asyncio.get_running_loop().time
        sent_at = clock() - self._heartbeat_s
        while True:
            await self._until_due(shard, sent_at)
            sent_at = clock()
            report = shard.outbox.next_report(self._room())
            shard.is_sending = True
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await shard.send(report)
            except (RipresaError, TimeoutError) as error:
                logger.warning("the prefix directory was not told: %s", reason_of(error))
                await asyncio.sleep(self._heartbeat_s)
                continue
            if shard.outbox.next_report() is not report:
                continue  # Restarted meanwhile: the reply is to another incarnation.
            shard.outbox.take(reply)
            if isinstance(reply, Accepted) and reply.advice is not None:
                self._take_advice(reply.advice)
            shard.is_sending = False
            if isinstance(reply, Refused):
                logger.warning("the prefix directory takes this incarnation for dead")
                shard.is_refused = True
                self._on_refused(reply.lowest_incarnation)

    async def _until_due(self, shard: _Shard, sent_at: float) -> None:
        clock = asyncio.get_running_loop().time
        while shard.is_refused or not shard.outbox.is_urgent:
            shard.changed.clear()
            if shard.is_refused:
                await shard.changed.wait()
                continue
            wait = self._interval_s if shard.outbox.has_changes else self._heartbeat_s
            left = sent_at + wait - clock()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await shard.changed.wait()
            except TimeoutError:
                return


class _Shard:
    """What one task serves."""

    def __init__(self, outbox: Outbox, send: Send) -> None:
        self.outbox = outbox
        self.send = send
        self.changed = asyncio.Event()
        self.is_refused = False
        self.is_sending = False
