"""How many lookups a second does the prefix directory answer, in process and as a Ray actor?

    python tests/bench/directory.py [--repeats 5] [--workers 8] [--no-actor]

Prompts are those of the Mooncake conversation trace, 512-token blocks as recorded, each published
by one of the workers and half of them by a second one; without the trace a made-up one of the same
size. In process: requests looked up one after another on one core, and one prompt of 8,192 blocks:
its lookup, the lookup with the route's plan over all workers, and hashing its tokens. CPU time.
Actor: calls of one caller in sequence and of 32 at once, by the clock. Medians. Targets in process:
30,000 lookups/s, 3 ms for lookup and plan, 12 us of hashing a block.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ripresa.cluster.directory.client import DirectoryActors
from ripresa.cluster.directory.events import Accepted, HeldKind, SendAll, Tier
from ripresa.cluster.directory.index import DirectorySettings, PrefixIndex
from ripresa.cluster.directory.outbox import Item, Outbox
from ripresa.cluster.directory.prefix_directory import start_directory
from ripresa.cluster.routing.planner import RouteQuery, plan_route
from ripresa.cluster.routing.worker_load import PlannerSettings, WorkerLoad
from ripresa.workers.address import WorkerAddress, WorkerKind
from ripresa.workers.cache.block_hash import BlockIdentity, hash_blocks, worker_context
from ripresa.workers.cache.cache_events import Origin
from ripresa.workers.replay import ReplayMode
from ripresa.workers.replay_query import ReplayGeometry

TARGET = 30_000
TARGET_PLAN_MS = 3.0
TARGET_HASH_US = 12.0
WINDOW = 128
LONG_PROMPT = 8_192
REPOSITORY = Path(__file__).resolve().parents[2]

Prompts = list[list[bytes]]


def block_hash(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def trace_prompts() -> tuple[str, Prompts]:
    """The trace's prompts as lists of block hashes, and what they are."""
    shared = Path(os.environ.get("RIPRESA_SHARED", REPOSITORY.parent / "shared"))
    path = shared / "traces" / "mooncake_conversation.jsonl.gz"
    if path.is_file():
        with gzip.open(path, "rt") as lines:
            rows = [json.loads(line)["hash_ids"] for line in lines]
        hashes = {number: block_hash(number) for row in rows for number in row}
        return "mooncake_conversation", [[hashes[number] for number in row] for row in rows]
    rng = random.Random(0)
    shared_blocks = [[block_hash("shared", s, i) for i in range(24)] for s in range(2_000)]
    prompts = [
        rng.choice(shared_blocks)[: rng.randint(1, 24)]
        + [block_hash("own", n, i) for i in range(rng.randint(1, 30))]
        for n in range(12_000)
    ]
    return "made up (no trace found)", prompts


def fill(index: PrefixIndex, prompts: Prompts, num_workers: int, name: str = "worker") -> int:
    """Let workers publish all prompts; how many reports it took."""
    rng = random.Random(1)
    outboxes = [Outbox(f"{name}-{n}", 1) for n in range(num_workers)]
    for prompt in prompts:
        for outbox in rng.sample(outboxes, rng.choice((1, 2)) if num_workers > 1 else 1):
            parent = None
            for one in prompt:
                item = Item(HeldKind.BLOCK, BlockIdentity(one, ()), Tier.DEVICE)
                if item not in outbox:
                    outbox.hold(item, Origin("bench", prompt[0], parent))
                parent = one
    num_reports = 0
    for outbox in outboxes:
        while True:
            reply = index.report(outbox.next_report(), 0.0)
            assert isinstance(reply, Accepted | SendAll)
            outbox.take(reply)
            num_reports += 1
            if isinstance(reply, Accepted) and not outbox.has_changes:
                break
    return num_reports


def seconds(call: Callable[[], object]) -> float:
    """CPU time of this process, so that others on the machine do not count."""
    began = time.process_time()
    call()
    return time.process_time() - began


@dataclass(frozen=True)
class InProcess:
    lookups_per_s: float
    claims_per_s: float
    long_ms: float
    plan_ms: float
    hash_us: float


