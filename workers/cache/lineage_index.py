"""Which cached blocks does a prompt find, as one chain of one lineage?

hash(block 0)   hash(block 1)   hash(block 2)         a prompt's hashes, in order
    ()              ()              ()                lineages held of each
                                    (256,)
──────────────────────────────────────▶               a chain never changes its past
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.replay import ReplayMode, follows

V = TypeVar("V")
Lineage = tuple[int, ...]


class LineageIndex(Generic[V]):
    """A mapping from block identity to `V` that finds chains.

    Args:
        window: W, tokens in a block.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._held: dict[bytes, dict[Lineage, tuple[BlockIdentity, V]]] = {}
        self._num_identities = 0

    def __len__(self) -> int:
        return self._num_identities

    def __iter__(self) -> Iterator[BlockIdentity]:
        for held in self._held.values():
            for identity, _ in held.values():
                yield identity

    def __contains__(self, identity: BlockIdentity) -> bool:
        return identity.restarts in self._held.get(identity.hash, ())

    def get(self, identity: BlockIdentity) -> V | None:
        found = self._held.get(identity.hash, {}).get(identity.restarts)
        return None if found is None else found[1]

    def add(self, identity: BlockIdentity, value: V) -> None:
        """Raises ValueError if the identity is taken: the first writer keeps it."""
        held = self._held.setdefault(identity.hash, {})
        if identity.restarts in held:
            raise ValueError(f"{identity} is held already")
        held[identity.restarts] = (identity, value)
        self._num_identities += 1

    def remove(self, identity: BlockIdentity) -> V:
        """Raises KeyError if the identity is not held."""
        held = self._held[identity.hash]
        _, value = held.pop(identity.restarts)
        if not held:
            del self._held[identity.hash]
        self._num_identities -= 1
        return value

    def match(
        self,
        hashes: Sequence[bytes],
        mode: ReplayMode = ReplayMode.BOUNDED,
        interval: int | None = None,
        max_blocks: int | None = None,
    ) -> tuple[BlockIdentity, ...]:
        """The longest chain from block 0 whose lineage `mode` accepts.

        Among equally long ones the one with the fewest restarts, then the earliest ones.

        Args:
            hashes: of the prompt's full blocks, in order.
            interval: A of mode canonical; None in the other modes.
            max_blocks: longer chains are no use, so that fewer restarts win within it.
        """
        found: list[dict[Lineage, tuple[BlockIdentity, V]]] = []
        alive: list[Lineage] = [()]
        for block_hash in islice(hashes, max_blocks):
            held = self._held.get(block_hash)
            if held is None:
                break
            # Nearly always one lineage goes on and no other one is held.
            if len(held) > 1 or len(alive) > 1 or interval is not None or alive[0] not in held:
                boundary = len(found) * self._window
                grown = [
                    restarts
                    for restarts in held
                    if any(follows(mode, before, restarts, boundary, interval) for before in alive)
                ]
                if not grown:
                    break
                alive = grown
            found.append(held)
        lineage = min(alive, key=lambda restarts: (len(restarts), restarts))
        # The last block's lineage tells those of all blocks before it.
        chain: list[BlockIdentity] = []
        for index, restart in enumerate((*lineage, len(found) * self._window)):
            part, restarts = found[len(chain) : restart // self._window], lineage[:index]
            chain += [held[restarts][0] for held in part]
        return tuple(chain)
