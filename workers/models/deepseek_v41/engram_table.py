"""Which numbers does an n-gram table hold in some of its rows? Stored bytes, decoded.

A step's rows are gathered in one go, each once, wherever `EngramPlacement` has put them.
"""

from __future__ import annotations

import torch

from ripresa.kernels import dispatch as ops
from ripresa.workers.config import EngramPlacement
from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.checkpoint import PLAIN, Checkpoint, check_scale, check_scale_codes
from ripresa.workers.models.deepseek_v41.tensor_specs import TILE, Storage, scale_name, scale_shape
from ripresa.workers.models.shard import DTYPES


class EngramTable:
    """One Engram layer's table, stored plain or as E4M3 with a scale per row and 32 columns.

    Args:
        checkpoint: may be closed afterwards.
        name: the table's tensor, `layers.L.engram.embed.weight`.
        num_rows, dim: its shape by the config.
        placement: where the rows lie.

    Raises:
        CheckpointError: missing, of another shape or type, or without its scales.
        ConfigError: the machine cannot place it so.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        num_rows: int,
        dim: int,
        placement: EngramPlacement = EngramPlacement.HOST_SHARED,
    ) -> None:
        entry = checkpoint.entry(name)
        if entry.shape != (num_rows, dim):
            raise CheckpointError(
                f"is {list(entry.shape)} in {entry.file}, but the engram fields of config.json "
                f"give {list((num_rows, dim))}; another number of rows hashes to other rows",
                tensor=name,
            )
        quantised = entry.dtype == "F8_E4M3" and dim % TILE == 0
        if entry.dtype not in PLAIN and not quantised:
            raise CheckpointError(
                f"is stored as {entry.dtype} in {entry.file}; F32, F16, BF16 and F8_E4M3 with "
                "scales are read",
                tensor=name,
            )
        self.num_rows = num_rows
        self.dim = dim
        self._dtype = DTYPES[entry.dtype]
        self._rows = checkpoint.open_rows(name, placement)
        self._scale_entry = None
        if quantised:
            scale = checkpoint.entry(scale_name(name))
            check_scale(scale, scale_shape(entry.shape, Storage.F8_ROWS), name)
            self._scale_entry = scale
            self._scales = checkpoint.open_rows(scale.name, placement)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """[N] int64 row numbers on the CPU -> [N, dim] float32.

        Raises:
            IndexError: a number lies outside the table.
            CheckpointError: a row's scale is damaged.
            Unavailable: the table's file was changed while it is served.
        """
        numbers = index.numpy()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_rows:
            raise IndexError(f"row numbers outside a table of {self.num_rows} rows")
        stored = torch.from_numpy(self._rows.take(numbers)).view(self._dtype)
        if self._scale_entry is None:
            return stored.to(torch.float32)
        scales = torch.from_numpy(self._scales.take(numbers))
        check_scale_codes(scales, self._scale_entry)
        return ops.dequantise_f8_rows(stored, scales)
