"""Do a gateway's metrics say what the session store holds, also of one that begins anew?"""

from __future__ import annotations

import asyncio

import pytest

from ripresa.cluster.gateway.store_watch import StoreWatch
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.sessions.books import SessionHead
from ripresa.cluster.sessions.said_feed import SaidAnswer
from ripresa.cluster.sessions.store import LocalSessionStore, StoreStats
from ripresa.workers.errors import RipresaError, Unreachable

HEAD = SessionHead("model", "", b"head", idle_ttl_s=60.0)


class RestartedStore(LocalSessionStore):
    """A store that tells how often it was asked, and may be out of reach."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        super().__init__(max_bytes)
        self.asked = asyncio.Event()
        self.is_lost = False

    async def stats(self) -> StoreStats:
        self.asked.set()
        if self.is_lost:
            raise Unreachable("no store")
        return await super().stats()


async def test_what_is_open_and_what_has_ended_is_told() -> None:
    metrics, store = GatewayMetrics(), RestartedStore(3 * HEAD.num_bytes)
    watch = StoreWatch(store, metrics)
    for name in "abcd":
        await store.open(("", name), HEAD)
    await store.close(("", "d"))
    await store.share("gateway", [SaidAnswer(b"key", b"1234")])
    await watch.refresh()
    told = metrics.render().decode()
    assert "ripresa_sessions_open 2.0" in told
    assert f"ripresa_session_bytes {2.0 * HEAD.num_bytes}" in told
    assert "ripresa_said_tokens 65.0" in told
    assert 'ripresa_sessions_ended_total{reason="evicted"} 1.0' in told
    assert 'ripresa_sessions_ended_total{reason="closed"} 1.0' in told
    assert 'ripresa_sessions_ended_total{reason="expired"} 0.0' in told
    store.__init__(1 << 20)  # type: ignore[misc]
    await watch.refresh()
    await store.open(("", "e"), SessionHead("model", "", b"head", idle_ttl_s=0.0))
    await watch.refresh()
    told = metrics.render().decode()
    assert "ripresa_sessions_open 0.0" in told
    assert 'ripresa_sessions_ended_total{reason="evicted"} 1.0' in told
    assert 'ripresa_sessions_ended_total{reason="expired"} 1.0' in told


async def test_a_lost_store_is_asked_again() -> None:
    store = RestartedStore()
    store.is_lost = True
    watch = StoreWatch(store, GatewayMetrics(), interval_s=0)
    with pytest.raises(RipresaError):
        await watch.refresh()
    await watch.start()
    for _ in range(3):
        store.asked.clear()
        await asyncio.wait_for(store.asked.wait(), 10)
    await watch.stop()
