"""Which transport does a name stand for, and which one does `auto` choose?"""

from __future__ import annotations

from importlib import import_module

import torch

from ripresa.workers.errors import ConfigError
from ripresa.workers.transfer.base import LaneConfig, Transport

AUTO = "auto"

TRANSPORTS = {
    "gloo": "ripresa.workers.transfer.lane:gloo_transport",
    "nccl": "ripresa.workers.transfer.lane:nccl_transport",
    "object_store": "ripresa.workers.transfer.object_store:object_store_transport",
    "loopback": "ripresa.workers.transfer.loopback:loopback_transport",
}
"""Name -> "module:function", imported on use."""


def choose_transport(name: str, sender: torch.device, receiver: torch.device) -> str:
    """The transport between two workers: `auto` is nccl where both ends are GPUs, else gloo.

    Raises:
        ConfigError: no transport has this name.
    """
    if name == AUTO:
        return "nccl" if sender.type == receiver.type == "cuda" else "gloo"
    if name not in TRANSPORTS:
        raise ConfigError(
            "lanes.transport", f"{name!r} is unknown; use {', '.join([AUTO, *TRANSPORTS])}"
        )
    return name


def create_transport(
    name: str, host: str, device: torch.device, config: LaneConfig | None = None
) -> Transport:
    """A worker's transport; `name` is one that `choose_transport` returned.

    Args:
        name: gloo, nccl, object_store or loopback.
        host: address at which the other workers reach this one.
        device: where this worker's payloads live.
        config: limits and timeouts.

    Raises:
        ConfigError: the name is unknown, or the transport cannot work here.
    """
    if name not in TRANSPORTS:
        raise ConfigError("lanes.transport", f"{name!r} is unknown; use {', '.join(TRANSPORTS)}")
    module, function = TRANSPORTS[name].split(":")
    transport: Transport = getattr(import_module(module), function)(host, device, config)
    return transport
