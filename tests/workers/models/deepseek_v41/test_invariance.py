"""Does a row's result depend on anything but its own sequence? Chunks, batch mates, placement.

On a tiny model with packed KV, every unwritten byte a NaN, in deterministic numerics: equal means
equal in every bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import Numerics
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.base import EncoderOutput
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

FOLDER = Path(__file__).resolve().parents[3] / "data/golden/case_g_plain_replay/checkpoint"
WINDOW = 8
LENGTH = 61
VOCABULARY = 192
TOKENS = tuple(Random(3).choices(range(VOCABULARY), k=LENGTH))
MATES = 3
SLOT = MATES


@dataclass
class Worker:
    runner: TorchModelRunner
    step: int = 0

    def run(
        self,
        sequence: SequenceStep,
        mates: tuple[int, ...] = (),
        inbound: EncoderOutput | None = None,
    ) -> torch.Tensor | EncoderOutput | None:
        """One step with strangers of the given lengths beside the sequence."""
        self.step += 1
        random = Random(self.step)
        steps = [sequence]
        for slot, length in enumerate(mates):
            tokens = tuple(random.choices(range(VOCABULARY), k=length))
            stop = length if self.runner.weights.half is Half.ALL else 0
            table = tuple(range(60 + 6 * slot, 66 + 6 * slot))
            steps.append(SequenceStep(slot, table, tokens, decoder_stop=stop))
        random.shuffle(steps)
        handed = {} if inbound is None else {SLOT: inbound}
        output = self.runner.execute(StepPlan(self.step, tuple(steps)), handed)
        if sequence.hand_over_from is not None:
            return output.encoder_output.get(SLOT)
        return output.logits.get(SLOT)


def worker(half: Half = Half.ALL, kv_format: KVFormat = KVFormat.PACKED) -> Worker:
    return Worker(
        load_runner(
            FOLDER,
            half,
            num_blocks=80,
            num_slots=MATES + 1,
            numerics=Numerics.DETERMINISTIC,
            kv_format=kv_format,
            poison=True,
        )
    )


@pytest.fixture(scope="module", params=list(KVFormat))
def whole(request: pytest.FixtureRequest) -> Worker:
    return worker(kv_format=request.param)


@pytest.fixture(scope="module")
def halves() -> tuple[Worker, Worker]:
    return worker(Half.ENCODER), worker()


def chunked(chunks: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) in pieces of the given sizes, repeated."""
    pieces = []
    while start < stop:
        size = chunks[len(pieces) % len(chunks)]
        pieces.append((start, min(start + size, stop)))
        start += size
    return pieces


def prefill(
    worker: Worker,
    table: tuple[int, ...],
    chunks: list[int],
    mates: list[tuple[int, ...]],
    *,
    start: int = 0,
    floor: int = 0,
    write_floor: int = 0,
) -> torch.Tensor:
    """Logits of rows [start, LENGTH), every row through every layer."""
    worker.runner.release_slot(SLOT)
    logits = []
    for number, (first, last) in enumerate(chunked(chunks, start, LENGTH)):
        step = SequenceStep(
            slot=SLOT,
            block_table=table,
            token_ids=TOKENS[first:last],
            encoder_start=first,
            swa_floor=floor,
            write_floor=write_floor,
            decoder_start=first,
            decoder_stop=last,
            decoder_floor=floor,
            source_floor=floor,
            return_logits=True,
        )
        part = worker.run(step, mates[number % len(mates)])
        assert isinstance(part, torch.Tensor)
        logits.append(part)
    return torch.cat(logits)


TABLES = st.permutations(range(50)).map(lambda order: tuple(order[:8]))
CHUNKS = st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=6)
STRANGERS = st.lists(
    st.lists(st.integers(1, 20), max_size=MATES).map(tuple), min_size=1, max_size=4
)
STRAIGHT = tuple(range(8))


