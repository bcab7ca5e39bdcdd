"""Which state of a sequence is not what an uncut forward would have? Bounded replay, in training.

A cut at c hides the window rows below c from the rows at and above it: what a worker that begins
to compute at c sees. Where the encoder half is cut, the pool entries of the tokens before the
boundary b >= c are a cache's, those from b on come from the cut rows.

    0 ................ c ............ b ............................ T
    |  rows as usual   | windows begin at c                           |
    |  entries of an uncut forward    |  entries of the cut rows      |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Cuts:
    """One cut of each half in each sequence of a batch; all int64 [B], 0 where there is none.

    Attributes:
        encoder: c of the layers below E.
        boundary: b, the write floor: entries and index keys of tokens below it are those of an
            uncut forward and pass no gradient. Even, so that no pair of tokens lies across it, and
            not below `encoder`.
        decoder: c of layers E and above. Their entries are layer E's and not affected.
    """

    encoder: Tensor
    boundary: Tensor
    decoder: Tensor

    def check(self, batch: int, length: int) -> None:
        """Raise ValueError unless these are cuts of such a batch."""
        for name in ("encoder", "boundary", "decoder"):
            places = getattr(self, name)
            if places.shape != (batch,):
                raise ValueError(f"{name} has shape {list(places.shape)}, not [{batch}]")
            if not bool(((places >= 0) & (places <= length)).all()):
                raise ValueError(f"{name} {places.tolist()} is not within {length} tokens")
        if bool((self.boundary % 2).any()):
            raise ValueError(f"boundaries {self.boundary.tolist()} lie within pairs of tokens")
        if bool((self.boundary < self.encoder).any()):
            raise ValueError(
                f"boundaries {self.boundary.tolist()} lie before cuts {self.encoder.tolist()}"
            )

    def floors(self, in_encoder: bool) -> Tensor:
        """Where the windows of one half begin."""
        return self.encoder if in_encoder else self.decoder

    @property
    def cached(self) -> Tensor:
        """[K] int64: the sequences with a boundary."""
        return self.boundary.nonzero()[:, 0]

    def with_cached(self, own: Tensor, exact: Tensor, ratio: int) -> Tensor:
        """A pool whose entries below the boundaries are replaced.

        Args:
            own: [B, N, D], of this forward.
            exact: [K, n, D], of the sequences of `cached`; n entries reach the last boundary.
        """
        number = torch.arange(exact.shape[1]) * ratio
        is_cached = number < self.boundary[self.cached][:, None]
        mine = own.index_select(0, self.cached)
        head = torch.where(is_cached[:, :, None], exact, mine[:, : exact.shape[1]])
        mixed = torch.cat((head, mine[:, exact.shape[1] :]), 1)
        return own.index_copy(0, self.cached, mixed)
