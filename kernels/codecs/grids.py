"""What do cached tensors look like in memory? A record of bytes a row: codes, then scales.

    grid = window_grid(512)
    records = grid.encode(rows)           # [..., 512] float32 -> [..., 528] uint8
    rows = grid.decode(records)           # exactly grid.round_trip(rows)

Source: model specification, section 6. A row with a NaN or an infinity anywhere is stored as zeros,
so that it cannot spread through later attention; `encode` counts such rows where it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ripresa.kernels.codecs import e2m1, e4m3, e8m0

# The specification's constants, as float32 arithmetic sees them.
_ONE_448TH = torch.tensor(1 / 448, dtype=torch.float32).item()
_SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()
_WINDOW_FLOOR = 1e-4
_ENTRY_FLOOR = 6 * 2.0**-9
_INDEX_FLOOR = 6 * 2.0**-126

Codec = Callable[[torch.Tensor], torch.Tensor]


class Grid(Protocol):
    """A layout of rows of `dim` channels in records of `record_bytes`."""

    @property
    def dim(self) -> int: ...

    @property
    def record_bytes(self) -> int: ...

    def encode(self, x: torch.Tensor, num_blanked: torch.Tensor | None = None) -> torch.Tensor:
        """[..., dim] float32 to [..., record_bytes] uint8.

        `num_blanked`, an int64 scalar tensor, grows by the number of rows that were stored as
        zeros because they were not finite.
        """

    def decode(self, records: torch.Tensor) -> torch.Tensor:
        """[..., record_bytes] uint8 to [..., dim] float32."""

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        """`decode(encode(x))`, bit for bit, without the bytes."""


class Elements(NamedTuple):
    """How a scaled channel is stored. `round_to_grid` is decode after encode."""

    channels_per_byte: int
    encode: Codec
    decode: Codec
    round_to_grid: Codec


class Scales(NamedTuple):
    """How a group's largest magnitude becomes a scale that a byte holds exactly."""

    choose: Codec
    encode: Codec
    decode: Codec


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Groups of channels that share a scale; the codes of a row lie before its scales."""

    dim: int
    group: int
    elements: Elements
    scales: Scales

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % self.group:
            raise ValueError(
                f"rows of {self.dim} channels do not divide into groups of {self.group}"
            )

    @property
    def code_bytes(self) -> int:
        """Bytes before the scales."""
        return self.dim // self.elements.channels_per_byte

    @property
    def record_bytes(self) -> int:
        return self.code_bytes + self.dim // self.group

    def encode(self, x: torch.Tensor, num_blanked: torch.Tensor | None = None) -> torch.Tensor:
        groups, bound = self._groups(x)
        scale = self.scales.choose(bound)
        codes = self.elements.encode((groups / scale[..., None]).view(x.shape))
        records = torch.cat((codes, self.scales.encode(scale)), -1)
        broken = _broken_rows(bound)
        if num_blanked is not None:
            num_blanked += broken.sum()
        return records.masked_fill_(broken, 0)

    def decode(self, records: torch.Tensor) -> torch.Tensor:
        values = self.elements.decode(records[..., : self.code_bytes])
        scale = self.scales.decode(records[..., self.code_bytes :])
        values.view(*scale.shape, self.group).mul_(scale[..., None])
        return values

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        groups, bound = self._groups(x)
        return self._round(groups, bound).view(x.shape).masked_fill_(_broken_rows(bound), 0.0)

    def round_trip_unblanked(self, x: torch.Tensor) -> torch.Tensor:
        """`round_trip` that keeps what is not finite in sight: it spoils its group."""
        return self._round(*self._groups(x)).view(x.shape)

    def _groups(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., dim] to [..., dim / group, group] and each group's largest magnitude."""
        groups = x.reshape(*x.shape[:-1], self.dim // self.group, self.group)
        return groups, groups.abs().amax(-1)

    def _round(self, groups: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        scale = self.scales.choose(bound)[..., None]
        return self.elements.round_to_grid(groups / scale).mul_(scale)


@dataclass(frozen=True, slots=True)
class Float32Grid:
    """The debugging layout: float32 as it is, finite or not."""

    dim: int

    @property
    def record_bytes(self) -> int:
        return 4 * self.dim

    def encode(self, x: torch.Tensor, num_blanked: torch.Tensor | None = None) -> torch.Tensor:
        return x.contiguous().view(torch.uint8)

    def decode(self, records: torch.Tensor) -> torch.Tensor:
        return records.contiguous().view(torch.float32)

    def round_trip(self, x: torch.Tensor) -> torch.Tensor:
        return x


def window_grid(dim: int) -> BlockGrid:
    """Window rows: E4M3 in groups of 32 with an E8M0 scale; 528 bytes for 512 channels."""
    return BlockGrid(dim, 32, _E4M3, _WINDOW_SCALES)


def entry_grid(dim: int) -> BlockGrid:
    """Main compressed entries: E2M1 in groups of 16 with an E4M3 scale; 288 bytes for 512."""
    return BlockGrid(dim, 16, _E2M1, _ENTRY_SCALES)


def index_grid(dim: int) -> BlockGrid:
    """Indexer keys and queries: E2M1 in groups of 32 with an E8M0 scale; 68 bytes for 128."""
    return BlockGrid(dim, 32, _E2M1, _INDEX_SCALES)


def round_linear_input(x: torch.Tensor) -> torch.Tensor:
    """The input of a quantised linear in `w8a8`: [..., D] float32 to a new [..., D].

    It is rounded to the window grid (specification, section 2), and a NaN stays a NaN.
    Raises ValueError if D is no multiple of 32.
    """
    return window_grid(x.shape[-1]).round_trip_unblanked(x)


def _choose_window_scale(bound: torch.Tensor) -> torch.Tensor:
    return e8m0.round_up(bound.clamp(min=_WINDOW_FLOOR).mul_(_ONE_448TH))


def _choose_entry_scale(bound: torch.Tensor) -> torch.Tensor:
    return e4m3.round_to_grid(bound.clamp(min=_ENTRY_FLOOR).div_(6).clamp_(max=e4m3.MAX))


def _choose_index_scale(bound: torch.Tensor) -> torch.Tensor:
    return e8m0.round_up(bound.clamp(min=_INDEX_FLOOR).mul_(_SIXTH))


def _broken_rows(bound: torch.Tensor) -> torch.Tensor:
    """[..., 1]: the row has a group whose largest magnitude is not finite."""
    return bound.amax(-1, keepdim=True).isfinite().logical_not_()


_E4M3 = Elements(1, e4m3.encode, e4m3.decode, e4m3.round_to_grid)
_E2M1 = Elements(2, e2m1.encode_packed, e2m1.decode_packed, e2m1.round_to_grid)
_WINDOW_SCALES = Scales(_choose_window_scale, e8m0.encode, e8m0.decode)
_ENTRY_SCALES = Scales(_choose_entry_scale, e4m3.encode, e4m3.decode)
_INDEX_SCALES = Scales(_choose_index_scale, e8m0.encode, e8m0.decode)
