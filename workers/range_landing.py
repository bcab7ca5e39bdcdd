"""In which order do ranges of blocks that come at once get into the cache? In the prompt's.

range 0   ▓▓▓▓▓░░░  at the front: each block is published when it comes
range 1   ▒▒▒░░░░░  staged: stored in pages of its own, found by nobody
range 2   ▒▒▒▒▒▒▒▒  published when it is at the front, given back if it never is
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import Producer
from ripresa.workers.errors import ResourceExhausted
from ripresa.workers.prefix_place import Landing, StagedBlocks
from ripresa.workers.replay import Recipe


class RangeLanding:
    """Where blocks [first, stop) of a prompt land. Implements `Landing`. Used on one event loop.

    Until it is at the front it takes no page that the ranges before it need.

    Args:
        landing: where they are published.
        earlier: the ranges before this one.

    Attributes:
        next: the first block that has not come.
        must_wait: a block was refused because the ranges before this one need the pages.
    """

    def __init__(
        self, landing: Landing, first: int, stop: int, earlier: Sequence[RangeLanding]
    ) -> None:
        self.next = first
        self.stop = stop
        self.must_wait = False
        self._landing = landing
        self._earlier = earlier
        self._staged: list[StagedBlocks] = []
        self._front = asyncio.Event()

    @property
    def num_missing(self) -> int:
        """Blocks that have not come."""
        return self.stop - self.next

    def come_to_front(self) -> None:
        """All before it is published: publish what has come, and what comes from now on."""
        self._front.set()
        while self._staged:
            self._staged.pop(0).publish()

    async def at_front(self) -> None:
        """Return once the range is at the front; from then on it need not wait."""
        await self._front.wait()
        self.must_wait = False

    def drop(self) -> None:
        """Give back what was not published. Idempotent."""
        staged, self._staged = self._staged, []
        for each in staged:
            each.drop()

    def land(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
    ) -> None:
        if self._front.is_set():
            self._landing.land(first, identities, producers, payload)
        else:
            self._staged.append(self.stage(first, identities, producers, payload))
        self.next = first + len(identities)

    def stage(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
        num_spared: int = 0,
    ) -> StagedBlocks:
        num_spared += sum(each.num_missing for each in self._earlier)
        try:
            return self._landing.stage(first, identities, producers, payload, num_spared)
        except ResourceExhausted:
            self.must_wait = True
            raise

    def land_image(self, num_tokens: int, recipe: Recipe, payload: torch.Tensor) -> None:
        self._landing.land_image(num_tokens, recipe, payload)

    def land_window(self, identity: BlockIdentity, payload: torch.Tensor) -> None:
        self._landing.land_window(identity, payload)
