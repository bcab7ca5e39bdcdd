"""Where do cached rows live? Block pools, window rings and open pairs of one rank, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_layout import KVFormat, KVLayout
from ripresa.workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVGrids:
    """How each kind of cached row is turned into a record of bytes and back."""

    window: ops.Grid
    entry: ops.Grid
    key: ops.Grid


def kv_grids(layout: KVLayout) -> KVGrids:
    """The grids of a layout; their record sizes are the layout's.

    Raises:
        ConfigError: the head sizes do not divide into the groups that share a scale.
    """
    head, index = layout.head_dim, layout.index_head_dim
    if layout.format is KVFormat.FLOAT32:
        grids = KVGrids(ops.Float32Grid(head), ops.Float32Grid(head), ops.Float32Grid(index))
    else:
        try:
            grids = KVGrids(ops.window_grid(head), ops.entry_grid(head), ops.index_grid(index))
        except ValueError as error:
            raise ConfigError(
                "kv_format", f"packed KV does not fit this model ({error}); use float32"
            ) from error
    records = (layout.window_row_bytes, layout.main_entry_bytes, layout.index_key_bytes)
    assert records == tuple(g.record_bytes for g in (grids.window, grids.entry, grids.key))
    return grids


class KVCache:
    """All KV memory of a rank: records of bytes, decoded when read.

    Args:
        layout: sizes and formats.
        num_blocks: blocks in the pool.
        num_slots: sequences with rings at once.
        window_layers: layers that have rings on this rank.
        poison: fill with NaN codes instead of zeros, so that reading an unwritten row shows.

    Attributes:
        main: per Full layer, entries, uint8 [num_blocks * W / ratio, main_entry_bytes].
        keys: per Full layer, index keys, uint8 [num_blocks * W / ratio, index_key_bytes].
        rings: per layer, window rows, uint8 [num_slots * (W + R), window_row_bytes]; position p of
            slot s lies at s * (W + R) + p mod (W + R).
        open_pairs: per ratio-2 Full layer, value and gate [num_slots, 2, head_dim] float32 of the
            last position of an odd length.
        cut_rows: per encoder layer, rows of the windows that the running step is to cut, in
            order; taken by whoever planned them.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        num_slots: int,
        window_layers: Sequence[int],
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.layout = layout
        self.grids = kv_grids(layout)
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.device = device
        self._poison = poison
        # Bytes of 255 are NaN in every format: float32, E4M3, and E8M0 and E4M3 scales.
        self._fill = 255 if poison else 0

        def memory(rows: int, record_bytes: int) -> torch.Tensor:
            return torch.full((rows, record_bytes), self._fill, dtype=torch.uint8, device=device)

        self.main: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.open_pairs: dict[int, torch.Tensor] = {}
        self.cut_rows: dict[int, torch.Tensor] = {}
        for pool in layout.pools:
            entries = num_blocks * layout.entries_per_block(pool)
            self.main[pool.layer] = memory(entries, layout.main_entry_bytes)
            self.keys[pool.layer] = memory(entries, layout.index_key_bytes)
            if pool.ratio == 2:
                pairs = memory(num_slots, 8 * layout.head_dim)
                self.open_pairs[pool.layer] = pairs.view(torch.float32).view(num_slots, 2, -1)
        rows = num_slots * layout.ring_rows
        self.rings = {layer: memory(rows, layout.window_row_bytes) for layer in window_layers}

    @property
    def num_bytes(self) -> int:
        tensors = (self.main, self.keys, self.rings, self.open_pairs)
        return sum(t.nbytes for group in tensors for t in group.values())

    def release_slot(self, slot: int) -> None:
        """Make a slot's rows unreadable for its next owner, where that is being checked."""
        if not self._poison:
            return
        rows = self.layout.ring_rows
        for ring in self.rings.values():
            ring[slot * rows : (slot + 1) * rows] = self._fill
        for pair in self.open_pairs.values():
            pair[slot] = float("nan")

    def ring_index(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Ring rows of positions [start, stop) of a slot, int64."""
        rows = self.layout.ring_rows
        return slot * rows + torch.arange(start, stop, device=self.device) % rows

    def entry_index(self, block_ids: Sequence[int], ratio: int) -> torch.Tensor:
        """Pool rows of the entries of some blocks, in order, int64 [len * W / ratio]."""
        per_block = self.layout.window // ratio
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        return (blocks[:, None] * per_block + torch.arange(per_block, device=self.device)).flatten()

    def window_rows(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Window rows [N, head_dim] float32 at ring rows `index`."""
        return self.grids.window.decode(self.rings[layer].index_select(0, index))

    def entries(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Main entries [N, head_dim] float32 at pool rows `index`."""
        return self.grids.entry.decode(self.main[layer].index_select(0, index))

    def index_keys(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Index keys [N, index_head_dim] float32 at pool rows `index`."""
        return self.grids.key.decode(self.keys[layer].index_select(0, index))

    def float_entries(self, layer: int) -> torch.Tensor | None:
        """The whole pool as float32 without a copy, if that is how it is stored."""
        if self.layout.format is KVFormat.FLOAT32:
            return self.main[layer].view(torch.float32)
        return None

    def write_entries(
        self, layer: int, index: torch.Tensor, entries: torch.Tensor, keys: torch.Tensor
    ) -> None:
        """Store float32 entries and their index keys at pool rows `index`."""
        self.main[layer].index_copy_(0, index, self.grids.entry.encode(entries))
        self.keys[layer].index_copy_(0, index, self.grids.key.encode(keys))

    def import_window(self, slot: int, boundary: int, payload: torch.Tensor) -> None:
        """Store the rows [X-W, X) of every encoder layer, in order of layers."""
        layout = self.layout
        index = self.ring_index(slot, boundary - layout.window, boundary)
        rows = payload.view(layout.split, layout.window, layout.window_row_bytes)
        for layer in range(layout.split):
            self.rings[layer][index] = rows[layer].to(self.device)

    # -- hand-over -------------------------------------------------------------------------

    def export_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Whole blocks as uint8, pool by pool: main entries, then index keys."""
        parts = []
        for pool in self.layout.pools:
            index = self.entry_index(block_ids, pool.ratio)
            parts += [self.main[pool.layer][index], self.keys[pool.layer][index]]
        return torch.cat([part.flatten() for part in parts])

    def import_blocks(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        """Store what `export_blocks` made; the payload's size has been checked."""
        offset = 0
        for pool in self.layout.pools:
            index = self.entry_index(block_ids, pool.ratio)
            for memory in (self.main[pool.layer], self.keys[pool.layer]):
                stop = offset + len(index) * memory.shape[1]
                memory[index] = payload[offset:stop].view(-1, memory.shape[1])
                offset = stop

    def export_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
    ) -> list[torch.Tensor]:
        """A STATE section without its encoder output rows: flat uint8 parts, in order."""
        parts = self._state_parts(slot, block_table, num_tokens, output_start, source_window)
        return [memory[index].view(torch.uint8).flatten() for memory, index in parts]

    def import_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
        payload: torch.Tensor,
    ) -> torch.Tensor:
        """Store a STATE section; returns the rest of the payload (encoder output rows)."""
        offset = 0
        for memory, index in self._state_parts(
            slot, block_table, num_tokens, output_start, source_window
        ):
            size = len(index) * memory[0].nbytes
            # A copy, since other formats' parts leave float32 ones at any byte.
            part = payload[offset : offset + size].clone().view(memory.dtype)
            memory[index] = part.view(len(index), *memory.shape[1:])
            offset += size
        return payload[offset:]

    def _state_parts(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layout = self.layout
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        partial = num_tokens % layout.window
        if partial:
            last = [block_table[num_tokens // layout.window]]
            for pool in layout.pools:
                index = self.entry_index(last, pool.ratio)[: partial // pool.ratio]
                parts += [(self.main[pool.layer], index), (self.keys[pool.layer], index)]
        rows = self.ring_index(slot, max(0, num_tokens - layout.window), num_tokens)
        parts += [(self.rings[layer], rows) for layer in range(layout.split)]
        if num_tokens % 2:
            here = torch.tensor([slot], device=self.device)
            parts += [(pair, here) for pair in self.open_pairs.values()]
        if source_window:
            start = layout.source_window_start(output_start)
            parts.append((self.rings[layout.split], self.ring_index(slot, start, output_start)))
        return parts
