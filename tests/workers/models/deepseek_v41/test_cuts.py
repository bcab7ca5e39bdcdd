"""Do cut sequences teach what bounded replay serves, and does nothing leak over a cut?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from observed_model import CONFIG, Observed, ask
from tiny_model import tiny_checkpoint

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids
from ripresa.workers.models.deepseek_v41.tensor_specs import tensor_shapes
from ripresa.workers.models.deepseek_v41.trainable.attention import (
    attend,
    block_biases,
    block_rows,
)
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts
from ripresa.workers.models.deepseek_v41.trainable.model import Pool, TrainableModel
from ripresa.workers.models.deepseek_v41.trainable.selection import visible_entries
from ripresa.workers.models.tiny_checkpoint import WeightFormat
from ripresa.workers.replay import PlanKind, Recipe
from ripresa.workers.request import Failed, PrefillDone, Tokens
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

WINDOW, LENGTH = 8, 96
LOOK_BACK = 3
DEEP = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
}


def cuts(*places: tuple[int, int, int]) -> Cuts:
    """Of each sequence: encoder, boundary, decoder."""
    encoder, boundary, decoder = torch.tensor(places).unbind(1)
    return Cuts(encoder, boundary, decoder)


class Served:
    """A small checkpoint, trained from and served."""

    def __init__(self, folder: Path, kv_format: KVFormat = KVFormat.FLOAT32) -> None:
        self.config = tiny_checkpoint(folder, WeightFormat.F32, num_nextn_predict_layers=0, **DEEP)
        self.ids = paired_ids(self.config.vocab_size)
        with Checkpoint(folder) as checkpoint:
            shapes = tensor_shapes(self.config)
            self.parameters = {n: checkpoint.read(n, shape) for n, shape in shapes.items()}
        self.observed = Observed(checkpoint=folder, kv_format=kv_format, compressed_ids=self.ids)
        self.model = self.trainable()

    def trainable(self, packed: bool = False) -> TrainableModel:
        return TrainableModel(self.config, self.parameters, self.ids, packed)

    def tokens(self, batch: int, length: int = LENGTH) -> torch.Tensor:
        generator = torch.Generator().manual_seed(4)
        return torch.randint(3, self.config.vocab_size, (batch, length), generator=generator)

    @torch.no_grad()
    def trained(self, token_ids: torch.Tensor, where: Cuts | None) -> torch.Tensor:
        """Logits [B, T, vocab]."""
        return self.model.logits(self.model.forward(token_ids, cuts=where).hidden)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("checkpoint"))


async def said(engine: DecodeEngine, prompt: list[int], num_new: int) -> tuple[Recipe, list[int]]:
    """What an engine answers, and by which recipe."""
    answer: list[int] = []
    async for event in engine.generate(ask(prompt, max_tokens=num_new), local=True):
        assert not isinstance(event, Failed), event
        if isinstance(event, PrefillDone):
            recipe = event.recipe
        if isinstance(event, Tokens):
            answer += event.token_ids
    return recipe, answer


def assert_equal(logits: Mapping[int, torch.Tensor], trained: torch.Tensor, places: range) -> None:
    """Served rows are the trained ones: [T, vocab]."""
    assert sorted(logits) == list(places)
    expected = torch.stack([logits[place] for place in places])
    assert (trained[places.start : places.stop] - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("cached", [0, 24, 40, 56])
async def test_an_engine_serves_what_a_cut_sequence_teaches(served: Served, cached: int) -> None:
    """The decoder tail of a cold prompt, and a bounded hit of all the lengths before it."""
    (tokens,) = served.tokens(1, 79).tolist()
    engine = DecodeEngine("d0", served.observed.runner, CONFIG)
    await engine.start()
    if cached:
        await said(engine, tokens[:cached], 1)
    with served.observed.watched() as logits:
        recipe, answer = await said(engine, tokens, LENGTH - 79)
    await engine.stop()
    kind = PlanKind.BOUNDED if cached else PlanKind.COLD
    start = max(cached - WINDOW, 0)
    assert (recipe.kind, recipe.start, recipe.write_floor) == (kind, start, cached)
    assert recipe.decoder_start == 79 - WINDOW
    whole = torch.tensor([[*tokens, *answer]])
    trained = served.trained(whole, cuts((start, cached, 79 - WINDOW)))
    assert_equal(logits, trained[0], range(79 - WINDOW, LENGTH - 1))
    plain = served.trained(whole, None)
    assert (plain - trained)[0, 79:].abs().max() > 1e-2 * plain.std()


PLACES = [(24, 24, 24), (22, 24, 22), (11, 48, 11), (43, 56, 50), (0, 0, 37), (0, 8, 0), (0, 0, 0)]


def test_replays_of_any_length_compute_what_cut_sequences_do(served: Served) -> None:
    """Steps by hand, all over the blocks of one prompt each; together in one batch."""
    tokens = served.tokens(len(PLACES))
    trained = served.trained(tokens, cuts(*PLACES))
    execute = served.observed.runner.execute
    blocks = tuple(range(LENGTH // WINDOW))
    for sequence, (start, boundary, decoder), ours in zip(
        tokens.tolist(), PLACES, trained, strict=True
    ):
        fresh = tuple(block + len(blocks) for block in blocks)
        execute(StepPlan(0, (SequenceStep(0, blocks, tuple(sequence)),)))
        step = SequenceStep(
            1,
            (*blocks[: boundary // WINDOW], *fresh[boundary // WINDOW :]),
            tuple(sequence[start:]),
            tuple(sequence[max(start - LOOK_BACK, 0) : start]),
            encoder_start=start,
            swa_floor=start,
            write_floor=boundary,
            decoder_start=max(start, decoder),
            decoder_stop=LENGTH,
            decoder_floor=decoder,
            source_floor=decoder,
            return_logits=True,
        )
        with served.observed.watched() as logits:
            execute(StepPlan(1, (step,)))
        assert_equal(logits, ours, range(max(start, decoder), LENGTH))


def test_what_a_cache_holds_is_rounded_as_the_packed_format_does(tmp_path: Path) -> None:
    served = Served(tmp_path, KVFormat.PACKED)
    tokens, where = served.tokens(1), cuts((32, 40, 40))
    runner, blocks = served.observed.runner, tuple(range(LENGTH // WINDOW))
    prefill = SequenceStep(0, blocks, tuple(tokens[0, :40].tolist()))
    hit = replace(
        prefill,
        slot=1,
        token_ids=tuple(tokens[0, 32:].tolist()),
        lookback_ids=tuple(tokens[0, 29:32].tolist()),
        encoder_start=32,
        swa_floor=32,
        write_floor=40,
        decoder_start=40,
        decoder_stop=LENGTH,
        decoder_floor=40,
        source_floor=40,
        return_logits=True,
    )
    runner.execute(StepPlan(0, (prefill,)))
    expected = runner.execute(StepPlan(1, (hit,))).logits[1]
    distance = {}
    for packed in (True, False):
        model = served.trainable(packed)
        with torch.no_grad():
            logits = model.logits(model.forward(tokens, cuts=where).hidden)[0, 40:]
        distance[packed] = (logits - expected).abs().mean() / expected.std()
    # A value beside a rounding step may fall to the other side of it.
    assert distance[True] < 0.1 * distance[False]


def test_rows_before_a_cut_and_whole_sequences_are_as_without(served: Served) -> None:
    tokens = served.tokens(3)
    plain = served.trained(tokens, None)
    cut = served.trained(tokens, cuts((40, 48, 40), (0, 0, 0), (0, 0, 64)))
    for sequence, stop in enumerate((40, LENGTH, 64)):
        assert torch.allclose(cut[sequence, :stop], plain[sequence, :stop], atol=1e-5)
    for sequence, start in ((0, 40), (2, 64)):
        assert not torch.allclose(cut[sequence, start:], plain[sequence, start:], atol=1e-2)


class Cached(TrainableModel):
    """Finds the same entries, whatever the tokens."""

    held: Mapping[int, Pool]

    def pools(self, token_ids: torch.Tensor, dense: bool = False) -> Mapping[int, Pool]:
        return self.held


def test_nothing_but_the_cache_and_n_grams_leads_over_a_cut(served: Served) -> None:
    start, boundary = 33, 48
    tokens = served.tokens(1)
    others = tokens.clone()
    others[:, : start - LOOK_BACK] = 95 - tokens[:, : start - LOOK_BACK]
    where = cuts((start, boundary, start))
    model = Cached(served.config, served.parameters, served.ids, packed=False)
    model.held = served.model.pools(tokens[:, :boundary])
    with torch.no_grad():
        first, second = (model.forward(t, cuts=where).hidden[0] for t in (tokens, others))
        plain = [served.model.forward(t).hidden[0] for t in (tokens, others)]
    assert torch.allclose(first[start:], second[start:], atol=1e-5)
    assert (plain[0] - plain[1])[start:].abs().max() > 1e-2


def test_attention_reads_no_window_row_below_a_floor() -> None:
    floors = torch.tensor([0, 5, 8, 13])
    size, length = block_rows(WINDOW), 24
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, length, 2, 6, generator=generator)
    rows = torch.randn(4, length, 6, generator=generator)
    entries = torch.randn(4, length, 6, generator=generator)
    chosen = [visible_entries(n, size, 1).expand(4, -1, -1) for n in range(0, length, size)]

    def answers(rows: torch.Tensor, pool: torch.Tensor | None) -> torch.Tensor:
        seen = None if pool is None else chosen
        biases = block_biases(length, WINDOW, seen, torch.float32, floors)
        counts = [c.shape[-1] for c in chosen]
        return attend(q, rows, pool, biases, counts, torch.zeros(2), 0.4, WINDOW)[0]

    for pool in (None, entries):
        usual = answers(rows, pool)
        for sequence, floor in enumerate(floors.tolist()):
            moved = rows.clone()
            moved[sequence, :floor] += 100.0
            changed = answers(moved, pool)[sequence]
            assert torch.equal(changed[floor:], usual[sequence, floor:])
            # The row below the floor reads itself.
            assert floor == 0 or not torch.equal(changed[floor - 1], usual[sequence, floor - 1])


def gradients(
    served: Served, tokens: torch.Tensor, where: Cuts | None, first: int
) -> dict[str, torch.Tensor | None]:
    """Of the loss of rows from `first` on, and of the indexers' own."""
    values = {n: p.clone().requires_grad_() for n, p in served.parameters.items()}
    model = TrainableModel(served.config, values, served.ids, packed=True)
    output = model.forward(tokens, cuts=where)
    hidden, targets = output.hidden[:, first:-1].flatten(0, 1), tokens[:, first + 1 :].flatten()
    loss, _ = model.loss(hidden, targets, torch.ones(len(targets)))
    found = torch.autograd.grad(loss + output.index_loss, list(values.values()), allow_unused=True)
    return dict(zip(values, found, strict=True))


