"""Are sequences cut where bounded replay is served, as often as asked, and always the same?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_model import tiny_config

from ripresa.workers.demo.training.cut_batches import REPLAYS, CutBatches
from ripresa.workers.demo.training.fine_tuning import FineTuning
from ripresa.workers.demo.training.initial import initial_parameters
from ripresa.workers.demo.training.plan import TOKENS_PER_STEP, Phase, Step
from ripresa.workers.demo.training.trainer import Batch, Trainer, train
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids

CONFIG = ModelConfig.from_dict(tiny_config(num_nextn_predict_layers=0))
WINDOW, COUNTED = 128, 900
STEP = Step(Phase.FULL, 1024, 64, False, 1.0)


class Echoes:
    """Sequences that say everything twice; nothing counts in a few, nor in the ends of others.

    Args:
        every: of so many sequences nothing counts in the last.
    """

    def __init__(self, every: int = 9) -> None:
        self._every = every

    def batch(self, number: int, step: Step, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        shape = (step.num_sequences, step.length // 2)
        half = torch.randint(3, 9, shape, generator=generator)
        weights = torch.ones(step.num_sequences, step.length)
        weights[:, COUNTED:] = 0.0
        weights[self._every - 1 :: self._every] = 0.0
        return Batch(torch.cat((half, half), 1), weights)


def test_cuts_are_drawn_by_seed_step_and_process_alone() -> None:
    batches = CutBatches(Echoes(), WINDOW, 1, 0.5)

    def places(batches: CutBatches, number: int, rank: int) -> list[list[int]]:
        cuts = batches.batch(number, STEP, rank).cuts
        assert cuts is not None
        return torch.stack((cuts.encoder, cuts.boundary, cuts.decoder)).tolist()

    first = places(batches, 3, 1)
    assert places(CutBatches(Echoes(), WINDOW, 1, 0.5), 3, 1) == first
    others = [places(batches, 3, 0), places(batches, 4, 1)]
    others.append(places(CutBatches(Echoes(), WINDOW, 2, 0.5), 3, 1))
    assert all(other != first for other in others)


def test_boundaries_and_replays_are_those_that_are_served() -> None:
    batches, plain = CutBatches(Echoes(), WINDOW, 0, 0.5), Echoes()
    kinds: Counter[str] = Counter()
    replays: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    for number in range(30):
        batch, whole = batches.batch(number, STEP, 0), plain.batch(number, STEP, 0)
        assert batch.cuts is not None
        batch.cuts.check(*batch.token_ids.shape)
        assert torch.equal(batch.token_ids, whole.token_ids)
        rows = zip(batch.cuts.encoder, batch.cuts.boundary, batch.cuts.decoder, strict=True)
        for (encoder, known, decoder), weights, usual in zip(
            rows, batch.weights, whole.weights, strict=True
        ):
            first = int(weights.nonzero()[0]) if weights.any() else COUNTED
            assert torch.equal(weights[first:], usual[first:])
            if not decoder:
                kinds["whole"] += 1
                assert torch.equal(weights, usual)
                continue
            boundary = first if not known else int(known)
            assert boundary == first <= COUNTED - WINDOW
            assert boundary - int(decoder) in REPLAYS
            replays[boundary - int(decoder)] += 1
            if known:
                kinds["both"] += 1
                blocks[int(known) // WINDOW] += 1
                assert known % WINDOW == 0
                assert encoder == decoder
            else:
                kinds["decoder"] += 1
                assert encoder == 0
    total = sum(kinds.values())
    assert kinds["whole"] / total == pytest.approx(0.5 + 0.5 * 7 / 64, abs=0.03)
    assert kinds["both"] == pytest.approx(kinds["decoder"], rel=0.15)
    assert set(replays) == set(REPLAYS)
    assert max(replays.values()) < 1.3 * min(replays.values())
    assert set(blocks) == set(range(1, 7))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_or_every_sequence_is_cut(share: float) -> None:
    batch = CutBatches(Echoes(), WINDOW, 0, share).batch(0, STEP, 0)
    assert batch.cuts is not None
    has_any = batch.weights.any(1)
    assert int((batch.cuts.decoder > 0)[has_any].sum()) == share * int(has_any.sum())


def test_sequences_without_room_for_a_replay_stay_whole() -> None:
    step = Step(Phase.FULL, 16, 64, False, 1.0)
    batch = CutBatches(Echoes(), 8, 0, 1.0).batch(0, step, 0)
    assert batch.cuts is not None
    shorter = batch.cuts.decoder > 0
    assert 0 < int(shorter.sum()) < 64
    # R = 0 alone fits.
    cut_at = torch.where(batch.cuts.boundary > 0, batch.cuts.boundary, batch.cuts.decoder)
    assert torch.equal(batch.cuts.decoder, cut_at)


def test_fine_tuning_reads_every_length_as_it_is_served() -> None:
    plan = FineTuning(300, 0.5)
    steps = [plan.step(number) for number in range(300)]
    assert Counter(step.length for step in steps) == {512: 100, 1024: 100, 2048: 100}
    assert all(step.length * step.num_sequences == TOKENS_PER_STEP for step in steps)
    assert all(step.phase is Phase.FULL and not step.is_dense for step in steps)
    rates = [step.rate for step in steps]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert plan.ramp_steps - 3 < top < plan.ramp_steps
    assert 0.9 * plan.peak < max(rates) < plan.peak
    assert 0 < rates[-1] < 0.01 * plan.peak


def trainer() -> Trainer:
    plan = FineTuning(3, 1.0, lengths=(136, 48), ramp_steps=2, tokens_per_step=144)
    return Trainer(
        CONFIG,
        paired_ids(CONFIG.vocab_size),
        CutBatches(Echoes(every=2), CONFIG.sliding_window, 5, plan.cut_share),
        plan,
        seed=5,
        start=initial_parameters(CONFIG, 77),
    )


def test_fine_tuning_goes_on_bit_equal_from_where_it_was(tmp_path: Path) -> None:
    whole, losses = trainer(), []
    for name, values in initial_parameters(CONFIG, 77).items():
        assert torch.equal(whole.parameters[name], values)
    while not whole.is_finished:
        losses.append(whole.step().loss)
    first = trainer()
    first.step()
    first.save(tmp_path / "state.pt")
    first.step()  # lost
    seen = []
    second = trainer()
    second.load(tmp_path / "state.pt")
    train(second, tmp_path / "state.pt", lambda progress: seen.append(progress.loss))
    assert seen == losses[1:]
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name
