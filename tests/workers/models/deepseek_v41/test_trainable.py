"""Does the model that learns compute what the model that serves does, and do its gradients hold?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_checkpoint

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import Numerics
from ripresa.workers.model_runner import load_runner
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids
from ripresa.workers.models.deepseek_v41.tensor_specs import tensor_shapes
from ripresa.workers.models.deepseek_v41.trainable import ops
from ripresa.workers.models.deepseek_v41.trainable.attention import (
    attend,
    block_biases,
    block_rows,
)
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel
from ripresa.workers.models.deepseek_v41.trainable.selection import (
    Selection,
    choose,
    choose_candidates,
    visible_entries,
)
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.models.tiny_checkpoint import WeightFormat
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

LENGTH = 96
VARIANTS = {
    "every kind of layer": {},
    "released depth": {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
    },
    "no n-gram memory": {"engram_layer_ids": [], "engram_num_embeddings": []},
    "selection does not bite": {"index_topk": 128, "candidate_topk_blocks": 40},
    "one expert": {"num_experts_per_tok": 1},
}


def parameters(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name, shape) for name, shape in tensor_shapes(config).items()}


def tokens(batch: int, vocab_size: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, LENGTH), generator=generator)


def served(
    folder: Path, sequences: torch.Tensor, kv_format: KVFormat
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits of whole sequences in one step, and what each index source selected."""
    selected = {}

    def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "selected":
            selected[layer] = tensor.view(len(sequences), LENGTH, -1)

    config = ModelConfig.from_file(folder / "config.json")
    blocks = LENGTH // config.sliding_window
    runner = load_runner(
        folder,
        Half.ALL,
        num_blocks=blocks * len(sequences),
        num_slots=len(sequences),
        numerics=Numerics.FAST,
        kv_format=kv_format,
        compressed_ids=paired_ids(config.vocab_size),
        observer=observe,
    )
    steps = [
        SequenceStep(
            slot=slot,
            block_table=tuple(range(slot * blocks, (slot + 1) * blocks)),
            token_ids=tuple(sequence),
            decoder_stop=LENGTH,
            return_logits=True,
        )
        for slot, sequence in enumerate(sequences.tolist())
    ]
    output = runner.execute(StepPlan(0, tuple(steps)))
    return torch.stack([output.logits[slot] for slot in range(len(steps))]), selected


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_it_computes_what_the_serving_model_does(
    changes: dict[str, object], tmp_path: Path
) -> None:
    config = tiny_checkpoint(tmp_path, WeightFormat.F32, num_nextn_predict_layers=0, **changes)
    sequences = tokens(2, config.vocab_size)
    expected, selected = served(tmp_path, sequences, KVFormat.FLOAT32)
    ids = paired_ids(config.vocab_size)
    model = TrainableModel(config, parameters(tmp_path, config), ids, packed=False)
    with torch.no_grad():
        output = model.forward(sequences)
        logits = model.logits(output.hidden)
    assert set(output.selections) == set(selected) == set(config.index_source_layer_ids)
    for layer, entries in selected.items():
        chosen = output.selections[layer].chosen
        width = chosen[-1].shape[-1]
        ours = torch.cat([torch.nn.functional.pad(c, (0, width - c.shape[-1])) for c in chosen], 1)
        theirs = torch.zeros(*ours.shape[:2], width + 1, dtype=torch.bool)
        theirs.scatter_(-1, entries.masked_fill(entries < 0, width), True)
        assert torch.equal(ours, theirs[..., :width])
        bites = bool((ours.sum(-1) < visible_entries(0, LENGTH, config.ratio(layer)).sum(-1)).any())
        assert bites == (config.index_topk < width)
    assert (logits - expected).abs().max() < 1e-4 * expected.std()


def test_it_rounds_what_is_cached_as_the_packed_format_does(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, WeightFormat.F32, num_nextn_predict_layers=0)
    sequences = tokens(2, config.vocab_size)
    expected, _ = served(tmp_path, sequences, KVFormat.PACKED)
    ids = paired_ids(config.vocab_size)
    distance = {}
    for packed in (True, False):
        model = TrainableModel(config, parameters(tmp_path, config), ids, packed)
        with torch.no_grad():
            logits = model.logits(model.forward(sequences).hidden)
        distance[packed] = (logits - expected).abs().mean() / expected.std()
    # A value beside a rounding step may fall to the other side of it.
    assert distance[True] < 0.1 * distance[False]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (values * scale).requires_grad_()


def is_right(function: Callable[..., Any], *inputs: Any) -> bool:
    right: bool = torch.autograd.gradcheck(function, inputs)
    return right


def test_gradients_written_by_hand_are_those_of_the_function() -> None:
    rows, n, d = 5, 4, 6
    phases = torch.polar(torch.ones(rows, 2), torch.randn(rows, 2)).to(torch.complex128)
    assert is_right(ops.rms_norm, random(rows, d), random(d), 1e-6)
    assert is_right(ops.rms_norm, random(rows, d), None, 1e-6)
    assert is_right(ops.rotate, random(rows, 3, d), phases[:, None])
    assert is_right(
        ops.read_streams,
        random(rows, n, d), random(rows, n), random(24, n * d), random(24), random(3),
        5, 1e-6, 1e-6,
    )  # fmt: skip
    assert is_right(
        ops.write_streams, random(rows, d), random(rows, n, d), random(rows, n), random(rows, n, n)
    )
    targets = torch.tensor([1, 3, 0, 6, 1])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    assert is_right(
        lambda hidden, head: ops.next_token_loss(hidden, head, targets, weights, hidden.dtype)[0],
        random(rows, d), random(7, d),
    )  # fmt: skip


