"""How do bytes move between two workers of a Ray cluster without a lane of their own? By Ray.

    sender   ray.put(payload) ── reference ──▶ mailbox ── reference ──▶ receiver   ray.get
                                  (an actor of the sender's)

The fallback where two workers cannot reach each other's ports: every payload is copied into and out
of the object store, at about a tenth of a lane's speed. The contract is a lane's.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import RayError

from ripresa.workers.errors import ConfigError, Unavailable
from ripresa.workers.transfer.base import Lane, LaneConfig, LaneEndpoint
from ripresa.workers.transfer.checksum import corrupt, payload_checksum

T = TypeVar("T")

NAME = "object_store"
NAMESPACE = "ripresa"

_MAX_CALLS = 1000
_MAX_LOST_LANES = 1024


class _Box:
    """What waits between the two ends of one lane."""

    def __init__(self) -> None:
        self.ends: set[str] = set()
        self.parcel: tuple[list[Any], int] | None = None
        self.lost: str | None = None
        self.changed = asyncio.Condition()


class Mailbox:
    """An actor that hands references over, one at a time a lane. Its calls wait for the other end.

    Each answers why the lane is lost, or None. Whoever calls gives up by `lose`.
    """

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self._lost: OrderedDict[str, str] = OrderedDict()

    async def meet(self, lane_id: str, end: str) -> str | None:
        """Return when both ends have called."""
        box = self._box(lane_id)
        async with box.changed:
            box.ends.add(end)
            box.changed.notify_all()
            await box.changed.wait_for(lambda: len(box.ends) == 2 or box.lost is not None)
        return box.lost

    async def put(self, lane_id: str, reference: list[Any], checksum: int) -> str | None:
        """Return when the parcel was taken."""
        box = self._box(lane_id)
        async with box.changed:
            box.parcel = (reference, checksum)
            box.changed.notify_all()
            await box.changed.wait_for(lambda: box.parcel is None or box.lost is not None)
        return box.lost

    async def look(self, lane_id: str) -> tuple[list[Any], int] | str:
        """The parcel, which stays until it is `taken`."""
        box = self._box(lane_id)
        async with box.changed:
            await box.changed.wait_for(lambda: box.parcel is not None or box.lost is not None)
            return box.parcel or str(box.lost)

    async def taken(self, lane_id: str) -> str | None:
        """The receiver has the parcel's bytes."""
        box = self._box(lane_id)
        async with box.changed:
            box.parcel = None
            box.changed.notify_all()
        return box.lost

    async def lose(self, lane_id: str, reason: str) -> None:
        """An end was given up: the other one's calls return at once."""
        box = self._boxes.pop(lane_id, None)
        self._lost.setdefault(lane_id, reason)
        if len(self._lost) > _MAX_LOST_LANES:
            self._lost.popitem(last=False)
        if box is not None:
            async with box.changed:
                box.lost = reason
                box.parcel = None
                box.changed.notify_all()

    def _box(self, lane_id: str) -> _Box:
        if lane_id in self._lost:
            box = _Box()
            box.lost = self._lost[lane_id]
            return box
        return self._boxes.setdefault(lane_id, _Box())


_mailboxes: dict[str, tuple[str, Any]] = {}
"""This process' own mailbox in each cluster that it joined: name and handle."""


def _own_mailbox() -> tuple[str, Any]:
    """Made on first use; it ends with this process."""
    cluster = ray.get_runtime_context().gcs_address
    if cluster not in _mailboxes:
        name = f"ripresa lanes {uuid.uuid4().hex}"
        made: Any = ray.remote(Mailbox)
        mailbox = made.options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=_MAX_CALLS
        ).remote()
        _mailboxes[cluster] = (name, mailbox)
    return _mailboxes[cluster]