@settings(max_examples=25)
@given(table=TABLES, chunks=CHUNKS, mates=STRANGERS)
def test_chunks_mates_and_placement_change_no_bit(
    whole: Worker, table: tuple[int, ...], chunks: list[int], mates: list[tuple[int, ...]]
) -> None:
    expected = prefill(whole, STRAIGHT, [LENGTH], [()])
    assert not expected.isnan().any()
    assert torch.equal(prefill(whole, table, chunks, mates), expected)


@settings(max_examples=25)
@given(table=TABLES, chunks=CHUNKS, tail_chunks=CHUNKS, length=st.integers(1, LENGTH))
def test_two_workers_compute_what_one_does(
    halves: tuple[Worker, Worker],
    table: tuple[int, ...],
    chunks: list[int],
    tail_chunks: list[int],
    length: int,
) -> None:
    encoder, decoder = halves
    tail = max(0, length - WINDOW)
    alone = worker_tail(decoder, STRAIGHT, length, tail)
    encoder.runner.release_slot(SLOT)
    decoder.runner.release_slot(SLOT)
    parts = []
    for first, last in chunked(chunks, 0, length):
        step = SequenceStep(
            SLOT,
            table,
            TOKENS[first:last],
            encoder_start=first,
            decoder_floor=tail,
            hand_over_from=tail,
        )
        part = encoder.run(step)
        if part is not None:
            assert isinstance(part, EncoderOutput)
            parts.append(part)
    output = EncoderOutput(
        tail,
        torch.cat([part.hidden for part in parts]),
        torch.cat([part.pre_mix for part in parts]),
    )
    source, target = encoder.runner, decoder.runner
    whole_blocks = table[: length // WINDOW]
    other = tuple(reversed(table))
    target.import_blocks(other[: length // WINDOW], source.export_blocks(whole_blocks))
    payload = source.export_state(SLOT, table, length, output, False)
    assert payload.numel() == target.state_bytes(length, tail, False)
    inbound = target.import_state(SLOT, other, length, tail, False, payload)
    logits = []
    for first, last in chunked(tail_chunks, tail, length):
        step = SequenceStep(
            SLOT,
            other,
            decoder_start=first,
            decoder_stop=last,
            decoder_floor=tail,
            source_floor=tail,
            inbound=True,
            return_logits=True,
        )
        part = decoder.run(step, inbound=inbound)
        assert isinstance(part, torch.Tensor)
        logits.append(part)
    assert torch.equal(torch.cat(logits), alone)


def worker_tail(worker: Worker, table: tuple[int, ...], length: int, tail: int) -> torch.Tensor:
    """The decoder tail of a prompt that one worker computes in one step."""
    worker.runner.release_slot(SLOT)
    step = SequenceStep(
        SLOT,
        table,
        TOKENS[:length],
        decoder_start=tail,
        decoder_stop=length,
        decoder_floor=tail,
        source_floor=tail,
        return_logits=True,
    )
    logits = worker.run(step)
    assert isinstance(logits, torch.Tensor)
    return logits


@settings(max_examples=25)
@given(hit=st.integers(1, 20).map(lambda n: 2 * n), chunks=CHUNKS, mates=STRANGERS)
def test_replay_reads_no_row_below_its_floor_and_writes_none_below_its_write_floor(
    whole: Worker, hit: int, chunks: list[int], mates: list[tuple[int, ...]]
) -> None:
    start = hit - min(WINDOW, hit)
    prefill(whole, STRAIGHT, [LENGTH], [()])
    cache = whole.runner.cache
    before = {layer: pool.clone() for layer, pool in cache.main.items()}

    def replay(chunks: list[int], mates: list[tuple[int, ...]]) -> torch.Tensor:
        # All rings are NaN now: a row below the floor that is read spoils the logits.
        logits = prefill(whole, STRAIGHT, chunks, mates, start=start, floor=start, write_floor=hit)
        for layer, pool in cache.main.items():
            kept = cache.entry_index(STRAIGHT, whole.runner.config.ratio(layer))
            kept = kept[: hit // whole.runner.config.ratio(layer)]
            assert torch.equal(pool[kept], before[layer][kept])
        return logits

    expected = replay([LENGTH], [()])
    assert not expected.isnan().any()
    assert torch.equal(replay(chunks, mates), expected)
