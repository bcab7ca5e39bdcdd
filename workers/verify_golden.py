"""Does this implementation compute what the reference did? A golden folder, tensor by tensor.

Every logit tensor is computed in several ways (one process or split over an encoder and a decode
worker, whole or in chunks, alone or batched with strangers, blocks anywhere); the worst difference
counts. All ways run step plans on the real runner, as the engines do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ripresa.kernels import dispatch as ops
from ripresa.workers.cache.kv_layout import KVFormat
from ripresa.workers.config import EngramPlacement, Numerics
from ripresa.workers.errors import CheckpointError, RipresaError
from ripresa.workers.golden_limits import EXACT, SAME_SETS, GridStep, Limit
from ripresa.workers.model_runner import TorchModelRunner, load_runner
from ripresa.workers.models.base import EncoderOutput, StepOutput
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.engram_ids import paired_ids
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

Echo = Callable[[str], None]

_INPUTS = ("token_ids", "prefill_length")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the same numbers.

    Attributes:
        split: encoder half and decoder half on two workers, state handed over as bytes.
        chunk: rows a prefill chunk; None for the whole prompt at once.
        random_chunks: chunks of any size instead.
        strangers: other sequences that share every step.
    """

    name: str
    split: bool = False
    chunk: int | None = None
    random_chunks: bool = False
    strangers: int = 0
    numerics: Numerics = Numerics.FAST
    round_inputs: bool = False
    engram_placement: EngramPlacement = EngramPlacement.HOST_SHARED


@dataclass(frozen=True, slots=True)
class Prefill:
    """A recipe in the terms of a step plan."""

    tokens: tuple[int, ...]
    start: int
    write_floor: int
    decoder_start: int
    layer_exact: bool = False