def test_the_gradient_of_attention_is_that_of_the_function() -> None:
    window, length = 4, 8
    size = block_rows(window)
    chosen = [visible_entries(first, size, 2).expand(2, -1, -1) for first in range(0, length, size)]
    biases = block_biases(length, window, chosen, torch.float64)

    def attention(q: Any, rows: Any, entries: Any, sink: Any) -> torch.Tensor:
        widths = [c.shape[-1] for c in chosen]
        return attend(q, rows, entries, biases, widths, sink, 0.5, window)[0]

    assert is_right(attention, random(2, length, 3, 4), random(2, length, 4), random(2, 4, 4),
                    random(3))  # fmt: skip


def test_narrow_products_are_close_in_value_and_gradient(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, WeightFormat.F32, num_nextn_predict_layers=0)
    sequences = tokens(2, config.vocab_size)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        values = {n: p.requires_grad_() for n, p in parameters(tmp_path, config).items()}
        ids = paired_ids(config.vocab_size)
        model = TrainableModel(config, values, ids, packed=False, dtype=dtype)
        hidden = model.forward(sequences, dense=True).hidden[:, :-1].flatten(0, 1)
        targets = sequences[:, 1:].flatten()
        loss, rows = model.loss(hidden, targets, torch.full((len(targets),), 1 / len(targets)))
        assert torch.allclose(loss, rows.mean())
        loss.backward()
        gradients = [p.grad.flatten() for p in values.values() if p.grad is not None]
        results[dtype] = (loss.detach(), torch.cat(gradients))
    exact, narrow = results[torch.float32], results[torch.bfloat16]
    assert abs(exact[0] - narrow[0]) < 0.02 * exact[0]
    assert torch.cosine_similarity(exact[1], narrow[1], dim=0) > 0.9


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_choosing_takes_the_best_and_of_equals_the_lower(seed: int, k: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (1, 3, columns), generator=generator).float()
    allowed = torch.rand(1, 3, columns, generator=generator) < 0.7
    chosen = choose(scores, allowed, k)
    for row in range(3):
        places = [i for i in range(columns) if allowed[0, row, i]]
        places.sort(key=lambda i: (-float(scores[0, row, i]), i))
        assert chosen[0, row].nonzero()[:, 0].tolist() == sorted(places[:k])


def test_candidates_hold_the_newest_block_and_nothing_unseen() -> None:
    scores = torch.tensor([[[9.0, 0, 0, 0, 5, 0, 1, 1]]])
    visible = torch.tensor([[True] * 7 + [False]])
    chosen = choose_candidates(scores, visible, num_blocks=2, block_size=2)
    assert chosen[0, 0].nonzero()[:, 0].tolist() == [0, 1, 6]


def test_the_index_loss_teaches_the_scores_alone() -> None:
    scores = torch.zeros(1, 2, 3, requires_grad=True)
    chosen = torch.tensor([[[True, True, True], [True, False, False]]])
    attended = torch.tensor([[[0.2, 0.6, 0.0], [0.3, 0.0, 0.0]]])
    selection = Selection([scores], [chosen], is_dense=True)
    selection.add_attended([attended.clone()])
    loss = selection.loss()
    share = torch.tensor([0.25, 0.75])
    assert torch.isclose(loss, (share * (share * 3).log()).sum())
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.allclose(gradient[0, 0], torch.tensor([1 / 3 - 0.25, 1 / 3 - 0.75, 1 / 3]))
    assert not gradient[0, 1].any()


def test_every_parameter_but_the_picking_bias_gets_a_gradient(tmp_path: Path) -> None:
    config = tiny_checkpoint(tmp_path, WeightFormat.F32, num_nextn_predict_layers=0)
    values = {n: p.requires_grad_() for n, p in parameters(tmp_path, config).items()}
    model = TrainableModel(config, values, paired_ids(config.vocab_size))
    sequences = tokens(2, config.vocab_size)
    output = model.forward(sequences)
    hidden, targets = output.hidden[:, :-1].flatten(0, 1), sequences[:, 1:].flatten()
    loss, _ = model.loss(hidden, targets, torch.ones(len(targets)))
    index_names = {n for n in values if ".indexer." in n}
    main = torch.autograd.grad(loss, list(values.values()), retain_graph=True, allow_unused=True)
    own = torch.autograd.grad(output.index_loss, list(values.values()), allow_unused=True)
    # What chooses has no gradient from the language, and teaches nothing else.
    assert {n for n, g in zip(values, own, strict=True) if g is not None} == index_names
    without = {n for n, g in zip(values, main, strict=True) if g is None or not g.any()}
    last = f"layers.{config.num_hidden_layers - 1}"
    assert {n for n in without if ".gate.bias" not in n} <= index_names | {f"{last}.hc_ffn_fn"}
    assert index_names <= without
