"""What does a worker process need to know to start?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ripresa.workers.config import EngineConfig
from ripresa.workers.transfer.base import LaneConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker's start-up settings; plain values that travel to its process.

    Attributes:
        model_path: checkpoint folder; empty for the bundled demo model.
        engine: engine settings.
        transport: auto, gloo, nccl or object_store.
        lanes: transfer limits and timeouts.
        host: address at which other workers reach this one's lanes.
        torch_threads: threads of matrix products; more than the cores a process has is slower.
        heartbeat_interval_s: seconds between reports.
        keep_streams_s: how long a decode worker keeps a stream's tokens after its end.
        kept_streams_bytes: what it may keep of streams, about.
    """

    model_path: str
    engine: EngineConfig
    transport: str = "auto"
    lanes: LaneConfig = field(default_factory=LaneConfig)
    host: str = "127.0.0.1"
    torch_threads: int = 1
    heartbeat_interval_s: float = 0.5
    keep_streams_s: float = 60.0
    kept_streams_bytes: int = 64 << 20
