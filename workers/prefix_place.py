"""What is a place that cached blocks are brought from? The contract of the disk tier and of peers.

    PrefixSupply ── chain(wanted)? ──▶ place      which blocks would it complete?
                 ── bring(run) ──────▶ place ── land(blocks, payload) ──▶ local cache, pinned

The supply asks the places of a worker in order (disk, then peers) before a request is admitted, and
brings from each what the local cache still lacks of the chain that the place names.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ripresa.workers.address import WorkerAddress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_record import Producer
from ripresa.workers.prefix_sources import PrefixSources
from ripresa.workers.replay import Recipe, ReplayMode


@dataclass(slots=True)
class WantedPrefix:
    """A prompt whose leading blocks a worker wants to hold.

    Attributes:
        request_id: whose prompt it is.
        window: W, tokens in a block.
        hashes: of the blocks that the request can reuse, from block 0 on.
        mode: which lineages it accepts.
        interval: A of mode canonical; None in the other modes.
        recipe: whose lineage alone counts; None before it is fixed.
        sources: what is known of peers.
        blocks, windows: what the local cache holds now.
        lost: holders that failed this request; they are not asked again.
    """

    request_id: str
    window: int
    hashes: Sequence[bytes]
    mode: ReplayMode
    recipe: Recipe | None
    sources: PrefixSources
    blocks: Container[BlockIdentity]
    windows: Container[BlockIdentity]
    interval: int | None = None
    lost: set[WorkerAddress] = field(default_factory=set)

    def identity(self, number: int, restarts: Sequence[int]) -> BlockIdentity:
        """Block `number` of a chain of this lineage."""
        stop = (number + 1) * self.window
        return BlockIdentity(self.hashes[number], tuple(r for r in restarts if r < stop))


class StagedBlocks(Protocol):
    """Blocks that are stored and that nobody finds yet. Either of the two ends them."""

    def publish(self) -> None:
        """Publish them; they stay until the request is admitted."""

    def drop(self) -> None:
        """Give their pages back."""


class Landing(Protocol):
    """Where a place puts what it brings for one request. Used on the engine's event loop."""

    def land(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
    ) -> None:
        """Store and publish whole blocks; they stay until the request is admitted.

        The first writer of an identity stays. The payload is copied.

        Args:
            first: number of the first block in the prompt.
            payload: uint8, as `ModelRunner.export_blocks` makes it of these blocks; its checksum
                and layout digest must have been compared.

        Raises:
            ResourceExhausted: no pages are left; nothing was stored. Bring nothing more.
        """

    def stage(
        self,
        first: int,
        identities: Sequence[BlockIdentity],
        producers: Sequence[Producer],
        payload: torch.Tensor,
        num_spared: int = 0,
    ) -> StagedBlocks:
        """Store whole blocks, as `land` does, that are published later.

        Args:
            num_spared: pages that must be left.

        Raises:
            ResourceExhausted: no more pages than those are left; nothing was stored.
        """

    def land_image(self, num_tokens: int, recipe: Recipe, payload: torch.Tensor) -> None:
        """Keep the parked state (uint8) of the request's session; the payload is copied.

        Args:
            num_tokens: of the prompt, processed.
            recipe: what the session followed.
        """

    def land_window(self, identity: BlockIdentity, payload: torch.Tensor) -> None:
        """Store a native window (uint8, as `WindowPool` holds it); the payload is copied."""


class PrefixPlace(Protocol):
    """One place that blocks are brought from: a disk tier, or the peers that a request names."""

    @property
    def name(self) -> str:
        """For counters: disk, peers."""

    async def chain(self, wanted: WantedPrefix) -> tuple[BlockIdentity, ...]:
        """The longest chain of one lineage, from block 0, that local cache and place complete.

        Called on the event loop, and bounded in time by the place itself. Shorter than what is held
        locally, or (), if the place can add nothing.
        """

    async def bring(
        self,
        wanted: WantedPrefix,
        chain: Sequence[BlockIdentity],
        first: int,
        stop: int,
        landing: Landing,
    ) -> None:
        """Land blocks [first, stop) of `chain`, none of which is held, in order.

        Ends early, without an error, where a block cannot be brought: it is then computed. Several
        land at once for speed, but none after a gap. May be cancelled at any await; what has
        landed by then stays.
        """
