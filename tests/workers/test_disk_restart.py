"""What does a worker find on disk after a restart, and does it ever change an answer?"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hash_machine import WINDOW, HashMachine, reference_stream
from hash_requests import ask, prompt, recipe_of
from split_cluster import CONFIG, Stream, assert_idle, collect, split_cluster

from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.cache.block_store import StoredBlock, StoreStats
from ripresa.workers.config import DiskConfig, EngineConfig, WindowConfig, WindowPolicy
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import RipresaError
from ripresa.workers.replay import PlanKind, ReplayMode
from ripresa.workers.request import Bringing, CacheUse, GenerationRequest, Reserved

MAX_LEN = 900


def with_disk(folder: Path, **disk: object) -> EngineConfig:
    return replace(CONFIG, disk=DiskConfig(str(folder / "blocks"), **disk))  # type: ignore[arg-type]


@asynccontextmanager
async def life(
    config: EngineConfig, num_blocks: int = 1024
) -> AsyncIterator[tuple[DecodeEngine, HashMachine]]:
    """A decode worker from its start to its end; all that it published is on disk then."""
    machine = HashMachine(num_blocks, max_model_len=MAX_LEN)
    engine = DecodeEngine("d0", machine, config)
    await engine.start()
    yield engine, machine
    await engine.flush_disk()
    assert_idle(engine, machine)
    await engine.stop()


def stats(engine: DecodeEngine) -> StoreStats:
    found = engine.stats().disk
    assert found is not None
    return found


async def answered(engine: DecodeEngine, request: GenerationRequest) -> Stream:
    """A stream that the definition agrees with."""
    stream = await collect(engine, request)
    stream.assert_equals(reference_stream(request, MAX_LEN, recipe_of(stream)))
    return stream


async def test_a_worker_with_a_disk_says_at_once_that_it_lives(tmp_path: Path) -> None:
    """However slow the disk is: a gateway that hears nothing takes the worker for lost."""
    async with life(with_disk(tmp_path)) as (engine, _):
        request = ask(prompt(1, 30), max_tokens=3)
        first = await anext(engine.generate(request, local=True))
        assert isinstance(first, Bringing)
        assert isinstance((await collect(engine, request)).events[0], Bringing)
        blind = replace(request, cache=CacheUse(reads=False))
        assert isinstance((await collect(engine, blind)).events[0], Reserved)


@dataclass
class Loops:
    """Tool loops, turn by turn in between each other."""

    histories: list[tuple[int, ...]] = field(
        default_factory=lambda: [prompt(100 + number, 30 + 11 * number) for number in range(6)]
    )
    num_turns: int = 0

    async def go_on(self, engine: DecodeEngine, num_turns: int) -> int:
        """The next turns; how many prompt tokens were found cached."""
        found = 0
        for _ in range(num_turns):
            for number, tokens in enumerate(self.histories):
                stream = await answered(engine, ask(tokens, max_tokens=9))
                found += recipe_of(stream).start
                new = prompt(1000 * self.num_turns + number, 7 + self.num_turns)
                self.histories[number] = tokens + stream.tokens + new
            self.num_turns += 1
        return found


async def test_a_restart_keeps_95_percent_of_the_hits(tmp_path: Path) -> None:
    loops = Loops()
    async with life(CONFIG) as (engine, _):
        await loops.go_on(engine, 4)
        undisturbed = await loops.go_on(engine, 2)
    restarted: dict[str, int] = {}
    for name, config in (("disk", with_disk(tmp_path)), ("none", CONFIG)):
        loops = Loops()
        async with life(config) as (engine, _):
            await loops.go_on(engine, 4)
        async with life(config) as (engine, _):
            restarted[name] = await loops.go_on(engine, 2)
            if name == "disk":
                assert stats(engine).hits > 60
                assert (stats(engine).bad, stats(engine).dropped) == (0, 0)
    print(
        f"cached tokens after a restart: {restarted['disk']} with a disk, {restarted['none']} "
        f"without, {undisturbed} without a restart"
    )
    assert restarted["none"] < 0.7 * undisturbed
    assert restarted["disk"] >= 0.95 * undisturbed


async def test_what_memory_evicts_comes_back(tmp_path: Path) -> None:
    async with life(with_disk(tmp_path), num_blocks=24) as (engine, _):
        small = await Loops().go_on(engine, 6)
    async with life(CONFIG, num_blocks=24) as (engine, _):
        without = await Loops().go_on(engine, 6)
    async with life(CONFIG) as (engine, _):
        large = await Loops().go_on(engine, 6)
    assert without < small
    assert small >= 0.95 * large


async def test_workers_of_a_machine_share_what_they_keep(tmp_path: Path) -> None:
    tokens = prompt(1, 60)
    config = with_disk(tmp_path)
    async with life(config) as (first, _), life(config) as (second, _):
        await answered(first, ask(tokens))
        await first.flush_disk()
        stream = await answered(second, ask(tokens))
        assert recipe_of(stream).write_floor == 48
        assert stats(second).hits == 6


async def test_a_hand_over_goes_on_from_both_disks(tmp_path: Path) -> None:
    tokens = prompt(1, 60)
    async with split_cluster(config=with_disk(tmp_path)) as cluster:
        cold = await cluster.collect(ask(tokens))
        for engine in (cluster.encoder, *cluster.decoders.values()):
            await engine.flush_disk()
    async with split_cluster(config=with_disk(tmp_path)) as cluster:
        warm = await cluster.collect(ask(tokens))
        warm.assert_equals(reference_stream(ask(tokens), recipe=recipe_of(warm)))
        assert recipe_of(warm).write_floor == 48
        assert warm.finished.counters.encoder_rows == 0
        sent = [stream.finished.counters.transfer_bytes for stream in (cold, warm)]
        assert sent[0] - sent[1] == 6 * cluster.encoder_machine.block_bytes(1)
        for engine in (cluster.encoder, *cluster.decoders.values()):
            await engine.flush_disk()


@pytest.mark.parametrize(
    "other",
    [
        ask(prompt(1, 60), salt=b"another tenant"),
        ask(prompt(1, 60), cache=CacheUse(reads=False)),
        ask((prompt(1, 60)[0] ^ 1, *prompt(1, 60)[1:])),
    ],
    ids=["another tenant", "no reads", "another token"],
)
async def test_what_is_not_found(tmp_path: Path, other: GenerationRequest) -> None:
    config = with_disk(tmp_path)
    async with life(config) as (engine, _):
        await answered(engine, ask(prompt(1, 60)))
    async with life(config) as (engine, _):
        stream = await answered(engine, other)
        assert recipe_of(stream).kind is PlanKind.COLD
        assert stats(engine).hits == 0


async def test_a_request_that_leaves_nothing_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async with life(with_disk(tmp_path)) as (engine, _):
        await answered(engine, ask(prompt(1, 60), cache=CacheUse(writes=False)))
        await engine.flush_disk()
        assert stats(engine).written == 0


async def test_another_models_blocks_are_not_found(tmp_path: Path) -> None:
    config = with_disk(tmp_path)
    async with life(config) as (engine, _):
        await answered(engine, ask(prompt(1, 60)))

    machine = HashMachine(64, max_model_len=MAX_LEN)
    machine.layout_digest = b"another layout.."
    engine = DecodeEngine("d0", machine, config)
    await engine.start()
    assert recipe_of(await answered(engine, ask(prompt(1, 60)))).kind is PlanKind.COLD
    await engine.stop()
    async with life(config) as (engine, _):
        assert recipe_of(await answered(engine, ask(prompt(1, 60)))).write_floor == 48


async def test_lineages_come_back_with_their_restarts(tmp_path: Path) -> None:
    config = with_disk(tmp_path)
    tokens = prompt(1, 40)
    async with life(config) as (engine, _):
        first = await answered(engine, ask(tokens))
        longer = tokens + first.tokens + prompt(2, 60)
        replayed = recipe_of(await answered(engine, ask(longer)))
        assert replayed.restarts
    more = longer + prompt(3, 30)
    async with life(config) as (engine, _):
        recipe = recipe_of(await answered(engine, ask(more)))
        assert recipe.restarts[: len(replayed.restarts)] == replayed.restarts
        assert recipe.start > len(tokens)
        exact = ask(more, request_id="e", cache=CacheUse(ReplayMode.EXACT))
        assert recipe_of(await answered(engine, exact)).restarts == ()


async def test_a_stream_is_taken_over_by_its_recipe(tmp_path: Path) -> None:
    """Blocks of another lineage count as missing, on disk as well."""
    config = with_disk(tmp_path)
    tokens = prompt(1, 120)
    async with life(config) as (engine, _):
        await answered(engine, ask(tokens[:40]))
        request = ask(tokens)
        whole = await answered(engine, request)
        recipe = recipe_of(whole)
        assert recipe.restarts
    async with life(with_disk(tmp_path / "other")) as (engine, _):
        await answered(engine, ask(tokens))
        again = replace(request, recipe=recipe, generation=1, token_ids=tokens + whole.tokens[:3])
        stream = await collect(engine, again)
        assert stream.tokens == whole.tokens[3:]
    async with life(config) as (engine, _):
        stream = await collect(engine, again)
        assert stream.tokens == whole.tokens[3:]
        assert stats(engine).hits > 0


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
async def test_damaged_blocks_are_computed_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    config = with_disk(tmp_path)
    tokens = prompt(1, 100)
    async with life(config) as (engine, _):
        await answered(engine, ask(tokens))
    files = sorted((tmp_path / "blocks").glob("*/*/*.kv"))
    assert len(files) == 13
    for path in files[::2]:
        damage(path)
    async with life(config) as (engine, _):
        await answered(engine, ask(tokens))
        await answered(engine, ask(tokens[:50], request_id="s"))
        found = stats(engine)
        assert found.bad <= 7
        assert (found.bad == 0) is (damage is Path.unlink)
    async with life(config) as (engine, _):
        assert recipe_of(await answered(engine, ask(tokens))).write_floor == 88


async def test_a_full_disk_changes_nothing_but_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with life(with_disk(tmp_path)) as (engine, _):
        disk = engine._core._disk
        assert disk is not None
        monkeypatch.setattr(disk._store, "_write", full)
        found = await Loops().go_on(engine, 3)
        await engine.flush_disk()
        assert stats(engine).written == 0
        assert stats(engine).dropped > 10
        assert 1 <= stats(engine).failures <= 3
    async with life(CONFIG) as (engine, _):
        assert await Loops().go_on(engine, 3) == found
    assert list((tmp_path / "blocks").glob("*/*/*.kv")) == []


async def test_a_disk_that_hangs_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even that of a request which reads no cache."""
    go_on = threading.Event()
    async with life(with_disk(tmp_path)) as (engine, _):
        disk = engine._core._disk
        assert disk is not None
        contains = disk._store.contains

        def hangs(identity: BlockIdentity) -> bool:
            go_on.wait(60)
            return contains(identity)

        monkeypatch.setattr(disk._store, "contains", hangs)
        monkeypatch.setattr(disk, "_read_timeout_s", 0.05)
        try:
            async with asyncio.timeout(30):
                for seed in range(3):
                    request = ask(prompt(seed, 60), max_tokens=20)
                    await answered(engine, replace(request, cache=CacheUse(reads=False)))
            assert stats(engine).written == 0
        finally:
            go_on.set()