class ObjectStoreTransport:
    """Makes the ends of lanes for one worker.

    Args:
        config: timeouts.
        damage: what happens to every payload after it was hashed; None for nothing (tests).
    """

    def __init__(
        self,
        config: LaneConfig | None = None,
        damage: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._config = config or LaneConfig()
        self.damage = damage
        self._name, self._mailbox = _own_mailbox()

    @property
    def name(self) -> str:
        return NAME

    def address(self) -> tuple[str, int]:
        """The mailbox's name, and no port."""
        return self._name, 0

    def sending_end(self, endpoint: LaneEndpoint) -> Lane:
        endpoint.require_transport(self.name)
        return ObjectStoreLane(endpoint, "sender", self._mailbox, self, self._config)

    def receiving_end(self, endpoint: LaneEndpoint) -> Lane:
        endpoint.require_transport(self.name)
        return ObjectStoreLane(endpoint, "receiver", None, self, self._config)

    def close(self) -> None:
        """The mailbox stays for what this process may send later, and ends with it."""


class ObjectStoreLane:
    """One end of a lane; see `Lane` for the contract."""

    def __init__(
        self,
        endpoint: LaneEndpoint,
        end: str,
        mailbox: Any,
        transport: ObjectStoreTransport,
        config: LaneConfig,
    ) -> None:
        self._endpoint = endpoint
        self._lane_id = endpoint.lane_id
        self._end = end
        self._mailbox = mailbox
        self._transport = transport
        self._config = config
        self._lost: asyncio.Future[str] | None = None
        self._discarded: str | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    async def open(self) -> None:
        await self._or_lost(self._meet(), self._config.open_timeout_s)

    async def send(self, payload: torch.Tensor) -> int:
        checksum = payload_checksum(payload)
        if self._transport.damage is not None:
            payload = self._transport.damage(payload)
        content = payload.detach().cpu().numpy()
        await self._or_lost(self._put(content, checksum), self._patience_s(payload.numel()))
        return checksum

    async def receive(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        payload, checksum = await self._or_lost(self._take(num_bytes), self._patience_s(num_bytes))
        return payload, checksum

    def discard(self, reason: str) -> None:
        if self._discarded is not None:
            return
        self._discarded = reason
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)
        if self._mailbox is not None and ray.is_initialized():
            self._mailbox.lose.remote(self._lane_id, reason)

    async def wait_closed(self) -> None:
        """Nothing of this lane runs in this process."""

    def _patience_s(self, num_bytes: int) -> float:
        """A chunk's time for every chunk that a lane would need."""
        return self._config.chunk_timeout_s * max(1, -(-num_bytes // self._endpoint.chunk_bytes))

    async def _meet(self) -> None:
        if self._mailbox is None:
            self._mailbox = await asyncio.to_thread(self._find)
        self._require(await self._mailbox.meet.remote(self._lane_id, self._end))

    def _find(self) -> Any:
        address = self._endpoint.address
        try:
            return ray.get_actor("" if address is None else address[0], NAMESPACE)
        except ValueError as error:
            raise Unavailable(f"lane {self._lane_id}: its sender is gone") from error

    async def _put(self, content: np.ndarray[Any, Any], checksum: int) -> None:
        reference = await asyncio.to_thread(ray.put, content)
        # In a list it stays a reference on the way.
        self._require(await self._open_mailbox.put.remote(self._lane_id, [reference], checksum))

    async def _take(self, num_bytes: int) -> tuple[torch.Tensor, int]:
        found = await self._open_mailbox.look.remote(self._lane_id)
        if isinstance(found, str):
            self._require(found)
        (reference,), checksum = found
        content = await reference
        if content.nbytes != num_bytes:
            raise Unavailable(f"lane {self._lane_id}: {content.nbytes} bytes, not {num_bytes}")
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8)
        payload = self._staging[:num_bytes]
        np.copyto(payload.numpy(), content)
        if payload_checksum(payload) != checksum:
            raise corrupt(f"a payload of lane {self._lane_id}")
        self._require(await self._open_mailbox.taken.remote(self._lane_id))
        return payload, int(checksum)

    @property
    def _open_mailbox(self) -> Any:
        if self._mailbox is None:
            raise Unavailable(f"lane {self._lane_id} was not opened")
        return self._mailbox

    def _require(self, lost: str | None) -> None:
        if lost is not None:
            raise Unavailable(f"lane {self._lane_id} was lost: {lost}")

    async def _or_lost(self, work: Awaitable[T], timeout_s: float) -> T:
        """The result of some work, unless the lane is given up first or it takes too long."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        try:
            if self._discarded is not None:
                raise Unavailable(f"lane {self._lane_id} is closed")
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._lost.done():
                raise Unavailable(f"lane {self._lane_id} was lost: {self._lost.result()}")
            raise Unavailable(f"lane {self._lane_id}: nothing moved for {timeout_s:g} s")
        except RayError as error:
            self.discard("Ray failed")
            raise Unavailable(f"lane {self._lane_id}: Ray failed: {error}") from error
        except BaseException as error:
            self.discard(f"a call on the other end ended by {error!r}")
            raise
        finally:
            task.cancel()


def object_store_transport(
    host: str, device: torch.device | None = None, config: LaneConfig | None = None
) -> ObjectStoreTransport:
    """Lanes through Ray, whatever device the payloads come from.

    Raises:
        ConfigError: this process is in no Ray cluster.
    """
    if not ray.is_initialized():
        raise ConfigError("transfer.backend", f"{NAME} works inside a Ray cluster; use gloo")
    return ObjectStoreTransport(config)
