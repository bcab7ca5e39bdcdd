"""Which settings does a cluster have? One tree, frozen, the same on a laptop and in Kubernetes.

A component gets its node, not the tree. The model's geometry is no setting: it comes from the
checkpoint's `config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from ripresa.cluster.config_tree import build, override, read_yaml, setting
from ripresa.cluster.routing.worker_load import PlannerSettings
from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import (
    DEFAULT_ANCHOR_INTERVAL,
    DEFAULT_RESERVED_TOKENS,
    DiskConfig,
    EngineConfig,
    EngramPlacement,
    LeaseConfig,
    MoveConfig,
    Numerics,
    ParkConfig,
    ShadowConfig,
    WindowConfig,
    WindowPolicy,
)
from ripresa.workers.config import TransferConfig as EngineTransferConfig
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.errors import ConfigError
from ripresa.workers.models.deepseek_v41.config import ModelConfig, check_w8a8
from ripresa.workers.replay import TailVariant

if TYPE_CHECKING:
    from ripresa.workers.transfer.base import LaneConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_TEMP_DIR_CHARS = 40
"""Ray puts Unix sockets about 65 characters below it, and their paths end at 107."""


class TransferBackend(StrEnum):
    """What carries state between workers. AUTO: nccl where both ends are on GPUs, else gloo.

    OBJECT_STORE goes through Ray, where workers cannot reach each other's ports; it is slower.
    """

    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"
    OBJECT_STORE = "object_store"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served.

    Attributes:
        name: what clients call it.
        path: the checkpoint's folder (`config.json`, `tokenizer.json`, safetensors); null serves
            the bundled demo model.
        engram_placement: where the n-gram tables lie: `host_shared` reads them into the page
            cache, one copy a machine; `host_numa` copies them into each worker's own NUMA node;
            `nvme` leaves them in their files and reads each step's rows.
        w8a8: round the inputs of quantised linears as the released code does; `false` multiplies
            them as they are. Needs a checkpoint with a quantization_config.
    """

    name: str = "deepseek-v4.1-demo"
    path: str | None = None
    engram_placement: EngramPlacement = EngramPlacement.HOST_SHARED
    w8a8: bool = False

    @property
    def config_file(self) -> Path:
        """The `config.json` that the model's geometry comes from."""
        folder = DEMO_MODEL if self.path is None else Path(self.path)
        return folder / "config.json"

    @property
    def tokenizer_file(self) -> Path:
        folder = DEMO_MODEL if self.path is None else Path(self.path)
        return folder / "tokenizer.json"


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """The encoder workers: lower layers only, prefill only.

    Attributes:
        replicas: how many; 0 lets the decode workers prefill by themselves.
        max_batched_tokens: rows of one step.
        max_num_seqs: prompts that hold pages at once.
        num_blocks: KV blocks of each worker's pool.
    """

    replicas: int = setting(0, at_least=0)
    max_batched_tokens: int = setting(512, at_least=1)
    max_num_seqs: int = setting(64, at_least=1)
    num_blocks: int = setting(1024, at_least=1)


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """The decode workers: all layers.

    Attributes:
        replicas: how many.
        max_batched_tokens: rows of one step: decode rows, tails and prompt chunks together.
        max_num_seqs: requests that hold pages at once.
        num_blocks: KV blocks of each worker's pool.
        reserved_output_tokens: tokens of each answer whose pages are set aside at admission; longer
            ones take pages as they grow, and where none are left the youngest requests park.
        keep_streams_s: how long a stream's tokens stay after its end, for `Resume`.
        kept_streams_bytes: what each worker may keep of streams, about; those that have ended make
            room first, and a stream that alone takes more cannot be resumed.
    """

    replicas: int = setting(1, at_least=1)
    max_batched_tokens: int = setting(512, at_least=1)
    max_num_seqs: int = setting(64, at_least=1)
    num_blocks: int = setting(1024, at_least=1)
    reserved_output_tokens: int = setting(DEFAULT_RESERVED_TOKENS, at_least=1)
    keep_streams_s: float = setting(60.0, at_least=0)
    kept_streams_bytes: int = setting(64 << 20, at_least=0)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateways: what clients connect to.

    Attributes:
        replicas: how many.
        grpc_host, grpc_port: where gRPC is served; port 0 takes a free one.
        http_host, http_port: where HTTP is served; likewise.
        max_message_bytes: largest request, by gRPC or HTTP.
        max_messages, max_tools: most of either in one conversation; rendering takes time for each.
        max_running: most answers under way at once in one gateway; one more is refused.
        max_queue_time_s: how long a request waits while every worker is full or none is ready,
            unless it says so itself; 0 refuses it. The default outlasts the restart of a worker.
        max_unread_s: how long a stream waits for a client that takes nothing of it. Then it is
            over, and its place is another request's; by gRPC a client may go on with `Resume`.
        max_said_tokens: tokens of finished answers that a gateway keeps, four bytes each, to stand
            in for them when clients send them back in other words; 0 keeps none.
        drain_grace_s: how long a stopping gateway lets its streams go on, in seconds. Then it cuts
            them: those of gRPC go on without it, for `Resume`; those of HTTP end.
        api_keys_file: which keys belong to which tenants, and what those may do; read again when
            it changes. Null asks nobody for a key.
    """

    replicas: int = setting(1, at_least=1)
    grpc_host: str = "127.0.0.1"
    grpc_port: int = setting(9000, at_least=0, at_most=65535)
    http_host: str = "127.0.0.1"
    http_port: int = setting(8000, at_least=0, at_most=65535)
    max_message_bytes: int = setting(4 << 20, at_least=1 << 10, at_most=1 << 30)
    max_messages: int = setting(10_000, at_least=1)
    max_tools: int = setting(1_000, at_least=1)
    max_running: int = setting(1024, at_least=1)
    max_queue_time_s: float = setting(60.0, at_least=0, at_most=3600)
    max_unread_s: float = setting(60.0, at_least=1)
    max_said_tokens: int = setting(4_000_000, at_least=0)
    drain_grace_s: float = setting(60.0, at_least=0)
    api_keys_file: str | None = None


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The operators' door: gRPC on a port of its own, in every gateway.

    Attributes:
        host, port: where it is served; port 0 takes a free one.
        api_keys_file: operators' keys, in the same form as `gateway.api_keys_file`. Null asks for
            none, which is refused where others could reach the port.
    """

    host: str = "127.0.0.1"
    port: int = setting(9001, at_least=0, at_most=65535)
    api_keys_file: str | None = None

    def __post_init__(self) -> None:
        if self.api_keys_file is None and self.host not in LOOPBACK:
            raise ConfigError(
                "admin.host",
                f"{self.host} lets other machines drain workers; set admin.api_keys_file, or "
                "stay on 127.0.0.1",
            )


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How state travels between workers.

    Attributes:
        backend: what carries it.
        chunk_bytes: a section crosses a lane in pieces of this size.
        chunk_timeout_s: longest wait for one piece, in seconds; a dead peer costs one of these.
        max_lanes: open lanes a worker and direction.
        max_section_blocks: most KV blocks that an encoder worker sends in one section.
        hand_over_window_blocks: an encoder window is handed over every so many blocks, for another
            encoder worker to go on from.
        max_tail_bytes: encoder output that a worker holds for requests that are handed over; tails
            exact and full need much.
        hand_over_timeout_s: how long a decode worker keeps the pages of a request whose state
            does not arrive, in seconds.
        pull_timeout_s, follow_timeout_s: longest time in which nothing comes of what another
            worker holds, or computes, in seconds; then it is computed here.
    """

    backend: TransferBackend = TransferBackend.AUTO
    chunk_bytes: int = setting(4 << 20, at_least=64 << 10, at_most=64 << 20)
    chunk_timeout_s: float = setting(2.0, at_least=0.1, at_most=60)
    max_lanes: int = setting(16, at_least=1)
    max_section_blocks: int = setting(16, at_least=1)
    hand_over_window_blocks: int = setting(32, at_least=1)
    max_tail_bytes: int = setting(256 << 20, at_least=1)
    hand_over_timeout_s: float = setting(60.0, at_least=1)
    pull_timeout_s: float = setting(2.0, at_least=0.1)
    follow_timeout_s: float = setting(10.0, at_least=0.1)


@dataclass(frozen=True, slots=True)
class PrefixDirectorySettings:
    """The directory of who holds which prefix.

    Attributes:
        enabled: whether there is one; without it a prompt finds only what the worker holds that
            its load chooses.
        shards: actors that share the prompts by their first block.
        capacity_blocks: blocks that each of them remembers.
        lookup_timeout_s: longest wait for a hint, in seconds; later, a prompt is placed by load.
        late_s, lease_s: a worker unheard of for so many seconds is trusted less, and forgotten.
        claim_s: a request that is to compute what others wait for is heard of within so many
            seconds, or another one computes it.
    """

    enabled: bool = True
    shards: int = setting(1, at_least=1, at_most=256)
    capacity_blocks: int = setting(1_000_000, at_least=1)
    lookup_timeout_s: float = setting(0.01, at_least=0.0001)
    late_s: float = setting(1.0, at_least=0.1)
    lease_s: float = setting(3.0, at_least=0.2)
    claim_s: float = setting(1.0, at_least=0.1)

    def __post_init__(self) -> None:
        if self.late_s >= self.lease_s:
            raise ConfigError(
                "directory.late_s", f"must be below directory.lease_s, {self.lease_s}"
            )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Opened sessions, whose transcripts the cluster keeps.

    Attributes:
        max_bytes: memory of all transcripts, about; those that would expire first make room.
        idle_ttl_s: a session expires when nothing was asked of it for so many seconds, unless it
            names its own time.
        max_idle_ttl_s: the longest that one may name.
        max_said_tokens: tokens of the newest answers that gateways tell each other, four bytes
            each, so that a conversation may move between them; 0 tells none.
    """

    max_bytes: int = setting(1 << 30, at_least=1 << 20)
    idle_ttl_s: float = setting(3600.0, at_least=1)
    max_idle_ttl_s: float = setting(86400.0, at_least=1)
    max_said_tokens: int = setting(4_000_000, at_least=0)


