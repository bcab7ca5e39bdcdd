"""Where do cached rows live? Block pools, window rings and open pairs of one rank, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ripresa.workers.cache.kv_layout import KVLayout


class KVCache:
    """All KV memory of a rank.

    Args:
        layout: sizes and formats.
        num_blocks: blocks in the pool.
        num_slots: sequences with rings at once.
        window_layers: layers that have rings on this rank.
        poison: fill with NaN instead of zeros, so that reading an unwritten row shows (tests).

    Attributes:
        main: per Full layer, entries [num_blocks * W / ratio, head_dim] float32.
        keys: per Full layer, index keys [num_blocks * W / ratio, index_head_dim] float32.
        rings: per layer, window rows [num_slots * (W + R), head_dim] float32; position p of slot s
            lies at s * (W + R) + p mod (W + R).
        open_pairs: per ratio-2 Full layer, value and gate [num_slots, 2, head_dim] float32 of the
            last position of an odd length.
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
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.device = device
        fill = float("nan") if poison else 0.0

        def memory(*shape: int) -> torch.Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        self.main: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.open_pairs: dict[int, torch.Tensor] = {}
        for pool in layout.pools:
            entries = num_blocks * layout.entries_per_block(pool)
            self.main[pool.layer] = memory(entries, layout.head_dim)
            self.keys[pool.layer] = memory(entries, layout.index_head_dim)
            if pool.ratio == 2:
                self.open_pairs[pool.layer] = memory(num_slots, 2, layout.head_dim)
        self.rings = {
            layer: memory(num_slots * layout.ring_rows, layout.head_dim) for layer in window_layers
        }
        self._poison = poison

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
            ring[slot * rows : (slot + 1) * rows] = float("nan")
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

    # -- hand-over -------------------------------------------------------------------------

    def export_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Whole blocks as uint8, pool by pool: main entries, then index keys."""
        parts = []
        for pool in self.layout.pools:
            index = self.entry_index(block_ids, pool.ratio)
            parts += [self.main[pool.layer][index], self.keys[pool.layer][index]]
        return _pack(parts)

    def import_blocks(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        reader = _Reader(payload)
        for pool in self.layout.pools:
            index = self.entry_index(block_ids, pool.ratio)
            for memory in (self.main[pool.layer], self.keys[pool.layer]):
                memory[index] = reader.take(len(index), memory.shape[1])
        reader.close()

    def export_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
    ) -> torch.Tensor:
        """A STATE section without its encoder output rows, as uint8."""
        return _pack(
            [
                memory[index].flatten()
                for memory, index in self._state_parts(
                    slot, block_table, num_tokens, output_start, source_window
                )
            ]
        )

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
        reader = _Reader(payload)
        for memory, index in self._state_parts(
            slot, block_table, num_tokens, output_start, source_window
        ):
            width = memory[0].numel()
            memory[index] = reader.take(len(index), width).view(len(index), *memory.shape[1:])
        return reader.rest()

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


class _Reader:
    """Takes float32 rows off the front of a uint8 payload."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._values = payload.view(torch.float32)
        self._offset = 0

    def take(self, rows: int, width: int) -> torch.Tensor:
        part = self._values[self._offset : self._offset + rows * width].view(rows, width)
        self._offset += rows * width
        return part

    def rest(self) -> torch.Tensor:
        return self._values[self._offset :]

    def close(self) -> None:
        if self._offset != self._values.numel():
            raise ValueError(f"{self._values.numel() - self._offset} values were not expected")


def _pack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts]).view(torch.uint8)
