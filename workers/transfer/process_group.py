"""How do two processes join into one lane? A two-rank process group on the sender's store.

The group object is built directly on a `TCPStore`; `init_process_group` is never called, so lanes
come and go without touching each other. Only this file knows which backend it is.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from ripresa.workers.errors import ConfigError, Unavailable
from ripresa.workers.transfer.base import LaneEndpoint

SENDER_RANK = 0
RECEIVER_RANK = 1
# Gloo would tell messages apart by tags, NCCL does not: order alone must do.
_TAG = 0
_STORE_TIMEOUT = timedelta(seconds=30)

# The group classes are exported at run time only, and differ between builds of torch.
_dist: Any = torch.distributed


class Work(Protocol):
    """A chunk under way."""

    def wait(self, timeout: timedelta) -> bool: ...


class StoreServer:
    """One worker's meeting point for the lanes of which it is the sender.

    Args:
        host: the only address it listens on.
    """

    def __init__(self, host: str) -> None:
        # The listening socket is ours: a `TCPStore` by itself listens on every interface.
        listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = (host, int(listener.getsockname()[1]))
        self._store = _dist.TCPStore(
            *self.address,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def num_keys(self) -> int:
        """Keys of lanes that are still open."""
        return len(self._store.list_keys())


class LaneGroup:
    """One end's membership of a lane. Blocks; belongs to the lane's thread.

    Args:
        endpoint: where to meet.
        rank: SENDER_RANK or RECEIVER_RANK.
        host: the address of this end's own connections (gloo).
        timeout_s: how long to wait for the other end.

    Raises:
        RuntimeError: the store or the other end did not answer in time.
    """

    def __init__(self, endpoint: LaneEndpoint, rank: int, host: str, timeout_s: float) -> None:
        if endpoint.address is None:
            raise RuntimeError(f"lane {endpoint.lane_id} has no address")
        timeout = timedelta(seconds=timeout_s)
        self._lane_id = endpoint.lane_id
        self.rank = rank
        # A client of its own: a store client serves one waiting call at a time. It asks the name
        # server who the other end is before it says a word, see `LaneConfig.open_timeout_s`.
        self._store = _dist.TCPStore(*endpoint.address, timeout=timeout, wait_for_workers=False)
        # Handshake first: creating a communicator cannot be interrupted once its peer is gone.
        self._store.set(self._ready_key(rank), "1")
        try:
            self._store.wait([self._ready_key(1 - rank)], timeout)
            prefixed = _dist.PrefixStore(endpoint.lane_id, self._store)
            if endpoint.transport == "nccl":
                self._group = _join_nccl(prefixed, rank, timeout)
            else:
                self._group = _join_gloo(prefixed, rank, timeout, host)
        except RuntimeError:
            self._forget_keys()
            raise

    def move(self, chunk: torch.Tensor) -> Work:
        """Begin to send (sender) or to receive into (receiver) one contiguous chunk."""
        if self.rank == SENDER_RANK:
            work: Work = self._group.send([chunk], RECEIVER_RANK, _TAG)
        else:
            work = self._group.recv([chunk], SENDER_RANK, _TAG)
        return work

    def close(self) -> None:
        self._group.abort()
        self._group = None
        self._forget_keys()
        self._store = None

    def _ready_key(self, rank: int) -> str:
        return f"{self._lane_id}/ready/{rank}"

    def _forget_keys(self) -> None:
        """The sender's store outlives its lanes; a closed lane leaves nothing in it."""
        if self.rank == SENDER_RANK:
            for key in self._store.list_keys():
                if key.lstrip("/").startswith(f"{self._lane_id}/"):
                    self._store.delete_key(key)


def _join_gloo(store: Any, rank: int, timeout: timedelta, host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timeout
    return _dist.ProcessGroupGloo(store, rank, 2, options)


def _join_nccl(store: Any, rank: int, timeout: timedelta, size: int = 2) -> Any:
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(store, rank, size, options)


def require_nccl(device: torch.device) -> None:
    """Refuse what NCCL cannot do here, and keep it from ending the process with a peer.

    Raises:
        ConfigError: no NCCL, no GPU, or an error handling mode that tears the process down.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or not _dist.is_nccl_available():
        raise ConfigError(
            "lanes.transport", "nccl needs a CUDA build of torch and a GPU; use gloo or auto"
        )
    # Modes 1 and 3 end the process when a peer dies, 2 only cleans up. Only NCCL groups read it.
    mode = os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if mode not in ("0", "2"):
        raise ConfigError(
            "lanes.transport",
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING={mode} ends a worker when its peer dies; "
            "unset it or set it to 2",
        )


def check_nccl(device: torch.device) -> None:
    """Move a chunk from this GPU to itself over a one-rank NCCL group, and compare.

    Shows that NCCL starts and moves bytes on this worker. It does not show that two workers can
    reach each other: NCCL refuses two ranks on one GPU, so that check needs two GPUs.

    Raises:
        ConfigError: NCCL cannot be used here at all.
        Unavailable: NCCL failed, or the bytes differ.
    """
    require_nccl(device)
    timeout = timedelta(seconds=10)
    server = StoreServer("127.0.0.1")
    store = _dist.TCPStore(*server.address, timeout=timeout, wait_for_workers=False)
    sent = torch.arange(4096, device=device).to(torch.uint8)
    received = torch.zeros_like(sent)
    try:
        group = _join_nccl(_dist.PrefixStore("self-check", store), 0, timeout, size=1)
        # A rank that talks to itself must post both calls as one group.
        group._start_coalescing(device)
        group.send([sent], 0, _TAG)
        group.recv([received], 0, _TAG)
        group._end_coalescing(device).wait(timeout)
        equal = torch.equal(sent, received)
        group.abort()
    except RuntimeError as error:
        raise Unavailable(f"NCCL does not work on {device}: {error}; use gloo") from error
    if not equal:
        raise Unavailable(f"NCCL moved wrong bytes on {device}; use gloo")