def measure_index(prompts: Prompts, num_workers: int, repeats: int) -> InProcess:
    settings = DirectorySettings(window=WINDOW)
    tracemalloc.start()
    probe = PrefixIndex(settings, "memory")
    # Only what the directory itself keeps: outboxes and prompts are not part of it.
    sample = prompts[: len(prompts) // 4]
    before = tracemalloc.take_snapshot()
    fill(probe, sample, num_workers)
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    own = sum(
        stat.size_diff
        for stat in after.compare_to(before, "filename")
        if Path(stat.traceback[0].filename).name in ("prefix_memory.py", "holdings.py", "index.py")
    )
    index = PrefixIndex(settings, "bench")
    reports = 0

    def load() -> None:
        nonlocal reports
        reports = fill(index, prompts, num_workers)

    filled = seconds(load)
    blocks = len(index)
    print(
        f"held         {blocks:,} blocks by {num_workers} workers, told in {reports:,} reports "
        f"({filled:.2f} s, outboxes included)"
    )
    print(f"memory       {own / len(probe):.0f} bytes a block, hashes (49 bytes) not counted")

    def look_up_all() -> None:
        for prompt in prompts:
            index.lookup(prompt, 0.0)

    def claim_all() -> None:
        for number, prompt in enumerate(prompts):
            index.lookup_or_claim(prompt, str(number), 0.0)

    lookups = [seconds(look_up_all) for _ in range(repeats)]
    claims = [seconds(claim_all) for _ in range(repeats)]
    long_prompt = [block_hash("long", i) for i in range(LONG_PROMPT)]
    fill(index, [long_prompt], num_workers, "long")
    assert index.lookup(long_prompt, 0.0).stretches[-1].stop == LONG_PROMPT
    long_lookups = [seconds(lambda: index.lookup(long_prompt, 0.0)) for _ in range(50)]
    plans = [seconds(lambda: plan_long(index, long_prompt, num_workers)) for _ in range(50)]
    tokens = random.Random(2).choices(range(129_280), k=LONG_PROMPT * WINDOW)
    context = worker_context(b"bench", WINDOW, b"salt")
    hashed = [seconds(lambda: hash_blocks(context, tokens)) for _ in range(5)]
    return InProcess(
        len(prompts) / statistics.median(lookups),
        len(prompts) / statistics.median(claims),
        statistics.median(long_lookups) * 1e3,
        statistics.median(plans) * 1e3,
        statistics.median(hashed) * 1e6 / LONG_PROMPT,
    )


def plan_long(index: PrefixIndex, hashes: list[bytes], num_workers: int) -> None:
    """What a gateway does for a prompt that is hashed: ask, and place it on one of the workers
    that hold it or on one of as many encoders."""
    answer = index.lookup_or_claim(hashes, "long", 0.0)
    loads = [
        WorkerLoad(WorkerAddress(f"long-{n}", WorkerKind.DECODE)) for n in range(num_workers)
    ] + [WorkerLoad(WorkerAddress(f"e{n}", WorkerKind.ENCODER)) for n in range(num_workers)]
    geometry = ReplayGeometry(WINDOW, 6, 20, 20)
    query = RouteQuery(geometry, len(hashes) * WINDOW + 200, hashes, lookup=answer.lookup)
    plan = plan_route(query, loads, PlannerSettings())
    assert plan.chosen.hit.num_blocks == len(hashes)


async def measure_actor(prompts: Sequence[list[bytes]], num_workers: int) -> None:
    def connect() -> list[object]:
        lasting = DirectorySettings(window=WINDOW, lease_s=600, late_s=500)
        return start_directory(lasting, is_detached=False)

    actors = DirectoryActors(await asyncio.to_thread(connect), connect)
    outbox = Outbox("worker-0", 1)
    for prompt in prompts[:2_000]:
        parent = None
        for one in prompt:
            item = Item(HeldKind.BLOCK, BlockIdentity(one, ()), Tier.DEVICE)
            outbox.hold(item, Origin("bench", prompt[0], parent))
            parent = one
    send = actors.send_to(0)
    while True:
        reply = await send(outbox.next_report())
        outbox.take(reply)
        if isinstance(reply, Accepted) and not outbox.has_changes:
            break

    async def ask(number: int, prompt: list[bytes]) -> float:
        began = time.perf_counter()
        await actors.call(0, "lookup_or_claim", prompt, str(number), ReplayMode.BOUNDED, None, None)
        return time.perf_counter() - began

    asked = prompts[:1_000]
    one_by_one = [await ask(number, prompt) for number, prompt in enumerate(asked)]
    rows = sorted(one_by_one)
    print(
        f"actor, 1     {len(rows) / sum(rows):,.0f} calls/s; p50 {rows[len(rows) // 2] * 1e3:.2f} "
        f"ms, p99 {rows[len(rows) * 99 // 100] * 1e3:.2f} ms"
    )
    gate = asyncio.Semaphore(32)

    async def gated(number: int, prompt: list[bytes]) -> float:
        async with gate:
            return await ask(number, prompt)

    began = time.perf_counter()
    rows = sorted(await asyncio.gather(*(gated(n, p) for n, p in enumerate(prompts[:3_000]))))
    took = time.perf_counter() - began
    print(
        f"actor, 32    {len(rows) / took:,.0f} calls/s; p50 {rows[len(rows) // 2] * 1e3:.2f} ms, "
        f"p99 {rows[len(rows) * 99 // 100] * 1e3:.2f} ms"
    )


def commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="passes over the trace")
    parser.add_argument("--workers", type=int, default=8, help="workers that hold the blocks")
    parser.add_argument("--no-actor", action="store_true", help="leave Ray out")
    options = parser.parse_args()
    name, prompts = trace_prompts()
    print(f"machine      {os.cpu_count()} x {platform.machine()}, {platform.platform()}")
    print(f"versions     python {platform.python_version()}")
    print(f"commit       {commit()}")
    print(f"command      python {' '.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])}")
    mean = statistics.mean(len(prompt) for prompt in prompts)
    print(f"trace        {name}: {len(prompts):,} requests, {mean:.1f} blocks each on average")
    found = measure_index(prompts, options.workers, options.repeats)
    print(f"lookups      {found.lookups_per_s:,.0f}/s (target {TARGET:,})")
    print(f"with claims  {found.claims_per_s:,.0f}/s")
    print(f"long prompt  {found.long_ms:.2f} ms for {LONG_PROMPT:,} blocks")
    print(f"and its plan {found.plan_ms:.2f} ms (target {TARGET_PLAN_MS:g})")
    print(f"hashing      {found.hash_us:.1f} us a block (target {TARGET_HASH_US:g})")
    if not options.no_actor:
        import ray

        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            logging_level="error",
        )
        try:
            asyncio.run(measure_actor(prompts, options.workers))
        finally:
            ray.shutdown()
    is_met = (
        found.lookups_per_s >= TARGET
        and found.plan_ms <= TARGET_PLAN_MS
        and found.hash_us <= TARGET_HASH_US
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
