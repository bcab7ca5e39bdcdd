"""What will a worker keep in memory, and does it fit? From config and settings, before loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ripresa.workers.cache.kv_layout import KVLayout
from ripresa.workers.cache.write_behind import MAX_QUEUE_BYTES
from ripresa.workers.config import EngineConfig, EngramPlacement, WindowPolicy
from ripresa.workers.errors import ConfigError
from ripresa.workers.host_memory import AvailableMemory
from ripresa.workers.models.deepseek_v41.config import LayerRole, ModelConfig
from ripresa.workers.models.deepseek_v41.tensor_specs import (
    Half,
    Part,
    half_specs,
    text_specs,
)
from ripresa.workers.transfer.base import LaneConfig

HELD = {Half.ENCODER: "the encoder half", Half.ALL: "the whole model"}

_TABLES_ARE = {
    EngramPlacement.HOST_SHARED: "page cache, one copy a machine, not counted above",
    EngramPlacement.HOST_NUMA: "a copy in each worker, counted above",
    EngramPlacement.NVME: "in their files, no memory",
}

COMPUTE_BYTES = 4
"""Weights are kept in float32."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one worker.

    Attributes:
        settings: dotted name of the worker's settings, `encoders` or `decoders`.
        weights_stored: what is read from the checkpoint, as the release stores it.
        weights: what is kept of it.
        kv_pool, block_bytes, num_blocks: the pool and its blocks.
        rings, slot_bytes, num_slots: window rows and open pairs, by sequence.
        shadow: to score served answers again: KV memory of one sequence, and what waits for it.
        index_workspace: most that index scoring takes at once.
        lane_buffers: most that hand-overs under way take, tail rows included.
        load_extra: what loading the largest tensor takes beside what is kept.
        engram_tables: bytes of the n-gram tables as stored.
        engram_placement: where they lie, and so whose memory they take.
    """

    settings: str
    half: Half
    weights_stored: int
    weights: int
    block_bytes: int
    num_blocks: int
    slot_bytes: int
    num_slots: int
    shadow: int
    index_workspace: int
    lane_buffers: int
    kept_states: int
    load_extra: int
    engram_tables: int
    engram_placement: EngramPlacement

    @property
    def kv_pool(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def rings(self) -> int:
        return self.slot_bytes * self.num_slots

    @property
    def own_tables(self) -> int:
        """Engram's tables in this worker's own memory (`host_numa`)."""
        is_own = self.engram_placement is EngramPlacement.HOST_NUMA
        return self.engram_tables if is_own else 0

    @property
    def shared_tables(self) -> int:
        """Engram's tables in the page cache: once a machine, whatever its workers."""
        is_shared = self.engram_placement is EngramPlacement.HOST_SHARED
        return self.engram_tables if is_shared else 0

    @property
    def loader_peak(self) -> int:
        """Most that loading takes of its own; the KV memory comes after it."""
        return self.weights + self.load_extra + self.own_tables

    @property
    def serving(self) -> int:
        """Most that serving takes of its own, without pages that workers share."""
        kept = self.weights + self.own_tables + self.kv_pool + self.rings + self.shadow
        return kept + self.index_workspace + self.lane_buffers + self.kept_states

    @property
    def peak(self) -> int:
        """Most that the worker takes of its own."""
        return max(self.loader_peak, self.serving)

    @property
    def needed(self) -> int:
        """What must be left for it where no other worker is."""
        return self.peak + self.shared_tables

    def lines(self) -> Iterator[str]:
        """The plan as text, a line an item."""
        items = (
            ("weights", self.weights, f"float32, from {size(self.weights_stored)} stored"),
            ("KV pool", self.kv_pool, f"{self.num_blocks} blocks of {self.block_bytes} bytes"),
            ("rings", self.rings, f"{self.num_slots} sequences of {self.slot_bytes} bytes"),
            ("shadow", self.shadow, "KV memory and distributions, to score answers again"),
            ("index workspace", self.index_workspace, "at most"),
            ("lane buffers", self.lane_buffers, "at most"),
            (
                "kept states",
                self.kept_states,
                "windows, parked sessions, blocks for the disk, at most",
            ),
            ("serving", self.serving, "the sum"),
            ("loader peak", self.loader_peak, "weights and the largest tensor as stored"),
        )
        yield f"{self.settings}: one worker with {HELD[self.half]}"
        for name, num_bytes, note in items:
            yield f"  {name:<16}{size(num_bytes):>12}  {note}"
        if self.engram_tables:
            note = f"{self.engram_placement}: {_TABLES_ARE[self.engram_placement]}"
            yield f"  {'Engram tables':<16}{size(self.engram_tables):>12}  {note}"

    def require_fit(self, available: AvailableMemory) -> None:
        """Refuse a plan that cannot work out.

        Raises:
            ConfigError: naming the setting to change, and to what.
        """
        lack = self.needed - available.num_bytes
        if lack <= 0:
            return
        reason = (
            f"a worker with {HELD[self.half]} takes {size(self.needed)}, and "
            f"{size(available.num_bytes)} are left by {available.source}"
        )
        tables = self.own_tables + self.shared_tables
        if tables and self.needed - tables <= available.num_bytes:
            raise ConfigError(
                "model.engram_placement",
                f"{reason}: {self.engram_placement} keeps Engram's tables, {size(tables)}, in "
                "memory; give the worker more, or set it to nvme",
            )
        loading = self.loader_peak + self.shared_tables
        if loading > available.num_bytes:
            raise ConfigError(
                "model.path",
                f"{reason}: loading its weights alone takes {size(loading)}; give the "
                "worker more memory or serve a smaller model",
            )
        blocks = self.num_blocks - -(-lack // self.block_bytes)
        if blocks >= 2:
            raise ConfigError(
                f"{self.settings}.num_blocks", f"{reason}; set it to at most {blocks}"
            )
        slots = self.num_slots - -(-lack // self.slot_bytes)
        if slots >= 1:
            raise ConfigError(
                f"{self.settings}.max_num_seqs", f"{reason}; set it to at most {slots}"
            )
        raise ConfigError(
            f"{self.settings}.num_blocks",
            f"{reason}; set it and {self.settings}.max_num_seqs lower",
        )


def plan_memory(
    config: ModelConfig,
    half: Half,
    engine: EngineConfig,
    lanes: LaneConfig,
    layout: KVLayout,
    index_workspace: int,
) -> MemoryPlan:
    """What a worker with these settings takes.

    Args:
        layout: the KV layout that the worker will have.
        index_workspace: its budget for index scores, in bytes.
    """
    read = [spec for spec in half_specs(config, half) if spec.part is not Part.TABLE]
    layers = config.split + 1 if half is Half.ENCODER else config.num_hidden_layers
    slot_bytes = layout.window_bytes(layout.ring_rows, layers) + layout.open_pair_bytes
    return MemoryPlan(
        settings="encoders" if half is Half.ENCODER else "decoders",
        half=half,
        weights_stored=sum(spec.released_bytes for spec in read),
        weights=COMPUTE_BYTES * (sum(spec.num_parameters for spec in read) + _twice(config, half)),
        block_bytes=layout.block_bytes,
        num_blocks=engine.num_blocks,
        slot_bytes=slot_bytes,
        num_slots=engine.max_num_seqs,
        shadow=_shadow(config, half, engine, layout, slot_bytes),
        index_workspace=index_workspace,
        kept_states=_kept_states(half, engine),
        lane_buffers=_lane_buffers(half, engine, lanes, layout),
        load_extra=max(spec.released_bytes + COMPUTE_BYTES * spec.num_parameters for spec in read),
        engram_tables=sum(
            spec.released_bytes for spec in text_specs(config) if spec.part is Part.TABLE
        ),
        engram_placement=engine.engram_placement,
    )


def _shadow(
    config: ModelConfig, half: Half, engine: EngineConfig, layout: KVLayout, slot_bytes: int
) -> int:
    shadow = engine.shadow
    num_blocks = shadow.num_blocks(layout.window, config.max_position_embeddings)
    if half is Half.ENCODER or num_blocks == 0:
        return 0
    return num_blocks * layout.block_bytes + slot_bytes + shadow.capacity_bytes


def _twice(config: ModelConfig, half: Half) -> int:
    """Parameters of Full layers that are kept in two forms: alone, and stacked or again."""
    layers = config.split if half is Half.ENCODER else config.num_hidden_layers
    full = sum(config.role(layer) is LayerRole.FULL for layer in range(layers))
    window = config.head_dim * (config.hidden_size + 1)
    return full * (config.hidden_size + window)


def _kept_states(half: Half, engine: EngineConfig) -> int:
    """Host memory for encoder windows, paused sessions, and blocks on their way to disk."""
    is_used = engine.windows.policy is not WindowPolicy.ZERO
    windows = engine.windows.capacity_bytes if is_used else 0
    queue = 0 if engine.disk.path is None else MAX_QUEUE_BYTES
    return windows + queue + (engine.parked.capacity_bytes if half is Half.ALL else 0)


def _lane_buffers(half: Half, engine: EngineConfig, lanes: LaneConfig, layout: KVLayout) -> int:
    """Payloads under way: a sender's by its budget, a receiver's one section a lane. And the tail
    rows that wait to be sent, or for their tail to be computed."""
    if half is Half.ENCODER:
        return lanes.max_bytes_in_flight + engine.transfer.max_tail_bytes
    window = layout.window
    blocks = engine.transfer.max_section_blocks * layout.block_bytes
    # The longest state: all but a whole block, an odd length, a whole window of output rows.
    state = layout.state_bytes(2 * window - 1, window - 1, source_window=True)
    return lanes.max_lanes * max(blocks, state) + engine.transfer.max_tail_bytes


def size(num_bytes: int) -> str:
    """Bytes for people, in powers of ten."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"
