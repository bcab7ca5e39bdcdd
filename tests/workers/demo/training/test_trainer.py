"""Does a training go on after a kill as if there had been none, and end in a checkpoint?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from tiny_model import tiny_config

from ripresa.workers.demo.training.muon import Muon, orthogonalized
from ripresa.workers.demo.training.optimizer import Optimizer, balance, is_trained, uses_muon
from ripresa.workers.demo.training.plan import TOKENS_PER_STEP, Phase, Plan, Step, continuation
from ripresa.workers.demo.training.trainer import Batch, Trainer, train
from ripresa.workers.errors import ConfigError, RipresaError
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids

CONFIG = ModelConfig.from_dict(tiny_config(num_nextn_predict_layers=0))
PLAN = Plan(4, lengths=((0.5, 16), (1.0, 24)), ramp_steps=2)


class Echoes:
    """Two sequences of a few tokens that say everything twice."""

    def batch(self, number: int, step: Step, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        half = torch.randint(3, 9, (2, step.length // 2), generator=generator)
        weights = torch.zeros(2, step.length)
        weights[:, step.length // 2 :] = 1.0
        return Batch(torch.cat((half, half), 1), weights)


def trainer(plan: Plan = PLAN, seed: int = 1) -> Trainer:
    return Trainer(CONFIG, paired_ids(CONFIG.vocab_size), Echoes(), plan, seed)


def test_going_on_is_bit_equal_to_never_having_stopped(tmp_path: Path) -> None:
    whole, losses = trainer(), []
    while not whole.is_finished:
        losses.append(whole.step().loss)
    path = tmp_path / "state.pt"
    first = trainer()
    for _ in range(2):
        first.step()
    first.save(path)
    first.step()  # lost
    seen = []
    second = trainer()
    second.load(path)
    train(second, path, lambda progress: seen.append(progress.loss))
    assert seen == losses[2:]
    assert second.num_tokens == whole.num_tokens == 2 * 2 * (16 + 24)
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name
    again = trainer()
    again.load(path)
    train(again, path, lambda _: pytest.fail("a finished training takes no step"))


def test_the_state_is_saved_every_five_minutes_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    clock = iter([0.0, 100.0, 300.0, 301.0, 400.0, 500.0])
    saved = []

    class Watched(Trainer):
        def save(self, path: Path) -> None:
            saved.append(self.number)
            super().save(path)

    watched = Watched(CONFIG, paired_ids(CONFIG.vocab_size), Echoes(), PLAN, 1)
    train(watched, path, lambda _: None, clock=lambda: next(clock))
    assert saved == [2, 4]
    reader = trainer()
    train(reader, tmp_path / "other.pt", lambda _: None, is_writer=False)
    assert not (tmp_path / "other.pt").exists()


def test_a_kill_while_saving_leaves_the_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.pt"
    running = trainer()
    running.step()
    running.save(path)
    running.step()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        running.save(path)
    after = trainer()
    after.load(path)
    assert after.number == 1


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), RuntimeError("writer failed")])
def test_a_full_disk_leaves_the_older_state_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    path = tmp_path / "state.pt"
    running = trainer()
    running.save(path)
    before = path.read_bytes()

    def write(content: object, file: IO[bytes]) -> None:
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr("torch.save", write)
    with pytest.raises(RipresaError, match=r"still there: make room, and run the same command"):
        running.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_state_is_refused_in_words(tmp_path: Path, share: float) -> None:
    path = tmp_path / "state.pt"
    trainer().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"cannot be read: .*or remove it to begin anew"):
        trainer().load(path)


@pytest.mark.parametrize("other", [{"plan": replace(PLAN, num_steps=5)}, {"seed": 2}])
def test_another_trainings_state_is_refused(tmp_path: Path, other: dict[str, object]) -> None:
    trainer().save(tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="another training"):
        trainer(**other).load(tmp_path / "state.pt")  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    running = trainer()
    with torch.no_grad():
        running.parameters["norm.weight"].fill_(torch.inf)
    with pytest.raises(ConfigError, match="loss of step 0"):
        running.step()


def test_the_loss_falls_and_everything_moves() -> None:
    plan = Plan(12, lengths=((1.0, 16),), ramp_steps=1)
    running = trainer(plan)
    before = {name: p.clone() for name, p in running.parameters.items()}
    losses = [running.step().loss for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    last = f"layers.{CONFIG.num_hidden_layers - 1}.hc_ffn_fn"  # mixes for no site
    still = {n for n, p in running.parameters.items() if torch.equal(p, before[n])}
    assert still <= {last}


def test_what_each_optimizer_moves() -> None:
    parameters = trainer().parameters
    muon = {name for name, p in parameters.items() if is_trained(name) and uses_muon(name, p)}
    assert "layers.1.attn.wq_b.weight" in muon
    assert "layers.1.ffn.experts.0.w1.weight" in muon
    assert not any("indexer" in n or "hc_" in n or "embed" in n or "norm" in n for n in muon)
    assert not any(is_trained(name) for name in parameters if name.endswith("gate.bias"))
    optimizer = Optimizer(parameters)
    assert sum(len(part["param_groups"][0]["params"]) for part in optimizer.state().values()) == (
        sum(is_trained(name) for name in parameters)
    )


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (32, 32)])
def test_muon_moves_as_pytorchs_does_and_by_orthogonal_steps(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for _ in range(2)]
    rates = {"lr": 0.02, "weight_decay": 0.02}

    def moved(make: Callable[..., torch.optim.Optimizer], **options: object) -> list[torch.Tensor]:
        matrices = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        optimizer = make(matrices, **rates, **options)
        draws = torch.Generator().manual_seed(2)
        for _ in range(3):
            for matrix in matrices:
                matrix.grad = torch.randn(shape, generator=draws)
            optimizer.step()
        return [matrix.detach() for matrix in matrices]

    theirs = moved(torch.optim.Muon)
    for ours in (moved(Muon), moved(Muon, dtype=torch.bfloat16)):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
    values = torch.linalg.svdvals(orthogonalized(torch.stack(start)))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_balance_moves_picks_to_the_experts_with_fewer_rows() -> None:
    biases = {f"layers.{layer}.ffn.gate.bias": torch.zeros(3) for layer in range(2)}
    balance(biases, torch.tensor([[6, 3, 0], [3, 3, 3]]), 1.0)
    assert (biases["layers.0.ffn.gate.bias"].sign() == torch.tensor([-1.0, 0.0, 1.0])).all()
    assert not biases["layers.1.ffn.gate.bias"].any()


def test_the_plan_grows_longer_sparser_and_slower() -> None:
    plan = Plan(1000)
    steps = [plan.step(number) for number in range(1000)]
    lengths = [step.length for step in steps]
    assert lengths == sorted(lengths)
    assert set(lengths) == {512, 1024, 2048}
    assert all(step.length * step.num_sequences == TOKENS_PER_STEP for step in steps)
    assert [s.phase for s in steps] == sorted((s.phase for s in steps), key=list(Phase).index)
    assert all(step.is_dense for step in steps[:400])
    assert {step.is_dense for step in steps[400:800]} == {True, False}
    assert not any(step.is_dense for step in steps[800:])
    rates = [step.rate for step in steps]
    assert rates[:30] == sorted(rates[:30])
    assert rates[600:] == sorted(rates[600:], reverse=True)
    assert max(rates) == 1.0
    assert 0 < rates[-1] < 0.01


def test_a_training_that_goes_on_asks_for_what_is_far_back_all_the_time() -> None:
    plan = continuation(1000)
    steps = [plan.step(number) for number in range(1000)]
    assert {step.phase for step in steps} == {Phase.DISTANT}
    assert not any(step.is_dense for step in steps[600:])
    assert max(step.rate for step in steps) == pytest.approx(0.7)
    assert 0 < steps[-1].rate < 0.01
