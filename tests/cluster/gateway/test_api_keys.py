"""Is the key file read strictly, without telling what is in it, and read again when it changes?"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ripresa.cluster.gateway.api_keys import (
    MAX_TENANTS,
    KeyFile,
    Tenant,
    Tenants,
    api_key,
    key_digest,
    new_key,
    read_tenants,
)
from ripresa.cluster.gateway.status import RequestError
from ripresa.workers.errors import ConfigError, ErrorCode

ONE, TWO = key_digest("one"), key_digest("two")


def test_tenants_and_their_limits() -> None:
    tenants = read_tenants(
        f"tenants:\n  acme:\n    keys: ['{ONE}', '{TWO}']\n    max_running: 2\n    models: [m]\n"
        f"    tokens_per_minute: 90\n  b-2.x:\n    keys: ['{key_digest('three')}']\n",
        "keys.yaml",
    )
    assert tenants.by_name["acme"] == Tenant((ONE, TWO), 2, 90, ("m",))
    assert tenants.by_name["b-2.x"] == Tenant((key_digest("three"),))
    assert [tenants.owner(key) for key in ("one", "two", "three", "four", "", "öne", "\udcff")] == [
        "acme",
        "acme",
        "b-2.x",
        *[None] * 4,
    ]


SECRET = "rk-plain-secret"
MALFORMED = {
    "empty": ("", "keys.yaml: tenants", "at least one"),
    "no mapping": ("tenants: [a]", "keys.yaml: tenants", "at least one"),
    "something else": (f"tenants: {{a: {{keys: ['{ONE}']}}}}\nkeys: 1", "keys.yaml", "only"),
    "no YAML": (f"tenants:\n  a: [{SECRET}", "keys.yaml, line", "not valid YAML"),
    "twice": (
        f"tenants:\n  a: {{keys: ['{ONE}']}}\n  a: {{keys: ['{TWO}']}}",
        "keys.yaml, line 3",
        "twice",
    ),
    "bad name": (f"tenants: {{'a b': {{keys: ['{ONE}']}}}}", "tenants.a b", "letters"),
    "long name": (f"tenants: {{{'a' * 65}: {{keys: ['{ONE}']}}}}", "tenants.aaa", "1 to 64"),
    "no keys": ("tenants: {a: {max_running: 1}}", "tenants.a.keys", "at least one"),
    "nothing": ("tenants: {a: }", "tenants.a.keys", "at least one"),
    "no list": (f"tenants: {{a: {{keys: {SECRET}}}}}", "tenants.a.keys", "as texts"),
    "a number": ("tenants: {a: {keys: [12345678]}}", "tenants.a.keys", "as texts"),
    "a plain key": (f"tenants: {{a: {{keys: [{SECRET}]}}}}", "tenants.a.keys[0]", "sha256:"),
    "shared key": (
        f"tenants: {{a: {{keys: ['{ONE}']}}, b: {{keys: ['{ONE}']}}}}",
        "tenants.b.keys[0]",
        "`a` too",
    ),
    "unknown limit": (
        f"tenants: {{a: {{keys: ['{ONE}'], max_runing: 1}}}}",
        "tenants.a.max_runing",
        "max_running",
    ),
    "no answers": (
        f"tenants: {{a: {{keys: ['{ONE}'], max_running: 0}}}}",
        "tenants.a.max_running",
        "at least 1",
    ),
    "models as text": (
        f"tenants: {{a: {{keys: ['{ONE}'], models: m}}}}",
        "tenants.a.models",
        "a list",
    ),
    "too many": (
        "tenants:\n"
        + "".join(f"  t{i}: {{keys: ['{key_digest(str(i))}']}}\n" for i in range(MAX_TENANTS + 1)),
        "keys.yaml: tenants",
        "at most",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_place(case: str) -> None:
    text, place, reason = MALFORMED[case]
    with pytest.raises(ConfigError) as refused:
        read_tenants(text, "keys.yaml")
    assert place in str(refused.value)
    assert reason in str(refused.value)
    for secret in (SECRET, "12345678", ONE[10:30]):
        assert secret not in str(refused.value)


GOOD = f"tenants: {{a: {{keys: ['{ONE}'], max_running: 2}}}}"
# Typos that YAML's own conversions answer with all kinds of Python's errors.
TYPOS = (
    "2026-02-30",
    "2020-01-01T00:00:00+99:99",
    "!!int abc",
    "!!int ''",
    "!!bool maybe",
    "!!float abc",
    "!!timestamp soon",
    "!!binary é",
    "9" * 5000,
    "0x" + "f" * 5000,
    "1" * 400 + ":1:1.5",
    ".inf",
    "0b",
    '"\\UFFFFFFFF"',
    '"\\ud800"',
    "[" * 600,
    "[" * 600 + "]" * 600,
    "{a: " * 600,
    "&a [*a]",
    "*a",
    "!!set {a}",
    "!!omap [a]",
    "!!python/object/apply:os.getcwd []",
    "<<: [1]",
    "\0",
    "[&a [x, x], &b [*a, *a]," + ",".join(f"&c{i} [{'*b, ' * 99}]" for i in range(20)) + "]",
)
PLACES = (
    "{typo}",
    "tenants: {typo}",
    "tenants:\n  a: {typo}",
    "tenants:\n  a:\n    keys: {typo}",
    "tenants:\n  a:\n    keys: [{typo}]",
    "? {typo}\n: 1",
    *(
        f"tenants:\n  a:\n    keys: ['{ONE}']\n    {name}: {{typo}}"
        for name in ("max_running", "tokens_per_minute", "models", "expires")
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tenants", "a", "keys", "models", "max_running"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("place", PLACES)
def test_every_typo_is_told_as_one(place: str) -> None:
    for typo in TYPOS:
        with pytest.raises(ConfigError) as refused:
            read_tenants(place.replace("{typo}", typo), "keys.yaml")
        assert len(str(refused.value)) < 1000


@given(
    text=st.text(max_size=60)
    | st.text("tenats:akeys{}[]-?&*!<|>'\"#%@,\\\n 0123456789.xbe+~", max_size=60)
    | JSON.map(lambda tree: yaml.safe_dump({"tenants": tree}))
    | st.tuples(st.sampled_from(PLACES), st.text(max_size=20)).map(
        lambda made: made[0].replace("{typo}", made[1])
    )
)
@example(text=GOOD)
def test_any_text_is_read_or_refused_as_a_whole(text: str) -> None:
    try:
        read = read_tenants(text, "keys.yaml")
    except ConfigError:
        return
    assert all(tenant.keys for tenant in read.by_name.values())


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        (None, None, None),
        ("Bearer k", None, "k"),
        ("bearer  k ", "other", "k"),
        ("Basic k", None, None),
        ("Bearer ", "k", "k"),
        (None, "k", "k"),
        (None, "", None),
    ],
)
def test_where_a_key_stands(
    authorization: str | None, x_api_key: str | None, key: str | None
) -> None:
    assert api_key(authorization, x_api_key) == key


def test_new_keys_are_long_and_differ() -> None:
    keys = {new_key() for _ in range(50)}
    assert len(keys) == 50
    assert min(len(key) for key in keys) >= 43


def test_a_key_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyFile(tmp_path / "keys.yaml")


async def test_a_changed_file_counts_and_a_malformed_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants: {{a: {{keys: ['{ONE}']}}}}")
    keys = KeyFile(path)
    assert keys.authenticate("one") == "a"
    for key in ("two", None):
        with pytest.raises(RequestError) as refused:
            keys.authenticate(key)
        assert refused.value.code is ErrorCode.UNAUTHENTICATED
        assert refused.value.reason == "BAD_KEY"
        assert "two" not in str(refused.value)

    changes: asyncio.Queue[Tenants] = asyncio.Queue()
    await keys.start(changes.put_nowait, interval_s=0.01)
    try:
        path.write_text("tenants: [")
        with pytest.raises(ConfigError):
            keys.reload()
        assert keys.authenticate("one") == "a"
        path.write_text(f"tenants: {{b: {{keys: ['{TWO}']}}}}")
        async with asyncio.timeout(20):
            assert list((await changes.get()).by_name) == ["b"]
        assert keys.authenticate("two") == "b"
        with pytest.raises(RequestError):
            keys.authenticate("one")
        path.unlink()
        with pytest.raises(ConfigError):
            keys.reload()
        assert keys.authenticate("two") == "b"
    finally:
        await keys.stop()
    assert changes.empty()


class WatchedFile(KeyFile):
    """Notes when the file was refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.refused = threading.Event()

    def reload(self) -> bool:
        try:
            return super().reload()
        except Exception:
            self.refused.set()
            raise