@dataclass(frozen=True, slots=True)
class RaySettings:
    """The Ray cluster below.

    Attributes:
        address: an existing cluster to join (`auto` finds a local one); null starts a local one.
        temp_dir: where Ray keeps sockets and logs, absolute and short; null for Ray's default.
        num_cpus: CPUs that a started cluster offers; null counts the machine's.
        object_store_memory: bytes of shared memory of a started cluster.
        dashboard: whether a started cluster has Ray's dashboard.
        dashboard_port: where.
        metrics_export_port: where a started cluster exports Ray's own metrics; null picks one.
    """

    address: str | None = None
    temp_dir: str | None = None
    num_cpus: int | None = setting(None, at_least=1)
    object_store_memory: int = setting(200 << 20, at_least=80 << 20)
    dashboard: bool = False
    dashboard_port: int = setting(8265, at_least=1, at_most=65535)
    metrics_export_port: int | None = setting(None, at_least=1, at_most=65535)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole tree.

    Attributes:
        numerics: `deterministic` gives a stream the same tokens whatever runs beside it, and
            costs speed; `fast` does not pad.
        kv_format: `packed` stores cached rows in the released number formats; `float32` as they
            are computed, for debugging.
        default_tail: tail variant of requests that name none.
        anchor_interval: tokens between two restarts of mode canonical; a multiple of the window.
        torch_threads: threads of torch in each worker process.
        worker_lease_s: a worker that does not report for so many seconds is lost, and its streams
            go on elsewhere; it reports twice a second. More than the default suits machines so
            busy that a living worker may stop for longer.
        windows: which encoder windows every worker keeps for later hits.
        parked: how decode workers keep sessions between their turns.
        moves: how last copies of blocks go to other workers before they are evicted.
        leases: what they keep before all else while a session's tools run.
        disk: where block KV outlives the workers of a machine.
        shadow: how decode workers hold served answers against exact replay while they are idle.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    encoders: EncoderSettings = field(default_factory=EncoderSettings)
    decoders: DecoderSettings = field(default_factory=DecoderSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    windows: WindowConfig = field(default_factory=WindowConfig)
    parked: ParkConfig = field(default_factory=ParkConfig)
    moves: MoveConfig = field(default_factory=MoveConfig)
    leases: LeaseConfig = field(default_factory=LeaseConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)
    directory: PrefixDirectorySettings = field(default_factory=PrefixDirectorySettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    numerics: Numerics = Numerics.FAST
    kv_format: KVFormat = KVFormat.PACKED
    default_tail: TailVariant = TailVariant.FLOORED
    anchor_interval: int = setting(DEFAULT_ANCHOR_INTERVAL, at_least=1)
    torch_threads: int = setting(1, at_least=1)
    worker_lease_s: float = setting(5.0, at_least=2.0, at_most=600)

    def __post_init__(self) -> None:
        if not self.model.name.strip():
            raise ConfigError("model.name", "must not be empty")
        if self.default_tail is TailVariant.EXACT:
            raise ConfigError(
                "default_tail", "`exact` needs mode exact, which requests ask for by themselves"
            )
        if self.transfer.backend is TransferBackend.LOOPBACK and self.encoders.replicas > 0:
            raise ConfigError(
                "transfer.backend",
                "loopback stays within one process and workers have their own; use auto or gloo",
            )
        gateway = self.gateway
        if gateway.grpc_port == gateway.http_port != 0:
            raise ConfigError(
                "gateway.http_port", f"{gateway.http_port} is already gateway.grpc_port"
            )
        if self.admin.port != 0 and self.admin.port in (gateway.grpc_port, gateway.http_port):
            raise ConfigError("admin.port", f"{self.admin.port} is already one of the gateway's")
        if gateway.replicas > 1 and gateway.grpc_port == 0:
            raise ConfigError("gateway.grpc_port", "several gateways need a port that is not 0")
        if self.ray.temp_dir is not None:
            _check_temp_dir(self.ray.temp_dir)

    def encoder_engine(self) -> EngineConfig:
        """What each encoder worker's engine gets."""
        return self._engine(self.encoders)

    def decoder_engine(self) -> EngineConfig:
        """What each decode worker's engine gets."""
        return self._engine(self.decoders)

    def lanes(self) -> LaneConfig:
        """What each worker's transfer lanes get."""
        from ripresa.workers.transfer.base import LaneConfig  # loads torch: not for `--help`

        transfer = self.transfer
        return LaneConfig(
            chunk_bytes=transfer.chunk_bytes,
            chunk_timeout_s=transfer.chunk_timeout_s,
            max_lanes=transfer.max_lanes,
        )

    def _engine(self, workers: EncoderSettings | DecoderSettings) -> EngineConfig:
        return EngineConfig(
            max_batched_tokens=workers.max_batched_tokens,
            max_num_seqs=workers.max_num_seqs,
            num_blocks=workers.num_blocks,
            default_tail=self.default_tail,
            anchor_interval=self.anchor_interval,
            reserved_output_tokens=self.decoders.reserved_output_tokens,
            numerics=self.numerics,
            kv_format=self.kv_format,
            engram_placement=self.model.engram_placement,
            w8a8=self.model.w8a8,
            windows=self.windows,
            parked=self.parked,
            moves=self.moves,
            leases=self.leases,
            disk=self.disk,
            shadow=self.shadow,
            transfer=EngineTransferConfig(
                max_section_blocks=self.transfer.max_section_blocks,
                hand_over_window_blocks=self.transfer.hand_over_window_blocks,
                max_tail_bytes=self.transfer.max_tail_bytes,
                hand_over_timeout_s=self.transfer.hand_over_timeout_s,
                pull_timeout_s=self.transfer.pull_timeout_s,
                follow_timeout_s=self.transfer.follow_timeout_s,
            ),
        )


def load_config(path: Path | None, assignments: Sequence[str] = ()) -> ClusterConfig:
    """Read a configuration file (None: all defaults) and apply `a.b=value` overrides.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong; `field` is its dotted name.
    """
    document = {}
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(str(path), f"cannot be read: {reason}") from error
        document = read_yaml(text, str(path))
    return build(ClusterConfig, override(document, assignments))


def check_against_model(config: ClusterConfig, model: ModelConfig) -> None:
    """Refuse settings that the model makes useless or impossible.

    Raises:
        ConfigError: a budget below two windows, anchors or periodic windows that are no block
            boundaries, or `w8a8` for a model it does not fit.
    """
    window = model.sliding_window
    if config.anchor_interval % window:
        raise ConfigError(
            "anchor_interval",
            f"must be a multiple of this model's window, {window}, is {config.anchor_interval}",
        )
    if config.windows.policy is WindowPolicy.PERIODIC and config.windows.period % window:
        raise ConfigError(
            "windows.period",
            f"must be a multiple of this model's window, {window}, is {config.windows.period}",
        )
    pools = {"decoders": config.decoders.max_batched_tokens}
    if config.encoders.replicas > 0:
        pools["encoders"] = config.encoders.max_batched_tokens
    least = 2 * window
    for name, budget in pools.items():
        if budget < least:
            raise ConfigError(
                f"{name}.max_batched_tokens",
                f"must be at least two windows of this model, {least}, is {budget}",
            )
    if config.model.w8a8:
        check_w8a8(model)


def _check_temp_dir(temp_dir: str) -> None:
    if not Path(temp_dir).is_absolute():
        raise ConfigError("ray.temp_dir", f"must be an absolute path, is {temp_dir!r}")
    if len(temp_dir) > MAX_TEMP_DIR_CHARS:
        raise ConfigError(
            "ray.temp_dir",
            f"must have at most {MAX_TEMP_DIR_CHARS} characters, has {len(temp_dir)}: "
            "Unix sockets are made below it and their paths are limited",
        )