class Machine:
    """One or two workers' runners and a sequence on them."""

    def __init__(
        self, folder: Path, way: Way, kv_format: KVFormat, capacity: int, seed: int
    ) -> None:
        self.way = way
        self.seen: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._random = random.Random(seed)
        self.config = ModelConfig.from_file(folder / "config.json")
        window = self.config.sliding_window
        per_sequence = -(-capacity // window)
        sequences = 1 + way.strangers

        def runner(half: Half) -> TorchModelRunner:
            return load_runner(
                folder,
                half,
                num_blocks=per_sequence * sequences + 3,
                num_slots=sequences + 1,
                numerics=way.numerics,
                kv_format=kv_format,
                round_inputs=way.round_inputs,
                engram_placement=way.engram_placement,
                compressed_ids=paired_ids(self.config.vocab_size),
                poison=True,
                observer=None if way.strangers else self._observe,
            )

        self.decoder = runner(Half.ALL)
        self.encoder = runner(Half.ENCODER) if way.split else self.decoder
        blocks = list(range(per_sequence * sequences + 3))
        self._random.shuffle(blocks)
        self._tables = [
            tuple(blocks[i * per_sequence : (i + 1) * per_sequence]) for i in range(sequences)
        ]
        self.slot = sequences
        self._step = 0

    @property
    def table(self) -> tuple[int, ...]:
        return self._tables[0]

    def _observe(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        self.seen.setdefault((name, layer), []).append(tensor.clone())

    def forget_windows(self) -> None:
        """What a hit finds: pools stay, rings and open pairs are gone."""
        self.decoder.release_slot(self.slot)
        self.encoder.release_slot(self.slot)
        self.seen.clear()

    def prefill(self, recipe: Prefill) -> torch.Tensor:
        """Run a prefill; logits of all its decoder rows."""
        length = len(recipe.tokens)
        logits: list[torch.Tensor] = []
        handed: list[EncoderOutput] = []
        source_floor = recipe.start if recipe.layer_exact else recipe.decoder_start
        first = recipe.start
        while first < length:
            last = min(first + self._chunk(length), length)
            decoder_start = max(first, recipe.decoder_start)
            has_tail = decoder_start < last
            local_tail = has_tail and not self.way.split
            step = SequenceStep(
                slot=self.slot,
                block_table=self.table,
                token_ids=recipe.tokens[first:last],
                lookback_ids=recipe.tokens[max(0, first - 3) : first],
                encoder_start=first,
                swa_floor=recipe.start,
                write_floor=recipe.write_floor,
                decoder_start=decoder_start if local_tail else last,
                decoder_stop=last,
                decoder_floor=recipe.decoder_start,
                source_floor=source_floor,
                source_window_from=0 if recipe.layer_exact else None,
                hand_over_from=recipe.decoder_start if self.way.split else None,
                return_logits=local_tail,
            )
            output = self._execute(self.encoder, step)
            if local_tail:
                logits.append(output.logits[self.slot])
            elif has_tail:
                handed.append(output.encoder_output[self.slot])
            first = last
        if self.way.split:
            logits.append(self._hand_over(recipe, handed, source_floor))
        return torch.cat(logits)

    def _chunk(self, length: int) -> int:
        if self.way.random_chunks:
            return self._random.randint(1, 2 * self.config.sliding_window)
        return self.way.chunk or length

    def _hand_over(
        self, recipe: Prefill, handed: list[EncoderOutput], source_floor: int
    ) -> torch.Tensor:
        length = len(recipe.tokens)
        output = EncoderOutput(
            handed[0].start,
            torch.cat([part.hidden for part in handed]),
            torch.cat([part.pre_mix for part in handed]),
        )
        whole = self.table[: length // self.config.sliding_window]
        self.decoder.import_blocks(whole, self.encoder.export_blocks(whole))
        payload = self.encoder.export_state(
            self.slot, self.table, length, output, recipe.layer_exact
        )
        expected = self.decoder.state_bytes(length, output.start, recipe.layer_exact)
        if payload.numel() != expected:
            raise CheckpointError(f"a hand-over of {payload.numel()} bytes, expected {expected}")
        inbound = self.decoder.import_state(
            self.slot, self.table, length, output.start, recipe.layer_exact, payload
        )
        logits = []
        first = recipe.decoder_start
        while first < length:
            last = min(first + self._chunk(length), length)
            step = SequenceStep(
                slot=self.slot,
                block_table=self.table,
                decoder_start=first,
                decoder_stop=last,
                decoder_floor=recipe.decoder_start,
                source_floor=source_floor,
                inbound=True,
                return_logits=True,
            )
            plan = StepPlan(self._step, (step,))
            logits.append(self.decoder.execute(plan, {self.slot: inbound}).logits[self.slot])
            first = last
        return torch.cat(logits)

    def decode(self, token: int, position: int, recipe: Prefill) -> torch.Tensor:
        """Logits of one more row."""
        step = SequenceStep(
            slot=self.slot,
            block_table=self.table,
            token_ids=(token,),
            lookback_ids=recipe.tokens[max(0, position - 3) : position],
            encoder_start=position,
            swa_floor=recipe.start,
            decoder_start=position,
            decoder_stop=position + 1,
            decoder_floor=recipe.decoder_start,
            source_floor=recipe.start if recipe.layer_exact else recipe.decoder_start,
            return_logits=True,
        )
        return self._execute(self.decoder, step).logits[self.slot]

    def _execute(self, runner: TorchModelRunner, step: SequenceStep) -> StepOutput:
        self._step += 1
        steps = [step]
        for number in range(self.way.strangers):
            tokens = tuple(
                self._random.randrange(self.config.vocab_size) for _ in range(5 + 7 * number)
            )
            decoding = step.num_decoder_rows > 0
            steps.append(
                SequenceStep(
                    slot=number,
                    block_table=self._tables[number + 1],
                    token_ids=tokens,
                    decoder_start=0,
                    decoder_stop=len(tokens) if decoding else 0,
                )
            )
        self._random.shuffle(steps)
        return runner.execute(StepPlan(self._step, tuple(steps)))

    def rows(self, name: str, layer: int) -> torch.Tensor:
        return torch.cat(self.seen[name, layer])


@dataclass(slots=True)
class _Verdict:
    limit: Limit
    worst: float = 0.0
    good: bool = True
    num_ways: int = 0


class Report:
    """Worst difference a tensor, and the lines that say so."""

    def __init__(self, golden: Mapping[str, torch.Tensor], echo: Echo) -> None:
        self._golden = golden
        self._echo = echo
        self._verdicts: dict[str, _Verdict] = {}

    def compare(self, name: str, computed: torch.Tensor, limit: Limit) -> None:
        """Add one computation of a golden tensor; absent tensors are not asked for."""
        expected = self._golden.get(name)
        if expected is None:
            return
        worst, good = limit.judge(expected, computed)
        verdict = self._verdicts.setdefault(name, _Verdict(limit))
        verdict.worst = max(verdict.worst, worst)
        verdict.good &= good
        verdict.num_ways += 1

    def finish(self, skipped: Mapping[str, str]) -> bool:
        """Print every tensor's line; whether something was compared and all of it agreed."""
        width = max(len(name) for name in self._golden)
        failed = False
        for name in sorted(self._golden):
            verdict = self._verdicts.get(name)
            if name in _INPUTS:
                text = "input"
            elif verdict is not None:
                failed |= not verdict.good
                text = (
                    f"max difference {verdict.worst:.2e}  limit {verdict.limit.usual:.0e}"
                    f"  {verdict.num_ways:>3} ways  {'ok' if verdict.good else 'DIFFERS'}"
                )
            elif name in skipped:
                text = f"skipped: {skipped[name]}"
            else:
                failed = True
                text = "UNKNOWN: nothing computes a tensor of this name"
            self._echo(f"  {name:<{width}}  {text}")
        return not failed and bool(self._verdicts)


def verify_golden(
    paths: list[Path], echo: Echo, *, quick: bool = False, progress: Echo | None = None
) -> bool:
    """Compare each golden folder; True if every tensor of every folder agrees, and there is one.

    `quick` computes in one process and split over two workers, and in no other way; `progress`
    hears of each way before it is computed.

    Raises nothing for a bad folder: it is reported and counts as a difference.
    """
    verdicts = []
    for path in paths:
        if path.is_file():
            echo(f"{path}: a file, no golden folder, left out")
            continue
        echo(f"{path}")
        try:
            agreed = _verify_case(path, echo, quick, progress or (lambda line: None))
        except RipresaError as error:
            echo(f"  cannot be verified: {error}")
            agreed = False
        echo(f"  {'agrees' if agreed else 'DOES NOT AGREE'}")
        verdicts.append(agreed)
    return bool(verdicts) and all(verdicts)


def _verify_case(path: Path, echo: Echo, quick: bool, progress: Echo) -> bool:
    golden = load_golden(path)
    config = ModelConfig.from_file(path / "checkpoint" / "config.json")
    report = Report(golden, echo)
    case = _Case(path / "checkpoint", config, golden, report)
    ways = case.ways(quick)
    for number, way in enumerate(ways, 1):
        progress(f"{path.name}: way {number} of {len(ways)}, {way.name}")
        case.check(way)
    drafts = [name for name in golden if name.startswith("official.dspark.")]
    return report.finish(dict.fromkeys(drafts, "draft stages are not supported yet"))


def load_golden(path: Path) -> dict[str, torch.Tensor]:
    try:
        golden = load_file(path / "golden.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}/golden.safetensors cannot be read: {error}") from error
    try:
        listed = json.loads((path / "report.json").read_text(encoding="utf-8"))["tensors"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}/report.json cannot be read: {error!r}") from error
    if set(listed) != set(golden):
        names = ", ".join(sorted(set(listed) ^ set(golden)))
        raise CheckpointError(f"report.json and golden.safetensors disagree about: {names}")
    for name in ("token_ids", "prefill_length"):
        if name not in golden:
            raise CheckpointError(f"{path}/golden.safetensors lacks {name}", tensor=name)
    return golden


class _Case:
    """The computations of one golden folder."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        golden: Mapping[str, torch.Tensor],
        report: Report,
    ) -> None:
        self._folder = folder
        self._config = config
        self._golden = golden
        self._report = report
        if golden["prefill_length"].shape != (1,) or golden["token_ids"].dim() != 1:
            raise CheckpointError("token_ids and prefill_length must have one axis")
        self._tokens = tuple(golden["token_ids"].tolist())
        self._prefill_length = int(golden["prefill_length"][0])
        gridded = on_grids(golden, config)
        self._format = KVFormat.PACKED if gridded else KVFormat.FLOAT32
        self._logits = Limit(1e-4, 5e-3 if gridded else None)
        self._streams = Limit(5e-4, 25e-3 if gridded else None)
        self._w8a8 = Limit(1e-3, 5e-3)
        if not 0 < self._prefill_length <= len(self._tokens):
            raise CheckpointError("prefill_length lies outside the prompt", tensor="prefill_length")
        if min(self._tokens) < 0 or max(self._tokens) >= config.vocab_size:
            raise CheckpointError("token_ids lie outside the vocabulary", tensor="token_ids")

    def ways(self, quick: bool) -> list[Way]:
        ways = [Way("one process"), Way("split", split=True)]
        if not quick:
            ways += self._more_ways()
        if self._format is KVFormat.PACKED:
            # On grids a rounding may land on either side: compare one set of roundings, and find
            # it the same in every way.
            ways = [replace(way, numerics=Numerics.DETERMINISTIC) for way in ways]
        if "official.w8a8_logits" in self._golden:
            ways += [replace(way, round_inputs=True) for way in ways]
        return ways

    def _more_ways(self) -> list[Way]:
        window = self._config.sliding_window
        chunks = sorted({1, 2, 3, 5, window - 1, window, window + 1, 2 * window + 3})
        ways = [Way("deterministic", numerics=Numerics.DETERMINISTIC)]
        ways += [Way(f"chunks of {c}", chunk=c) for c in chunks if c > 0]
        ways += [Way("random chunks", random_chunks=True)]
        ways += [Way("split, random chunks", split=True, random_chunks=True)]
        ways += [Way(f"split, chunks of {c}", split=True, chunk=c) for c in (1, 3, window)]
        ways += [Way("strangers", strangers=3), Way("strangers, chunks", strangers=2, chunk=5)]
        ways += [Way("split with strangers", split=True, chunk=window, strangers=2)]
        if self._config.engram.layer_ids:
            others = (EngramPlacement.HOST_NUMA, EngramPlacement.NVME)
            ways += [Way(f"Engram by {place}", engram_placement=place) for place in others]
        return ways

    def check(self, way: Way) -> None:
        if way.round_inputs:
            machine = self._machine(way)
            logits = machine.prefill(Prefill(self._tokens, 0, 0, 0))
            self._report.compare("official.w8a8_logits", logits, self._w8a8)
            return
        machine = self._machine(way)
        self._full(machine)
        self._decode(machine)
        self._decoder_replays(machine)
        self._encoder_replays(machine)

    def _machine(self, way: Way) -> Machine:
        capacity = len(self._tokens) + 4
        return Machine(self._folder, way, self._format, capacity, seed=len(way.name))

    def _full(self, machine: Machine) -> None:
        machine.forget_windows()
        logits = machine.prefill(Prefill(self._tokens, 0, 0, 0))
        compare = self._report.compare
        compare("official.logits", logits, self._logits)
        if machine.way.strangers:
            return
        layers = range(self._config.num_hidden_layers)
        for name in ("hidden", "pre_mix", "attn_input"):
            stacked = torch.stack([machine.rows(name, layer) for layer in layers])
            compare(f"official.{name}", stacked, replace(self._streams, axis=1))
        compare("official.final_norm", machine.rows("final_norm", 0), self._streams)
        if self._config.engram.layer_ids:
            looked_up = [machine.rows("engram_rows", x) for x in self._config.engram.layer_ids]
            compare("official.engram_rows", torch.stack(looked_up, dim=1), EXACT)
        for layer in self._config.index_source_layer_ids:
            compare(f"official.selected.{layer}", machine.rows("selected", layer), SAME_SETS)

    def _decode(self, machine: Machine) -> None:
        machine.forget_windows()
        length = self._prefill_length
        recipe = Prefill(self._tokens[:length], 0, 0, 0)
        logits = [machine.prefill(recipe)[-1:]]
        self._state("official.state", machine, 0, length, compare_open=True)
        followed = Prefill(self._tokens, 0, 0, 0)
        for position in range(length, len(self._tokens)):
            logits.append(machine.decode(self._tokens[position], position, followed))
        self._report.compare("official.decode_logits", torch.cat(logits), self._logits)

    def _state(
        self, prefix: str, machine: Machine, floor: int, length: int, compare_open: bool
    ) -> None:
        config, cache = self._config, machine.decoder.cache
        for layer in range(config.num_hidden_layers):
            name = f"{prefix}.swa.{layer}"
            positions = self._golden.get(
                f"{name}.positions", self._golden.get(f"{prefix}.swa.positions")
            )
            if positions is None:
                continue
            first, last = int(positions[0]), int(positions[-1]) + 1
            rows = cache.window_rows(layer, cache.ring_index(machine.slot, first, last))
            self._stored(f"{name}.rows", rows, GridStep.of_window(config.head_dim))
            here = torch.arange(max(floor, length - config.sliding_window), length)
            if f"{name}.positions" in self._golden:
                here = here[-len(positions) :]
                self._report.compare(f"{name}.positions", here, EXACT)
            else:
                self._report.compare(f"{prefix}.swa.positions", here, EXACT)
        for layer in config.kv_source_layer_ids:
            ratio = config.ratio(layer)
            index = cache.entry_index(machine.table, ratio)[: length // ratio]
            entries, keys = cache.entries(layer, index), cache.index_keys(layer, index)
            self._stored(f"{prefix}.main.{layer}", entries, GridStep.of_entry(config.head_dim))
            step = GridStep.of_index_key(config.index_head_dim)
            self._stored(f"{prefix}.index_key.{layer}", keys, step)
            if compare_open and ratio == 2 and length % 2:
                pair = cache.open_pairs[layer][machine.slot][None]
                self._stored(f"{prefix}.open.{layer}", pair, None)

    def _stored(self, name: str, computed: torch.Tensor, step: GridStep | None) -> None:
        """Compare cached rows, relative to the tensor's largest value.

        Args:
            step: what one row in ten may be off by; None for what is not on a grid.
        """
        expected = self._golden.get(name)
        if expected is None:
            return
        scale = max(float(expected.abs().max()) if expected.numel() else 1.0, 1.0)
        rare = step if self._format is KVFormat.PACKED else None
        self._report.compare(name, computed, Limit(1e-5 * scale, rare, least_rare=1))

    def _decoder_replays(self, machine: Machine) -> None:
        length = len(self._tokens)
        start = max(0, length - self._config.sliding_window)
        for variant in ("layer_exact", "floored"):
            name = f"spec.decoder_replay_{variant}"
            recipe = Prefill(self._tokens, 0, 0, start, variant == "layer_exact")
            self._tail(name, machine, recipe)

    def _tail(self, name: str, machine: Machine, recipe: Prefill) -> None:
        """A prefill whose decoder half runs on the tail, then three more tokens."""
        if f"{name}.logits" not in self._golden:
            return
        machine.forget_windows()
        self._report.compare(f"{name}.logits", machine.prefill(recipe), self._logits)
        length = len(recipe.tokens)
        self._report.compare(f"{name}.rows", torch.arange(recipe.decoder_start, length), EXACT)
        extra = self._golden.get(f"{name}.next3_logits")
        if extra is None:
            return
        tokens = self._tokens[: len(extra)]
        longer = Prefill(
            recipe.tokens + tokens, recipe.start, 0, recipe.decoder_start, recipe.layer_exact
        )
        following = [machine.decode(token, length + i, longer) for i, token in enumerate(tokens)]
        self._report.compare(f"{name}.next3_logits", torch.cat(following), self._logits)

    def _encoder_replays(self, machine: Machine) -> None:
        bounds = self._golden.get("spec.encoder_replay.bounds")
        if bounds is None:
            return
        start, prefix, length = (int(b) for b in bounds)
        window = self._config.sliding_window
        expected = [prefix - min(window, prefix), prefix, len(self._tokens)]
        self._report.compare("spec.encoder_replay.bounds", torch.tensor(expected), EXACT)
        if [start, prefix, length] != expected:
            return
        tail = max(0, length - window)
        for name, decoder_start, layer_exact in (
            ("spec.encoder_replay", start, False),
            ("spec.both_replays", tail, True),
            ("spec.both_replays_floored", tail, False),
        ):
            self._exact_prefix(machine, prefix)
            recipe = Prefill(self._tokens, start, prefix, decoder_start, layer_exact)
            if name == "spec.encoder_replay":
                logits = machine.prefill(recipe)
                self._report.compare(f"{name}.logits", logits, self._logits)
                self._state(f"{name}.state", machine, start, length, compare_open=True)
            else:
                self._tail(name, machine, recipe)

    def _exact_prefix(self, machine: Machine, prefix: int) -> None:
        """Fill the pools of [0, prefix) exactly, as an earlier request did, and nothing else."""
        machine.forget_windows()
        for cache in (machine.encoder.cache, machine.decoder.cache):
            for memory in (*cache.main.values(), *cache.keys.values()):
                memory.fill_(255)
        machine.prefill(Prefill(self._tokens[:prefix], 0, 0, 0))
        machine.forget_windows()


def on_grids(golden: Mapping[str, torch.Tensor], config: ModelConfig) -> bool:
    """Whether a case's cached rows were stored in the packed formats: then they lie on the grid."""
    stored = [
        tensor
        for name, tensor in golden.items()
        if ".state.swa." in name and name.endswith(".rows")
    ]
    if not stored or config.head_dim % 32:
        return False
    grid = ops.window_grid(config.head_dim)
    return all(torch.equal(grid.round_trip(rows), rows) for rows in stored)
