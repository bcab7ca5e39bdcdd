"""What must be known to plan a prefill: the model's geometry, the prompt, what is cached of it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.errors import ConfigError, InvalidArgument
from ripresa.workers.replay import ReplayMode, TailVariant


@dataclass(frozen=True, slots=True)
class ReplayGeometry:
    """What the rules need to know of a model.

    Attributes:
        window: W, sliding window and block size in tokens, even.
        rewind: R, positions that a speculative step may take back.
        num_encoder_layers, num_decoder_layers: E and D.
    """

    window: int
    rewind: int
    num_encoder_layers: int
    num_decoder_layers: int

    def __post_init__(self) -> None:
        if self.window < 2 or self.window % 2:
            raise ConfigError("window", f"must be even and at least 2, got {self.window}")
        if self.rewind < 0:
            raise ConfigError("rewind", f"must not be negative, got {self.rewind}")
        for name in ("num_encoder_layers", "num_decoder_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ParkedImage:
    """A session's whole request state after a turn, for the tokens of the new prompt.

    Attributes:
        num_tokens: n, processed positions; the last sampled token is not among them.
        swa_floor, decoder_start, source_floor, restarts, tail: of the parked request's recipe.
    """

    num_tokens: int
    swa_floor: int
    decoder_start: int
    source_floor: int | None = None
    restarts: tuple[int, ...] = ()
    tail: TailVariant = TailVariant.FLOORED

    @property
    def is_exact(self) -> bool:
        """Its whole chain was exact with tail exact (which only mode exact accepts)."""
        return not self.restarts and self.tail is TailVariant.EXACT

    def is_covered_by(self, chain: Sequence[BlockIdentity], window: int) -> bool:
        """Whether `chain` holds every full block below n, in the image's lineage."""
        num_blocks = self.num_tokens // window
        if len(chain) < num_blocks:
            return False
        return num_blocks == 0 or chain[num_blocks - 1].restarts == tuple(
            restart for restart in self.restarts if restart < num_blocks * window
        )


@dataclass(frozen=True, slots=True)
class PrefillQuery:
    """A prompt, how it is to be served, and what a worker holds of it.

    Attributes:
        num_tokens: L, at least 1.
        chain: cached blocks, contiguous from block 0.
        windows: native windows held; `swa@X` is named by the block that ends at X.
        image: the session's parked state. Offer it only while the blocks below it are held
            (`ParkedImage.is_covered_by`).
        anchor_interval: A of mode canonical, a multiple of W; None in the other modes.
    """

    geometry: ReplayGeometry
    num_tokens: int
    chain: Sequence[BlockIdentity] = ()
    windows: Container[BlockIdentity] = field(default_factory=frozenset)
    image: ParkedImage | None = None
    mode: ReplayMode = ReplayMode.BOUNDED
    tail: TailVariant = TailVariant.FLOORED
    seed: int = 0
    anchor_interval: int | None = None

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvalidArgument("token_ids", "the prompt is empty; send at least one token")
        if self.tail is TailVariant.EXACT and self.mode is not ReplayMode.EXACT:
            raise InvalidArgument(
                "tail", f"tail 'exact' needs mode 'exact', and the mode is {self.mode.value!r}"
            )
        if (self.anchor_interval is None) is (self.mode is ReplayMode.CANONICAL):
            raise InvalidArgument(
                "anchor_interval", "give it for mode 'canonical' and for no other mode"
            )
        window, interval = self.geometry.window, self.anchor_interval
        if interval is not None and (interval < window or interval % window):
            raise InvalidArgument(
                "anchor_interval", f"must be a multiple of the window {window}, got {interval}"
            )

    def holds_window(self, boundary: int) -> bool:
        """Whether the native `swa@boundary` of the chain is held; boundary is in (0, chain]."""
        return self.chain[boundary // self.geometry.window - 1] in self.windows
