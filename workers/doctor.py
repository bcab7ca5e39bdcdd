"""Why is this model wrong? Files, tokenizer, every layer's numbers and a perplexity, in one look.

For "the small model is exact and the real one is not". It runs one forward pass on the CPU.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.config import EngineConfig, EngramPlacement, Numerics
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.errors import ConfigError
from ripresa.workers.golden_limits import EXACT, SAME_SETS, Limit
from ripresa.workers.host_memory import available_memory
from ripresa.workers.memory_plan import plan_memory
from ripresa.workers.model_runner import DEFAULT_WORKSPACE_BYTES, kv_layout, load_runner
from ripresa.workers.models.checkpoint import Checkpoint, ProgressLines
from ripresa.workers.models.checkpoint_tokenizer import checkpoint_tokenizer, usable_tokenizer
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import Ids, compressed_ids, pad_ids, paired_ids
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.models.deepseek_v41.model import Observer
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan
from ripresa.workers.transfer.base import LaneConfig
from ripresa.workers.verify_golden import load_golden, on_grids

Echo = Callable[[str], None]

NUM_TEXT_TOKENS = 256
_COMPARED = ("engram_rows", "attn_input", "selected", "hidden", "pre_mix")


def examine(folder: Path, golden: Path | None, echo: Echo, *, record: bool = False) -> bool:
    """Look at everything that can be looked at; True if nothing is wrong.

    Args:
        folder: a checkpoint folder; its tokenizer.json is used if it is there.
        golden: a golden folder whose prompt this checkpoint is held against, layer by layer.
        record: write the files' hashes to SHA256SUMS first.

    Raises:
        RipresaError: the folder is no checkpoint, does not fit into memory, or its hashes cannot be
            written.
    """
    config = ModelConfig.from_file(folder / "config.json")
    good = CheckpointFiles(folder).check(echo, record=record)
    with Checkpoint(folder) as checkpoint:
        inventory = take_inventory(checkpoint.entries, config)
    echo(f"tensors: {len(inventory.stored)}, as config.json implies")
    tokenizer = checkpoint_tokenizer(folder)
    ids: Ids | None = None
    if tokenizer is not None and config.engram.layer_ids:
        with usable_tokenizer():
            ids = compressed_ids(tokenizer)
        distinct, expected = int(ids.max()) + 1, config.engram.compressed_vocab_size
        good &= distinct == expected
        verdict = "as" if distinct == expected else f"WRONG: {expected} in"
        echo(f"compressed ids: {distinct} distinct texts, {verdict} config.json")
        ids = pad_ids(ids, config.vocab_size, config.engram.pad_token_id)
    if golden is not None:
        good &= _compare(folder, config, golden, ids, echo)
    good &= _run(folder, config, tokenizer, ids, echo)
    if not good:
        echo("SOMETHING IS WRONG")
    elif tokenizer is None:
        echo(
            "nothing wrong was found, but there is no tokenizer.json: NOT CHECKED are compressed "
            "ids and the perplexity of a text"
        )
    else:
        echo("nothing wrong was found")
    return good


def shipped_text() -> str:
    """The beginning of the bundled corpus, enough for `NUM_TEXT_TOKENS`."""
    with lzma.open(DEMO_MODEL / "corpus.txt.xz", "rt", encoding="utf-8") as corpus:
        return corpus.read(16 * NUM_TEXT_TOKENS)


def _run(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, ids: Ids | None, echo: Echo
) -> bool:
    """Scale and NaN of every layer, and the perplexity, on the shipped text.

    Without a tokenizer on any token ids, and then without a perplexity.
    """
    if tokenizer is None:
        what = "random token ids, for want of a tokenizer.json"
        drawn = Random(0).choices(range(config.vocab_size), k=NUM_TEXT_TOKENS - 1)
        ids = paired_ids(config.vocab_size)
    else:
        what = "tokens of the shipped text"
        with usable_tokenizer():
            drawn = tokenizer.encode(shipped_text(), add_special_tokens=False).ids
    tokens = (config.bos_token_id, *drawn[: NUM_TEXT_TOKENS - 1])
    if max(tokens) >= config.vocab_size:
        echo(
            f"shipped text: WRONG, tokenizer.json gives id {max(tokens)} and config.json has a "
            f"vocabulary of {config.vocab_size}"
        )
        return False
    scales = _Scales()
    logits = _forward(folder, config, tokens, ids, KVFormat.PACKED, scales.observe, echo)
    echo(f"layers, on {len(tokens)} {what}")
    for line in scales.lines():
        echo(line)
    if tokenizer is None:
        finite = scales.num_broken == 0 and bool(logits.isfinite().all())
        if not finite:
            echo("layers: WRONG, not every number is finite")
        return finite
    expected = torch.tensor(tokens[1:])
    loss = torch.nn.functional.cross_entropy(logits[:-1], expected).item()
    finite = math.isfinite(loss) and scales.num_broken == 0
    perplexity = math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan
    echo(
        f"perplexity: {perplexity:.2f} (a model that has learnt nothing: {config.vocab_size})"
        + ("" if finite else ": WRONG, not every number is finite")
    )
    return finite


class _Scales:
    """Root mean square, largest magnitude and count of broken numbers, by layer."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[float, float, int]] = {}
        self.num_broken = 0

    def observe(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        if name not in ("attn_input", "hidden"):
            return
        broken = int((~tensor.isfinite()).sum())
        self.num_broken += broken
        values = tensor.double()
        rms, largest = values.square().mean().sqrt().item(), values.abs().max().item()
        self._seen[layer, name] = (rms, largest, broken)

    def lines(self) -> Iterator[str]:
        labels = {"attn_input": "attention input", "hidden": "stream"}
        layers = sorted({layer for layer, _ in self._seen})
        for layer in layers:
            parts = []
            for name, label in labels.items():
                rms, largest, broken = self._seen[layer, name]
                note = f", {broken} NOT FINITE" if broken else ""
                parts.append(f"{label} rms {rms:9.3g} max {largest:9.3g}{note}")
            yield f"  {layer:>3}  {'   '.join(parts)}"


def _compare(folder: Path, config: ModelConfig, case: Path, ids: Ids | None, echo: Echo) -> bool:
    """Whether the checkpoint computes what a golden folder has; names the first layer where not."""
    reference = load_golden(case)
    tokens = tuple(reference["token_ids"].tolist())
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        raise ConfigError("--golden", f"{case} has token ids outside this model's vocabulary")
    gridded = on_grids(reference, config)
    first = _FirstDifference(config, reference, gridded)
    hash_ids = paired_ids(config.vocab_size) if ids is None else ids
    kv_format = KVFormat.PACKED if gridded else KVFormat.FLOAT32
    logits = _forward(folder, config, tokens, hash_ids, kv_format, first.observe, echo)
    first.compare("official.logits", "logits", logits, Limit(1e-4, 5e-3 if gridded else None))
    if first.found is None:
        echo(f"golden: every layer agrees with {case}, {first.num_compared} tensors")
        return True
    echo(f"golden: the first difference from {case} is {first.found}")
    return False


class _FirstDifference:
    """Holds tensors against their references as they are computed."""

    def __init__(
        self, config: ModelConfig, reference: Mapping[str, torch.Tensor], gridded: bool
    ) -> None:
        self._engram_layers = config.engram.layer_ids
        self._reference = reference
        self._limit = Limit(5e-4, 25e-3 if gridded else None)
        self.found: str | None = None
        self.num_compared = 0

    def observe(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "engram_rows":
            stacked = self._reference.get("official.engram_rows")
            if stacked is not None:
                column = self._engram_layers.index(layer)
                self._judge(f"{name} of layer {layer}", stacked[:, column], tensor, EXACT)
        elif name == "selected":
            self.compare(
                f"official.selected.{layer}", f"{name} of layer {layer}", tensor, SAME_SETS
            )
        elif name in _COMPARED:
            stacked = self._reference.get(f"official.{name}")
            if stacked is not None and layer < len(stacked):
                self._judge(f"{name} of layer {layer}", stacked[layer], tensor, self._limit)

    def compare(self, key: str, what: str, tensor: torch.Tensor, limit: Limit) -> None:
        expected = self._reference.get(key)
        if expected is not None:
            self._judge(what, expected, tensor, limit)

    def _judge(
        self, what: str, expected: torch.Tensor, computed: torch.Tensor, limit: Limit
    ) -> None:
        self.num_compared += 1
        if self.found is not None:
            return
        worst, good = limit.judge(expected, computed)
        if not good:
            self.found = f"{what}: off by {worst:.3g}, at most {limit.usual:g} is rounding"


def _forward(
    folder: Path,
    config: ModelConfig,
    tokens: tuple[int, ...],
    ids: Ids | None,
    kv_format: KVFormat,
    observer: Observer,
    echo: Echo,
) -> torch.Tensor:
    """Logits of all tokens, in one step of the whole model: [len(tokens), vocab]."""
    num_blocks = -(-len(tokens) // config.sliding_window)
    engine = EngineConfig(
        max_batched_tokens=len(tokens),
        max_num_seqs=1,
        num_blocks=num_blocks,
        kv_format=kv_format,
        engram_placement=EngramPlacement.NVME,  # one step reads few rows
    )
    plan = plan_memory(
        config,
        Half.ALL,
        engine,
        LaneConfig(max_lanes=1),
        kv_layout(config, kv_format, ""),
        DEFAULT_WORKSPACE_BYTES,
    )
    available = available_memory()
    if available is not None:
        plan.require_fit(available)
    runner = load_runner(
        folder,
        Half.ALL,
        num_blocks=num_blocks,
        num_slots=1,
        numerics=Numerics.FAST,
        kv_format=kv_format,
        engram_placement=engine.engram_placement,
        compressed_ids=ids,
        poison=True,
        observer=observer,
        progress=ProgressLines("reading the model", echo),
    )
    step = SequenceStep(
        slot=0,
        block_table=tuple(range(num_blocks)),
        token_ids=tokens,
        encoder_start=0,
        decoder_start=0,
        decoder_stop=len(tokens),
        return_logits=True,
    )
    return runner.execute(StepPlan(0, (step,))).logits[0]
