"""Which prefixes are asked for most? Counted where lookups end and where prompts part.

Bounded: the prefix that was not used for longest makes room. Plain Python without a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_TRACKED = 4096


@dataclass(slots=True)
class PrefixUse:
    """How a prefix was used.

    Attributes:
        tenant: whose it is, as a digest.
        num_blocks: how long it is.
        num_hits: lookups that found it.
        used_at: the last one, in seconds.
    """

    tenant: str
    num_blocks: int
    num_hits: int = 0
    used_at: float = 0.0


class HotPrefixes:
    """Prefixes by the hash of their last block."""

    def __init__(self, capacity: int = MAX_TRACKED) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[bytes, PrefixUse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def hit(self, last_hash: bytes, tenant: str, num_blocks: int, now: float) -> None:
        """A lookup found this prefix."""
        use = self._uses.get(last_hash)
        if use is None:
            use = self._uses[last_hash] = PrefixUse(tenant, num_blocks)
            if len(self._uses) > self._capacity:
                self._uses.popitem(last=False)
        use.num_hits += 1
        use.used_at = now
        self._uses.move_to_end(last_hash)

    def top(self, count: int, tenant: str | None = None) -> list[tuple[bytes, PrefixUse]]:
        """The most used prefixes, of one tenant or of all; the longer one first among equals."""
        uses = ((h, use) for h, use in self._uses.items() if tenant in (None, use.tenant))
        order = sorted(uses, key=lambda each: (-each[1].num_hits, -each[1].num_blocks, each[0]))
        return order[:count]