def test_gradients_flow_where_a_worker_computes(served: Served) -> None:
    """Tokens before a cut are of one half of the vocabulary, those behind of the other."""
    half, start, boundary = 48, 40, 48
    tokens = served.tokens(2) % (half - 3)
    tokens[:, :start] += 3
    tokens[:, start:] += half
    plain = gradients(served, tokens, None, boundary)
    both = gradients(served, tokens, cuts(*[(start, boundary, start)] * 2), boundary)
    decoder = gradients(served, tokens, cuts(*[(0, 0, start)] * 2), boundary)
    for found in (both, decoder):
        moved = {n for n, g in found.items() if g is not None and bool(g.any())}
        assert moved == {n for n, g in plain.items() if g is not None and bool(g.any())}
        assert bool(found["embed.weight"][half:].any())  # type: ignore[index]
    # A cache passes no gradient; the entries of one forward do.
    assert not bool(both["embed.weight"][:half].any())  # type: ignore[index]
    assert bool(decoder["embed.weight"][:half].any())  # type: ignore[index]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(4, 7, 4)], "within pairs"),
        ([(8, 6, 8)], "before cuts"),
        ([(0, 0, LENGTH + 1)], "not within"),
        ([(0, 0, 0), (0, 0, 0)], r"shape \[2\], not \[1\]"),
    ],
)
def test_cuts_that_are_none_are_refused(
    served: Served, places: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        served.model.forward(served.tokens(1), cuts=cuts(*places))