@pytest.mark.parametrize("typo", [*(text.encode() for text in TYPOS), b"\xff", b""])
async def test_a_good_file_counts_after_a_bad_one(typo: bytes, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    keys = WatchedFile(path)
    changes: asyncio.Queue[Tenants] = asyncio.Queue()
    path.write_bytes(b"tenants: {a: {expires: " + typo)
    await keys.start(changes.put_nowait, interval_s=0.001)
    try:
        assert await asyncio.to_thread(keys.refused.wait, 20)
        assert keys.authenticate("one") == "a"
        path.write_text(f"tenants: {{a: {{keys: ['{TWO}']}}}}")
        async with asyncio.timeout(20):
            await changes.get()
        with pytest.raises(RequestError):
            keys.authenticate("one")
    finally:
        await keys.stop()


async def test_a_listener_that_fails_does_not_end_the_reloading(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(GOOD)
    keys = KeyFile(path)
    told: asyncio.Queue[Tenants] = asyncio.Queue()

    def listen(tenants: Tenants) -> None:
        told.put_nowait(tenants)
        raise RuntimeError("the listener failed")

    await keys.start(listen, interval_s=0.001)
    try:
        for name in "bc":
            path.write_text(GOOD.replace("a:", f"{name}:", 1))
            async with asyncio.timeout(20):
                assert list((await told.get()).by_name) == [name]
    finally:
        await keys.stop()
