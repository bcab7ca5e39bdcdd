"""Whose request is this, and what is he allowed? The file of API keys.

    tenants:
      acme:
        keys: ["sha256:<64 hex digits>"]    # of the key that `ripresa admin new-key` made
        max_running: 8                      # optional limits, see `Tenant`
        tokens_per_minute: 200000
        models: [deepseek-v4.1-demo]

The file holds digests alone; keys are random and long, so that a plain digest is as good as a slow
one. Neither is logged or told in an error.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from ripresa.cluster.config_tree import build, read_yaml, setting
from ripresa.cluster.gateway.status import RequestError
from ripresa.workers.errors import ConfigError, ErrorCode

log = logging.getLogger(__name__)

MAX_TENANTS = 1000
"""Each tenant is a label value of several series."""
MAX_LIMIT = 10**12
RELOAD_INTERVAL_S = 5.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant may do; each gateway applies the limits by itself.

    Attributes:
        keys: `key_digest` of each of his keys.
        max_running: most choices under way at once; null for no limit of his own.
        tokens_per_minute: computed prompt tokens and generated tokens; null for no limit.
        models: the models that he may use; empty for all.
    """

    keys: tuple[str, ...] = ()
    max_running: int | None = setting(None, at_least=1, at_most=MAX_LIMIT)
    tokens_per_minute: int | None = setting(None, at_least=1, at_most=MAX_LIMIT)
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants by name."""

    by_name: Mapping[str, Tenant] = field(default_factory=dict)

    def owner(self, key: str) -> str | None:
        """The name of the tenant whose key it is. Takes the same time for every wrong key."""
        digest = key_digest(key).encode()
        owner = None
        for name, tenant in self.by_name.items():
            for known in tenant.keys:
                if hmac.compare_digest(digest, known.encode()):
                    owner = name
        return owner


def key_digest(key: str) -> str:
    """How a key stands in the file."""
    return "sha256:" + sha256(key.encode("utf-8", errors="surrogateescape")).hexdigest()


def api_key(authorization: str | None, x_api_key: str | None = None) -> str | None:
    """The key of a call, from the headers in which OpenAI's and Anthropic's clients send it."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return x_api_key or None


def new_key() -> str:
    """A random key."""
    return "rk-" + secrets.token_urlsafe(32)


def read_tenants(text: str, source: str) -> Tenants:
    """The tenants of a key file's text.

    Raises:
        ConfigError: it is malformed; `field` is the place, and no key or digest is in the message.
    """
    try:
        document = read_yaml(text, source)
    except ConfigError as error:
        # The parser's own words quote the file.
        mark = getattr(error.__cause__, "problem_mark", None)
        where = source if mark is None else f"{source}, line {mark.line + 1}"
        raise ConfigError(where, "is not valid YAML, or names something twice") from None
    unknown = document.keys() - {"tenants"}
    if unknown:
        raise ConfigError(source, f"holds only `tenants`, not `{sorted(unknown)[0]}`")
    listed = document.get("tenants")
    if not isinstance(listed, Mapping) or not listed:
        raise ConfigError(f"{source}: tenants", "must name at least one tenant")
    if len(listed) > MAX_TENANTS:
        raise ConfigError(f"{source}: tenants", f"may be at most {MAX_TENANTS}, are {len(listed)}")
    by_name: dict[str, Tenant] = {}
    owners: dict[str, str] = {}
    for name, node in listed.items():
        where = f"{source}: tenants.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                where, "a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores"
            )
        keys = node.get("keys") if isinstance(node, Mapping) else None
        if not isinstance(keys, list) or not keys or not all(type(key) is str for key in keys):
            raise ConfigError(f"{where}.keys", "must list at least one key's digest, as texts")
        tenant = build(Tenant, node, where)
        for number, digest in enumerate(tenant.keys):
            place = f"{where}.keys[{number}]"
            if not _DIGEST.fullmatch(digest):
                raise ConfigError(
                    place,
                    "must be `sha256:` and 64 hex digits; `ripresa admin new-key` makes a key and "
                    "prints its digest",
                )
            if digest in owners:
                raise ConfigError(place, f"stands under `{owners[digest]}` too")
            owners[digest] = name
        by_name[name] = tenant
    return Tenants(by_name)


class KeyFile:
    """A key file that may change while it is used.

    Args:
        path: the file; read at once.

    Attributes:
        tenants: what was last read well.

    Raises:
        ConfigError: it cannot be read or is malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = _read(path)
        self.tenants = read_tenants(self._text, path.name)
        self._task: asyncio.Task[None] | None = None

    def authenticate(self, key: str | None) -> str:
        """The tenant whose key it is.

        Raises:
            RequestError: UNAUTHENTICATED; there is no key, or it is nobody's.
        """
        owner = None if key is None else self.tenants.owner(key)
        if owner is None:
            what = "this server needs an API key" if key is None else "the API key is not known"
            raise RequestError(
                ErrorCode.UNAUTHENTICATED,
                "BAD_KEY",
                f"{what}; send yours as `authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        return owner

    def reload(self) -> bool:
        """Read the file again; whether it has changed.

        Raises:
            ConfigError: it cannot be read or is malformed; what was read before still counts.
        """
        text = _read(self._path)
        if text == self._text:
            return False
        self.tenants = read_tenants(text, self._path.name)
        self._text = text
        return True

    async def start(
        self, on_change: Callable[[Tenants], None], interval_s: float = RELOAD_INTERVAL_S
    ) -> None:
        """Look for changes from now on."""
        self._task = asyncio.create_task(self._watch(on_change, interval_s), name="api-keys")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self, on_change: Callable[[Tenants], None], interval_s: float) -> None:
        told = ""
        while True:
            await asyncio.sleep(interval_s)
            try:
                if await asyncio.to_thread(self.reload):
                    log.info("the API keys were read again")
                    on_change(self.tenants)
                told = ""
            except ConfigError as error:
                if str(error) != told:
                    log.error("the API keys stay as they were: %s", error)
                told = str(error)
            except Exception:
                # Without this task a key that is taken out of the file would count for ever.
                log.exception("the API keys stay as they were")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(str(path), f"cannot be read: {reason}") from error