@pytest.mark.parametrize("how", ["aborted", "closed", "overdue"])
async def test_a_request_that_ends_while_a_disk_is_read_leaves_nothing(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_disk(tmp_path)
    async with life(config) as (engine, _):
        await answered(engine, ask(prompt(1, 60)))
    began, go_on = threading.Event(), threading.Event()
    async with life(config) as (engine, _):
        disk = engine._core._disk
        assert disk is not None
        get = disk._store.get

        def slow(identity: BlockIdentity) -> StoredBlock | None:
            began.set()
            assert go_on.wait(30)
            return get(identity)

        monkeypatch.setattr(disk._store, "get", slow)
        deadline = time.time() + 0.2 if how == "overdue" else None
        request = replace(ask(prompt(1, 60)), deadline=deadline)
        task = asyncio.create_task(collect(engine, request))
        await asyncio.to_thread(began.wait, 30)
        if how == "aborted":
            assert engine.abort("r")
        if how == "closed":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "closed" else RipresaError):
            await task
        engine.check_integrity()
        go_on.set()
        stream = await answered(engine, ask(prompt(1, 60), request_id="next"))
        assert recipe_of(stream).write_floor == 48


async def test_windows_are_never_on_disk(tmp_path: Path) -> None:
    config = replace(with_disk(tmp_path), windows=WindowConfig(WindowPolicy.FULL))
    tokens = prompt(1, 64)
    async with life(config) as (engine, _):
        await answered(engine, ask(tokens))
        warm = recipe_of(await answered(engine, ask(tokens, request_id="w")))
        assert warm.kind is PlanKind.WINDOW
        await engine.flush_disk()
    files = list((tmp_path / "blocks").glob("*/*/*"))
    # Eight blocks of the prompt; the generated tokens fill none.
    assert len(files) == 64 // WINDOW
    async with life(config) as (engine, _):
        assert recipe_of(await answered(engine, ask(tokens))).kind is PlanKind.BOUNDED
