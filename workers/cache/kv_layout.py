"""How many bytes is each cached thing, and in which order? Derived from the geometry alone.

Both ends of a transfer compare `digest`: equal digests mean that every byte has the same meaning.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum

REWIND_TOKENS = 6
"""R: positions a speculative step may take back; rings hold W + R rows."""


class KVFormat(StrEnum):
    """How cached rows are stored.

    PACKED: the number grids of the model specification, section 6: E4M3 window rows, E2M1 entries
    and keys, each with its scales. FLOAT32: as computed, for debugging.
    """

    PACKED = "packed"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One Full layer's pool: entry t covers positions [ratio * t, ratio * (t + 1))."""

    layer: int
    ratio: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of a worker's KV memory, per block, ring and hand-over.

    Attributes:
        format: storage of cached rows.
        window: W, sliding window and block size in tokens.
        head_dim, index_head_dim: channels of window rows and main entries, and of index keys.
        streams, hidden_size: shape [n, d] of an encoder output row.
        split: E; layers below it are the encoder.
        pools: the Full layers, ascending.
        model_digest: digest of geometry and weights that the cached values depend on.
        round_inputs: whether they come from rounded linear inputs (`w8a8`).
    """

    format: KVFormat
    window: int
    head_dim: int
    index_head_dim: int
    streams: int
    hidden_size: int
    split: int
    pools: tuple[PoolSpec, ...]
    model_digest: str
    round_inputs: bool = False

    @property
    def ring_rows(self) -> int:
        return self.window + REWIND_TOKENS

    @property
    def window_row_bytes(self) -> int:
        """E4M3 codes and an E8M0 scale per 32: 528 for 512 channels."""
        return self._packed_or(4 * self.head_dim, self.head_dim + self.head_dim // 32)

    @property
    def main_entry_bytes(self) -> int:
        """E2M1 codes and an E4M3 scale per 16: 288 for 512 channels."""
        return self._packed_or(4 * self.head_dim, self.head_dim // 2 + self.head_dim // 16)

    @property
    def index_key_bytes(self) -> int:
        """E2M1 codes and an E8M0 scale per 32: 68 for 128 channels."""
        dim = self.index_head_dim
        return self._packed_or(4 * dim, dim // 2 + dim // 32)

    def _packed_or(self, float32: int, packed: int) -> int:
        return packed if self.format is KVFormat.PACKED else float32

    @property
    def entry_bytes(self) -> int:
        return self.main_entry_bytes + self.index_key_bytes

    @property
    def open_pair_bytes(self) -> int:
        """Bytes that travel for an odd length: value and gate of each ratio-2 pool, float32."""
        return sum(8 * self.head_dim for pool in self.pools if pool.ratio == 2)

    @property
    def output_row_bytes(self) -> int:
        """One encoder output row: every stream and the mix, in the compute dtype (float32)."""
        return 4 * self.streams * (self.hidden_size + 1)

    def entries_per_block(self, pool: PoolSpec) -> int:
        return self.window // pool.ratio

    def partial_block_bytes(self, num_tokens: int) -> int:
        """Bytes of the pool entries that exist after `num_tokens` of a block."""
        return sum(num_tokens // pool.ratio for pool in self.pools) * self.entry_bytes

    @property
    def block_bytes(self) -> int:
        return self.partial_block_bytes(self.window)

    def window_bytes(self, num_rows: int, num_layers: int) -> int:
        return num_rows * num_layers * self.window_row_bytes

    def source_window_start(self, output_start: int) -> int:
        """First of layer E's own rows that tail `layer_exact` needs below the tail."""
        return max(0, output_start - self.window + 1)

    def state_bytes(self, num_tokens: int, output_start: int, source_window: bool) -> int:
        """Bytes of a STATE section (see the transfer contract) of `num_tokens` positions."""
        total = self.partial_block_bytes(num_tokens % self.window)
        total += self.window_bytes(min(self.window, num_tokens), self.split)
        total += self.open_pair_bytes * (num_tokens % 2)
        if source_window:
            rows = output_start - self.source_window_start(output_start)
            total += self.window_bytes(rows, 1)
        return total + (num_tokens - output_start) * self.output_row_bytes

    def image_bytes(self, num_tokens: int, num_layers: int) -> int:
        """Bytes of a parked sequence of `num_tokens` positions, with the rings of these layers."""
        total = self.partial_block_bytes(num_tokens % self.window)
        return total + self.window_bytes(self.ring_rows, num_layers) + self.open_pair_bytes

    @property
    def digest(self) -> bytes:
        """16 bytes; equal on both ends iff the same bytes mean the same values."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
