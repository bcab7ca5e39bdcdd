"""Which settings does a worker's engine have, and which combinations are refused?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.errors import ConfigError
from ripresa.workers.replay import TailVariant

DEFAULT_ANCHOR_INTERVAL = 4096
"""A: tokens between two restarts of mode canonical."""

DEFAULT_RESERVED_TOKENS = 256
"""Tokens of an answer whose pages are set aside at admission."""


class Numerics(StrEnum):
    """DETERMINISTIC: rows equal bitwise whatever their batch mates. FAST: equal to rounding."""

    DETERMINISTIC = "deterministic"
    FAST = "fast"


class EngramPlacement(StrEnum):
    """Where a model's n-gram tables lie while a worker serves; the numbers are the same.

    HOST_SHARED: in the machine's page cache, read in at start; all its workers share one copy.
    HOST_NUMA: copied into each worker's memory, on the NUMA node that it runs on. NVME: in their
    files, of which each step reads its rows; nothing stays resident.
    """

    HOST_SHARED = "host_shared"
    HOST_NUMA = "host_numa"
    NVME = "nvme"

    @property
    def is_resident(self) -> bool:
        """Whether the whole tables take memory."""
        return self is not EngramPlacement.NVME


class WindowPolicy(StrEnum):
    """Which encoder windows are kept, beside the last three of a finished turn.

    ZERO: none at all. JUNCTION: where a replay was for want of one. PERIODIC: every `period`
    tokens. FULL: every block boundary.
    """

    ZERO = "zero"
    JUNCTION = "junction"
    PERIODIC = "periodic"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Which windows a worker keeps for later requests, in host memory.

    Attributes:
        policy: which ones.
        period: tokens between two of policy `periodic`; a multiple of the window.
        capacity_bytes: most bytes of all windows.
    """

    policy: WindowPolicy = WindowPolicy.JUNCTION
    period: int = 4096
    capacity_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError("windows.period", f"{self.period} is below 1")
        if self.capacity_bytes < 0:
            raise ConfigError("windows.capacity_bytes", f"{self.capacity_bytes} is below 0")


@dataclass(frozen=True, slots=True)
class ParkConfig:
    """How long a session's state waits for its next turn, in host memory.

    Attributes:
        capacity_bytes: most bytes of all states; 0 parks nothing.
        time_to_live_s: seconds after which a state is worthless.
    """

    capacity_bytes: int = 256 << 20
    time_to_live_s: float = 300.0

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise ConfigError("parked.capacity_bytes", f"{self.capacity_bytes} is below 0")
        if self.time_to_live_s <= 0:
            raise ConfigError("parked.time_to_live_s", f"{self.time_to_live_s} is not above 0")


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """What is kept of a session while its tools run.

    Attributes:
        max_share: most of a worker's KV blocks that leases keep from being evicted, 0 to 1.
        max_time_s: longest lease in seconds, whatever a client or a slow tool asks for.
        prefetch_lead_s: so long before a session is expected to go on, its blocks that had to make
            room are read back from disk, in seconds.
        prefetch_max_bytes: most bytes of one session that are; 0 for none.
    """

    max_share: float = 0.5
    max_time_s: float = 900.0
    prefetch_lead_s: float = 2.0
    prefetch_max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError("leases.max_share", f"{self.max_share} is not between 0 and 1")
        if not 0 < self.max_time_s < float("inf"):
            raise ConfigError("leases.max_time_s", f"{self.max_time_s} is no number of seconds")
        if not 0 <= self.prefetch_lead_s < float("inf"):
            raise ConfigError(
                "leases.prefetch_lead_s", f"{self.prefetch_lead_s} is no number of seconds"
            )
        if self.prefetch_max_bytes < 0:
            raise ConfigError("leases.prefetch_max_bytes", f"{self.prefetch_max_bytes} is below 0")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where block KV outlives the workers, for all of a machine.

    Attributes:
        path: an absolute path of a directory that is the workers' alone; null keeps nothing. It is
            made if it is missing.
        capacity_bytes: most bytes of the whole directory.
        max_age_h: hours after its last use at which a block is removed.
    """

    path: str | None = None
    capacity_bytes: int = 10 << 30
    max_age_h: float = 72.0

    def __post_init__(self) -> None:
        if self.path is not None and (not Path(self.path).is_absolute() or "\0" in self.path):
            raise ConfigError("disk.path", f"must be an absolute path, is {self.path!r}")
        if self.path is not None and Path(self.path) == Path(self.path).parent:
            raise ConfigError("disk.path", "must be a directory of its own, not the root")
        if self.capacity_bytes < 1:
            raise ConfigError("disk.capacity_bytes", f"{self.capacity_bytes} is below 1")
        if not 0 < self.max_age_h < float("inf"):
            raise ConfigError("disk.max_age_h", f"{self.max_age_h} is no number of hours")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How an engine takes part in a hand-over.

    Attributes:
        max_section_blocks: most KV blocks that an encoder worker sends in one section.
        hand_over_window_blocks: a window is handed over every so many blocks, for another encoder
            worker to go on from.
        max_tail_bytes: encoder output that a worker holds for requests that are handed over.
        hand_over_timeout_s: how long a decode worker keeps the pages of a request for which no
            transfer is under way, in seconds.
        pull_timeout_s: longest time in which nothing comes of what is pulled from a peer's cache,
            in seconds; then it is pulled from another one, or computed.
        follow_timeout_s: the same for blocks that a peer is computing.
        max_pulls_at_once: ranges of one prompt that are pulled from peers at once.
        max_pulls_served: pulls that a worker answers at once; more are refused.
    """

    max_section_blocks: int = 16
    hand_over_window_blocks: int = 32
    max_tail_bytes: int = 256 << 20
    hand_over_timeout_s: float = 60.0
    pull_timeout_s: float = 2.0
    follow_timeout_s: float = 10.0
    max_pulls_at_once: int = 4
    max_pulls_served: int = 64

    def __post_init__(self) -> None:
        if self.max_section_blocks < 1:
            raise ConfigError(
                "engine.transfer.max_section_blocks", f"{self.max_section_blocks} is below 1"
            )
        for name in (
            "hand_over_window_blocks",
            "max_tail_bytes",
            "hand_over_timeout_s",
            "pull_timeout_s",
            "follow_timeout_s",
            "max_pulls_at_once",
            "max_pulls_served",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"engine.transfer.{name}", f"{getattr(self, name)} is not above 0"
                )


