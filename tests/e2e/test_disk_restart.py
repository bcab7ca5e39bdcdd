"""Do killed workers find on disk what they held, and does an answer from there come out again?"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from noise_checkpoint import noise_checkpoint
from served_cluster import ServedCluster, eventually, kill_processes

from ripresa.cluster.client import Client
from ripresa.cluster.gateway.recording import recording_of
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import Numerics
from ripresa.workers.recording import Recording
from ripresa.workers.reproduce import check_comparable, load_for, reproduce

WINDOW, REWIND = 128, 6
NUM_NEW = 150
NUM_SESSIONS = 3


def words(seed: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(f"disk {seed}").choices(range(10, 4000), k=count))


def ask(cluster: ServedCluster, tokens: tuple[int, ...]) -> Recording:
    return asked(cluster, tokens)[0]


def asked(cluster: ServedCluster, tokens: tuple[int, ...]) -> tuple[Recording, pb.CacheProvenance]:
    with Client(cluster.address, timeout_s=600) as client:
        stream = client.generate(
            tokens, return_token_ids=True, max_tokens=6, temperature=0.0, ignore_eos=True
        )
        answer = stream.answer()
        recording = recording_of(stream.request, answer)
        assert answer.completed is not None
        return recording, answer.completed.cache


def num_kept(cluster: ServedCluster) -> int:
    """Blocks on the disk; of two workers that write the same one, both count it as written."""
    assert cluster.config.disk.path is not None
    return sum(1 for _ in Path(cluster.config.disk.path).rglob("*.kv"))


def disk_stats(cluster: ServedCluster, field: str) -> int:
    found = [worker.stats.disk for worker in cluster.workers().values()]
    assert None not in found
    return sum(getattr(stats, field) for stats in found)


def test_killed_workers_have_95_percent_of_their_hits(on_disk: ServedCluster) -> None:
    histories = [words(f"head {number}", 420 + 90 * number) for number in range(NUM_SESSIONS)]
    for turn in range(2):
        for number, tokens in enumerate(histories):
            answer = ask(on_disk, tokens)
            more = words(f"turn {turn} of {number}", NUM_NEW)
            histories[number] = tokens + answer.output_ids + more
    # What an undisturbed next turn reuses: full blocks of what was computed, up to the cap.
    held = [(len(tokens) - NUM_NEW - 1) // WINDOW for tokens in histories]
    cap = [(len(tokens) - WINDOW - REWIND) // WINDOW for tokens in histories]
    undisturbed = WINDOW * sum(map(min, held, cap))

    def written() -> None:
        assert num_kept(on_disk) >= sum(held)

    eventually(written)
    kill_processes(worker.pid for worker in on_disk.workers().values())
    on_disk.wait_until_whole()
    answers = [asked(on_disk, tokens) for tokens in histories]
    restarted = [recording for recording, _ in answers]
    hits = sum(recording.recipe.write_floor for recording in restarted)
    print(f"cached tokens of the next turns: {hits} after kill -9, {undisturbed} undisturbed")
    assert undisturbed > 1000
    assert hits >= 0.95 * undisturbed
    assert disk_stats(on_disk, "bad") == 0
    # All of it was on disk, and is told so.
    for recording, cache in answers:
        segments = [(s.tier, s.start_token, s.num_tokens) for s in cache.segments]
        assert segments == [(pb.CACHE_TIER_DISK, 0, recording.recipe.start)]
    folder = noise_checkpoint()
    runner = load_for(
        max(restarted, key=lambda r: len(r.token_ids)),
        folder,
        Numerics.DETERMINISTIC,
        KVFormat.PACKED,
        False,
        print,
    )
    for recording in restarted:
        check_comparable(recording, folder)
        result = asyncio.run(reproduce(recording, runner))
        assert result.difference is None, (recording.recipe, result.difference)
