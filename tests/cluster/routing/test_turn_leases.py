"""What does a gateway say of a worker that does not answer about a lease?"""

from __future__ import annotations

import asyncio

import pytest

from ripresa.cluster.routing import turn_leases
from ripresa.cluster.routing.turn_leases import TurnLeases


class SilentWorkers:
    """Decode workers that answer nothing."""

    async def lease(self, worker_id: str, request_id: str, tools: tuple[str, ...]) -> bool:
        return await asyncio.get_running_loop().create_future()

    async def end_session(self, worker_id: str, tenant_salt: bytes, session_id: str) -> None:
        await asyncio.get_running_loop().create_future()


async def test_why_a_worker_was_not_told_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turn_leases, "TIMEOUT_S", 0.0)
    leases = TurnLeases(SilentWorkers())
    leases.ended("request", "worker")
    leases.called("request", ["search"])
    await leases.drain()
    await leases.end_session(["worker"], b"", "session")
    assert "request request has no lease at worker: TimeoutError" in caplog.text
    assert "worker was not told that a session is closed: TimeoutError" in caplog.text
