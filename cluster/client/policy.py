"""How does a channel find gateways, and what does it repeat by itself?"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence

from ripresa.cluster.client.errors import UnavailableError
from ripresa.workers.errors import InvalidArgument

TIMEOUT_S = 600.0
"""Deadline of a call that names none; nothing waits for ever."""
CONNECT_TIMEOUT_S = 15.0
"""Longest wait of a client's first call for a gateway."""
MAX_MESSAGE_BYTES = 64 << 20

MAX_ATTEMPTS = 5
"""Of one call: the first, and those that repeat what a restarting or full gateway answers."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _BACKOFF_FACTOR = 0.2, 2.0, 2.0

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "ripresa.v1.Inference"}, {"service": "ripresa.v1.Sessions"}],
            "waitForReady": True,
            # Before the first message of an answer only; requests carry their id, so that none
            # runs twice at once. The server answers with the pause it wants, or that none helps.
            "retryPolicy": {
                "maxAttempts": MAX_ATTEMPTS,
                "initialBackoff": f"{_FIRST_BACKOFF_S}s",
                "maxBackoff": f"{_MAX_BACKOFF_S}s",
                "backoffMultiplier": _BACKOFF_FACTOR,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
"""The client policy: wait for a connection, and retry what a restarting or full gateway answers."""

CHANNEL_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Notices within 40 s that a gateway's machine is gone.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def backoff_s(attempt: int) -> float:
    """The pause behind an attempt, 1 for the first, of which the server asks for no longer one."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * _BACKOFF_FACTOR ** (attempt - 1))


def target_of(addresses: Sequence[str]) -> str:
    """The gRPC target of some gateways; a channel moves to another one when its own is gone.

    Args:
        addresses: `host:port` each. One may be a name, and then stands for all machines that DNS
            has for it; several must be IP addresses.

    Raises:
        InvalidArgument: they are none.
    """
    if not addresses:
        raise InvalidArgument("addresses", "name a gateway as host:port")
    if len(addresses) == 1:
        return addresses[0]
    versions = {_version(address) for address in addresses}
    if versions not in ({4}, {6}):
        raise InvalidArgument(
            "addresses",
            "several must all be IPv4 or all be IPv6 addresses; give machines that have names "
            "one name in DNS, and that one here",
        )
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries beside its request."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def nobody_answers(addresses: Sequence[str]) -> UnavailableError:
    """The error of a connection that was not made."""
    return UnavailableError(
        f"no gateway answers at {', '.join(addresses)}; start one with `ripresa serve`, "
        "or name another with --address",
        reason="NO_GATEWAY",
    )


def _version(address: str) -> int | None:
    """The IP version of a `host:port`; None for a name."""
    host = address.rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        return None