@dataclass(frozen=True, slots=True)
class MoveConfig:
    """How last copies of blocks go to other workers before they are evicted.

    Attributes:
        ahead: share of the pool that prompts may ask for at once: as many blocks as would have to
            go for them are offered to others beforehand.
        max_bytes_per_s: of all moves of a worker; 0 for none: what is evicted is gone.
        blocks_a_move: most blocks of one transfer.
        interval_s: pause after an attempt in which nobody took anything, in seconds.
    """

    ahead: float = 0.125
    max_bytes_per_s: float = 100e6
    blocks_a_move: int = 16
    interval_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.ahead <= 1:
            raise ConfigError("moves.ahead", f"{self.ahead} is no share of a pool")
        if not 0 <= self.max_bytes_per_s < float("inf"):
            raise ConfigError("moves.max_bytes_per_s", f"{self.max_bytes_per_s} is below 0")
        if self.blocks_a_move < 1:
            raise ConfigError("moves.blocks_a_move", f"{self.blocks_a_move} is below 1")
        if not 0 < self.interval_s < float("inf"):
            raise ConfigError("moves.interval_s", f"{self.interval_s} is not above 0")


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """How served answers are held against exact replay; see `replay_shadow.py`.

    Attributes:
        share: of the tokens served behind a restart, that are scored again, 0 to 1; 0 for none.
        max_tokens: longest prompt and answer that is; sets aside KV memory of so many tokens.
        capacity_bytes: most host memory of the distributions that wait to be scored again.
        max_wait_s: after so many seconds without an idle moment they are dropped.
    """

    share: float = 0.001
    max_tokens: int = 32_768
    capacity_bytes: int = 64 << 20
    max_wait_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError("shadow.share", f"{self.share} is not between 0 and 1")
        if self.max_tokens < 1:
            raise ConfigError("shadow.max_tokens", f"{self.max_tokens} is below 1")
        if self.capacity_bytes < 0:
            raise ConfigError("shadow.capacity_bytes", f"{self.capacity_bytes} is below 0")
        if not 0 < self.max_wait_s < float("inf"):
            raise ConfigError("shadow.max_wait_s", f"{self.max_wait_s} is no number of seconds")

    def num_blocks(self, window: int, max_model_len: int) -> int:
        """KV blocks of `window` tokens that are set aside for scoring again."""
        return 0 if self.share == 0 else -(-min(self.max_tokens, max_model_len) // window)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One worker's engine.

    Attributes:
        max_batched_tokens: rows of one step: decode rows, then tails and prompt chunks. At least
            2W. Decode rows never take the last 2W of it from the prompts.
        max_num_seqs: sequences that hold pages at once.
        num_blocks: KV blocks in the worker's pool.
        default_tail: the tail variant of requests that name none.
        anchor_interval: A of mode canonical in tokens, a multiple of W.
        reserved_output_tokens: tokens of each answer whose pages are set aside at admission. Longer
            answers take pages as they grow; where none are left, the youngest requests park.
        numerics: whether results may depend on batch mates in rounding.
        kv_format: how cached rows are stored.
        engram_placement: where n-gram tables lie; a model without any takes no notice.
        w8a8: round the inputs of the linears that the release quantises, as the released code
            does; changes every number, so workers that differ in it share nothing.
        transfer: hand-over settings.
        windows: which encoder windows are kept.
        parked: how sessions' states are kept.
        leases: what is kept while tools run.
        disk: where block KV outlives the worker.
        moves: how last copies of blocks go to other workers.
        shadow: how served answers are held against exact replay.
    """

    max_batched_tokens: int = 512
    max_num_seqs: int = 64
    num_blocks: int = 1024
    default_tail: TailVariant = TailVariant.FLOORED
    anchor_interval: int = DEFAULT_ANCHOR_INTERVAL
    reserved_output_tokens: int = DEFAULT_RESERVED_TOKENS
    numerics: Numerics = Numerics.DETERMINISTIC
    kv_format: KVFormat = KVFormat.PACKED
    engram_placement: EngramPlacement = EngramPlacement.HOST_SHARED
    w8a8: bool = False
    transfer: TransferConfig = field(default_factory=TransferConfig)
    windows: WindowConfig = field(default_factory=WindowConfig)
    parked: ParkConfig = field(default_factory=ParkConfig)
    leases: LeaseConfig = field(default_factory=LeaseConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    moves: MoveConfig = field(default_factory=MoveConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)

    def __post_init__(self) -> None:
        for name in (
            "max_batched_tokens",
            "max_num_seqs",
            "num_blocks",
            "reserved_output_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}", f"{getattr(self, name)} is below 1")
        if self.default_tail is TailVariant.EXACT:
            raise ConfigError(
                "engine.default_tail",
                "tail 'exact' needs mode 'exact', which requests ask for by themselves; use "
                "floored, layer_exact or full",
            )
