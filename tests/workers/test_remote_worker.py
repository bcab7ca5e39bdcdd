"""Does every failure of a remote call become the right kind of error?"""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from ripresa.workers.errors import ConfigError, ErrorCode, RipresaError, Unreachable
from ripresa.workers.remote_worker import failures, require_target


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "remote traceback", cause)


@pytest.mark.parametrize(
    "wrap", [lambda e: e, task_error, lambda e: task_error(e).as_instanceof_cause()]
)
async def test_an_error_of_ours_arrives_unchanged(wrap: object) -> None:
    original = ConfigError("engine.num_blocks", "is too small")
    with pytest.raises(ConfigError) as caught:
        async with failures("worker w"):
            raise wrap(original)  # type: ignore[operator]
    assert caught.value is original


@pytest.mark.parametrize("instance", [False, True])
async def test_a_remote_mistake_is_internal_and_not_retried(instance: bool) -> None:
    error = task_error(KeyError("slot"))
    with pytest.raises(RipresaError, match="worker w failed") as caught:
        async with failures("worker w"):
            raise error.as_instanceof_cause() if instance else error
    assert caught.value.code is ErrorCode.INTERNAL
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("restarting", b"0" * 16),
        ConnectionResetError("gone"),
        RuntimeError("Unexpected error (StatusCode.UNKNOWN)"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_else_a_call_raises_means_a_lost_worker(error: BaseException) -> None:
    with pytest.raises(Unreachable, match="worker w") as caught:
        async with failures("worker w"):
            raise error
    # Clients are not told in Ray's words.
    assert not str(error) or str(error) not in str(caught.value)


async def test_an_own_cancel_stays_one() -> None:
    async def call() -> None:
        async with failures("worker w"):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_answer_in_time_is_a_lost_worker_too() -> None:
    with pytest.raises(Unreachable, match="did not answer in time") as caught:
        async with failures("worker w"), asyncio.timeout(0.01):
            await asyncio.Event().wait()
    assert caught.value.retry_after_s


async def test_an_own_timeout_stays_one() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), failures("worker w"):
            await asyncio.Event().wait()


def test_another_replica_refuses_the_call() -> None:
    require_target("a", "a")
    with pytest.raises(Unreachable, match="worker b is gone"):
        require_target("a", "b")


async def test_the_log_names_a_failure_that_has_no_words(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unreachable):
        async with failures("worker w"):
            raise ConnectionResetError
    assert "worker w is out of reach: ConnectionResetError" in caplog.text
