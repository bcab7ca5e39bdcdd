"""How is a step plan executed on one rank? Rows in, sampled tokens and encoder output out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import xxhash

from ripresa.workers.cache.kv_cache import KVCache
from ripresa.workers.cache.kv_layout import REWIND_TOKENS, KVFormat, KVLayout, PoolSpec
from ripresa.workers.config import EngramPlacement, Numerics
from ripresa.workers.errors import CheckpointError, ConfigError, InvalidArgument, RipresaError
from ripresa.workers.models.base import EncoderOutput, StepMasks, StepOutput
from ripresa.workers.models.checkpoint import Checkpoint, Progress
from ripresa.workers.models.checkpoint_tokenizer import (
    TOKENIZER_FILE,
    checkpoint_tokenizer,
    usable_tokenizer,
)
from ripresa.workers.models.deepseek_v41.config import ModelConfig, check_w8a8
from ripresa.workers.models.deepseek_v41.engram import Engram
from ripresa.workers.models.deepseek_v41.engram_ids import Ids, check_tokenizer, pad_ids
from ripresa.workers.models.deepseek_v41.engram_ids import compressed_ids as compressed_ids_of
from ripresa.workers.models.deepseek_v41.model import DeepseekV41, Observer
from ripresa.workers.models.deepseek_v41.rows import Rows, Run
from ripresa.workers.models.deepseek_v41.weights import Half, Weights, load_weights
from ripresa.workers.models.vocabulary import Vocabulary, read_vocabulary
from ripresa.workers.replay_plan import triangle
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.sampler import logprobs_of, sample_batch
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

DETERMINISTIC_ROWS = 16
"""Measured: from 16 rows on, a float32 product gives each row the same bits in any batch."""

DEFAULT_WORKSPACE_BYTES = 64 << 20

_HASHED_WHOLE_BYTES = 1 << 30
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 16 << 20


class TorchModelRunner:
    """A V4.1-class model on one device; implements `ModelRunner`.

    Args:
        config: geometry.
        weights: the encoder half or the whole model.
        num_blocks, num_slots: KV pool size, and sequences at once.
        kv_format: how cached rows are stored.
        round_inputs: round the inputs of linears that the release quantises (`w8a8`).
        compressed_ids: [vocab_size] int64 for n-gram hashing; needed by a model with Engram.
        poison: fill unwritten KV memory with NaN (tests).
        observer: sees intermediate tensors (verification).
        folder: the checkpoint's, for its vocabulary; None for a model without one.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_blocks: int,
        num_slots: int,
        numerics: Numerics = Numerics.FAST,
        model_digest: str = "",
        workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
        kv_format: KVFormat = KVFormat.PACKED,
        round_inputs: bool = False,
        compressed_ids: Ids | None = None,
        poison: bool = False,
        observer: Observer | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config = config
        self._beside = partial(
            TorchModelRunner,
            config,
            weights,
            numerics=numerics,
            model_digest=model_digest,
            workspace_bytes=workspace_bytes,
            kv_format=kv_format,
            round_inputs=round_inputs,
            compressed_ids=compressed_ids,
            poison=poison,
            folder=folder,
        )
        self._folder = folder
        self.weights = weights
        if round_inputs:
            check_w8a8(config)
        self.layout = kv_layout(config, kv_format, model_digest, round_inputs)
        self.device = weights.embed.device
        self._min_rows = DETERMINISTIC_ROWS if numerics is Numerics.DETERMINISTIC else 0
        last = config.split + 1 if weights.half is Half.ENCODER else config.num_hidden_layers
        self.cache = KVCache(
            self.layout, num_blocks, num_slots, range(last), self.device, poison=poison
        )
        self._engram = None
        if config.engram.layer_ids:
            if compressed_ids is None:
                raise ConfigError(
                    "model.path", "a model with Engram needs its tokenizer.json to hash n-grams"
                )
            self._engram = Engram(
                config, weights.engram, compressed_ids, self._min_rows, round_inputs
            )
        self._model = DeepseekV41(
            config,
            weights,
            self.cache,
            self._min_rows,
            workspace_bytes,
            self._engram,
            round_inputs,
            observer,
        )

    def beside(self, num_blocks: int, num_slots: int) -> TorchModelRunner:
        """The same model on the same weights, with KV memory of its own."""
        return self._beside(num_blocks=num_blocks, num_slots=num_slots)

    @property
    def window(self) -> int:
        return self.layout.window

    @property
    def geometry(self) -> ReplayGeometry:
        split = self.config.split
        num_decoder_layers = self.config.num_hidden_layers - split
        return ReplayGeometry(self.window, REWIND_TOKENS, split, num_decoder_layers)

    @property
    def layout_digest(self) -> bytes:
        return self.layout.digest

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks

    @property
    def num_slots(self) -> int:
        return self.cache.num_slots

    @property
    def eos_token_id(self) -> int | None:
        return self.config.eos_token_id

    @property
    def max_model_len(self) -> int:
        return self.config.max_position_embeddings

    def vocabulary(self) -> Vocabulary:
        if self._folder is None or self.config.eos_token_id is None:
            raise CheckpointError(
                "the model has no tokenizer.json or no end of sentence, so no constraint can hold"
            )
        return read_vocabulary(self._folder, self.config.vocab_size, self.config.eos_token_id)

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        output = StepOutput()
        encoded = self._encode([s for s in plan.sequences if s.num_encoder_rows], output)
        decoding = [s for s in plan.sequences if s.num_decoder_rows]
        if decoding:
            handed_over = inbound or {}
            sources = {s.slot: (handed_over if s.inbound else encoded)[s.slot] for s in decoding}
            self._decode(decoding, sources, output, masks)
        return output

    def _encode(
        self, steps: Sequence[SequenceStep], output: StepOutput
    ) -> dict[int, EncoderOutput]:
        if not steps:
            return {}
        runs = [
            Run(
                s.slot,
                s.encoder_start,
                s.encoder_stop,
                s.swa_floor,
                s.write_floor,
                s.block_table,
                s.cut_windows,
                self._layer_starts(s.exact_from),
            )
            for s in steps
        ]
        rows = self._rows(runs)
        token_ids = torch.tensor(
            [t for s in steps for t in s.token_ids], dtype=torch.int64, device=self.device
        )
        source_windows = [
            (0, 0) if s.source_window_from is None else (s.source_window_from, s.decoder_floor)
            for s in steps
        ]
        table_rows: dict[int, Ids] = {}
        if self._engram is not None:
            looked_up = [(s.token_ids, s.lookback_ids, s.encoder_start) for s in steps]
            table_rows = self._engram.lookup(looked_up)
        made = self._model.encode(rows, token_ids, source_windows, table_rows)
        output.num_encoder_rows = rows.num_rows
        output.num_row_layers = made.num_row_layers
        self._take_windows(steps, output)
        encoded: dict[int, EncoderOutput] = {}
        first = 0
        for step, run in zip(steps, made.rows.runs, strict=True):
            part = slice(first, first + run.num_rows)
            first = part.stop
            mine = EncoderOutput(run.start, made.streams[part], made.pre[part])
            encoded[step.slot] = mine
            if step.hand_over_from is not None and step.hand_over_from < step.encoder_stop:
                start = max(step.hand_over_from, run.start)
                output.encoder_output[step.slot] = _slice(mine, start, step.encoder_stop)
        return encoded

    def _layer_starts(self, exact_from: int | None) -> tuple[int, ...]:
        geometry = self.geometry
        if exact_from is None:
            return ()
        return triangle(exact_from, geometry.window, geometry.num_encoder_layers)

    def _take_windows(self, steps: Sequence[SequenceStep], output: StepOutput) -> None:
        """Give the windows that the layers cut to the sequences that asked for them."""
        asked = [(s.slot, boundary) for s in steps for boundary in s.cut_windows]
        if not asked:
            return
        cut = self.cache.cut_rows
        layers = torch.stack([cut.pop(layer) for layer in range(self.layout.split)])
        windows = layers.view(self.layout.split, len(asked), -1)
        for number, (slot, boundary) in enumerate(asked):
            payload = windows[:, number].contiguous().cpu().flatten()
            output.windows.setdefault(slot, {})[boundary] = payload

    def _decode(
        self,
        steps: Sequence[SequenceStep],
        sources: Mapping[int, EncoderOutput],
        output: StepOutput,
        masks: StepMasks | None,
    ) -> None:
        runs = [
            Run(s.slot, s.decoder_start, s.decoder_stop, s.decoder_floor, 0, s.block_table)
            for s in steps
        ]
        rows = self._rows(runs)
        inputs = [_slice(sources[s.slot], s.decoder_start, s.decoder_stop) for s in steps]
        streams = torch.cat([i.hidden for i in inputs])
        pre = torch.cat([i.pre_mix for i in inputs])
        streams, pre = self._model.decode(rows, streams, pre, [s.source_floor for s in steps])
        output.num_decoder_rows = rows.num_rows
        self._finish(steps, streams, pre, output, masks)

    def _finish(
        self,
        steps: Sequence[SequenceStep],
        streams: torch.Tensor,
        pre: torch.Tensor,
        output: StepOutput,
        masks: StepMasks | None,
    ) -> None:
        """Logits of the rows that need them, and the next tokens."""
        wanted: list[int] = []
        last = -1
        for step in steps:
            first = last + 1
            last += step.num_decoder_rows
            if step.return_logits:
                wanted += range(first, last + 1)
            elif step.sampling is not None:
                wanted.append(last)
        if not wanted:
            return
        if len(wanted) < len(streams):
            index = torch.tensor(wanted, device=self.device)
            streams, pre = streams.index_select(0, index), pre.index_select(0, index)
        logits = self._model.logits(streams, pre)
        first = 0
        sampled: list[tuple[SequenceStep, int]] = []
        for step in steps:
            count = step.num_decoder_rows if step.return_logits else step.sampling is not None
            if step.return_logits:
                output.logits[step.slot] = logits[first : first + count]
            first += count
            if step.sampling is not None:
                sampled.append((step, first - 1))
        if sampled:
            index = torch.tensor([row for _, row in sampled], device=self.device)
            rows = logits.index_select(0, index)
            params = [step.sampling for step, _ in sampled if step.sampling is not None]
            tokens = sample_batch(
                rows,
                params,
                [step.decoder_stop for step, _ in sampled],
                [step.rules for step, _ in sampled],
                [None if masks is None else masks.of(step.slot) for step, _ in sampled],
            )
            for row, asked, (step, _), token in zip(rows, params, sampled, tokens, strict=True):
                if isinstance(token, RipresaError):
                    output.errors[step.slot] = token
                    continue
                output.sampled[step.slot] = token
                if step.return_sampled_logits:
                    output.sampled_logits[step.slot] = row.to("cpu", copy=True)
                if asked.logprobs is not None:
                    output.logprobs[step.slot] = logprobs_of(row, token, asked.logprobs)

    def _rows(self, runs: Sequence[Run]) -> Rows:
        return Rows(runs, self.layout, self.device, self.config.num_attention_heads, self._min_rows)

    def block_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.layout.block_bytes

    def export_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self.cache.export_blocks(block_ids)

    def import_blocks(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        self.cache.import_blocks(block_ids, payload)

    @property
    def window_bytes(self) -> int:
        return self.layout.window_bytes(self.window, self.layout.split)

    def state_bytes(self, num_tokens: int, output_start: int, source_window: bool) -> int:
        return self.layout.state_bytes(num_tokens, output_start, source_window)

    def rows_bytes(self, num_rows: int) -> int:
        return num_rows * self.layout.output_row_bytes

    def export_rows(self, output: EncoderOutput) -> torch.Tensor:
        parts = (output.hidden, output.pre_mix)
        return torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in parts])

    def import_rows(self, start: int, num_rows: int, payload: torch.Tensor) -> EncoderOutput:
        n, d = self.layout.streams, self.layout.hidden_size
        # A copy: the payload is a staging buffer that the next section overwrites, and packed
        # parts before the streams leave them at any byte.
        values = payload.clone().view(torch.float32)
        hidden, pre_mix = values.split((num_rows * n * d, num_rows * n))
        return EncoderOutput(start, hidden.view(num_rows, n, d), pre_mix.view(num_rows, n))

    def export_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output: EncoderOutput,
        source_window: bool,
    ) -> torch.Tensor:
        if output.stop != num_tokens:
            raise InvalidArgument("output", f"ends at {output.stop}, the prompt at {num_tokens}")
        parts = self.cache.export_state(slot, block_table, num_tokens, output.start, source_window)
        return torch.cat((*parts, self.export_rows(output)))

    def import_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
        payload: torch.Tensor,
    ) -> EncoderOutput:
        rest = self.cache.import_state(
            slot, block_table, num_tokens, output_start, source_window, payload
        )
        return self.import_rows(output_start, num_tokens - output_start, rest)

    def import_window(self, slot: int, boundary: int, payload: torch.Tensor) -> None:
        self.cache.import_window(slot, boundary, payload)

    def export_image(self, slot: int, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        return torch.cat(self.cache.export_image(slot, block_table, num_tokens)).cpu()

    def image_bytes(self, num_tokens: int) -> int:
        return self.layout.image_bytes(num_tokens, len(self.cache.rings))

    def import_image(
        self, slot: int, block_table: Sequence[int], num_tokens: int, payload: torch.Tensor
    ) -> None:
        self.cache.import_image(slot, block_table, num_tokens, payload.to(self.device))

    def release_slot(self, slot: int) -> None:
        self.cache.release_slot(slot)


def kv_layout(
    config: ModelConfig, kv_format: KVFormat, model_digest: str, round_inputs: bool = False
) -> KVLayout:
    """The KV layout of a model; `model_digest` names geometry and weights."""
    return KVLayout(
        format=kv_format,
        window=config.sliding_window,
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        streams=config.hc_mult,
        hidden_size=config.hidden_size,
        split=config.split,
        pools=tuple(PoolSpec(layer, config.ratio(layer)) for layer in config.kv_source_layer_ids),
        model_digest=model_digest,
        round_inputs=round_inputs,
    )


def load_runner(
    folder: Path,
    half: Half,
    *,
    num_blocks: int,
    num_slots: int,
    numerics: Numerics,
    kv_format: KVFormat = KVFormat.PACKED,
    round_inputs: bool = False,
    engram_placement: EngramPlacement = EngramPlacement.HOST_SHARED,
    compressed_ids: Ids | None = None,
    poison: bool = False,
    observer: Observer | None = None,
    progress: Progress | None = None,
) -> TorchModelRunner:
    """Load one half of a checkpoint folder and its KV memory.

    Without `compressed_ids`, a model with Engram takes them from the folder's tokenizer.json.

    Raises:
        ConfigError, CheckpointError: naming the field or tensor at fault.
    """
    config = ModelConfig.from_file(folder / "config.json")
    with Checkpoint(folder, progress) as checkpoint:
        weights = load_weights(checkpoint, config, half, engram_placement)
    if config.engram.layer_ids and compressed_ids is None:
        compressed_ids = _compressed_ids(folder, config)
    return TorchModelRunner(
        config,
        weights,
        num_blocks=num_blocks,
        num_slots=num_slots,
        numerics=numerics,
        model_digest=model_digest(folder, config),
        kv_format=kv_format,
        round_inputs=round_inputs,
        compressed_ids=compressed_ids,
        poison=poison,
        observer=observer,
        folder=folder,
    )


def _compressed_ids(folder: Path, config: ModelConfig) -> Ids:
    """The compressed ids of a checkpoint's own tokenizer, checked against its config."""
    tokenizer = checkpoint_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError(
            "model.path", f"{folder} has no {TOKENIZER_FILE}; Engram hashes what it decodes"
        )
    with usable_tokenizer():
        ids = compressed_ids_of(tokenizer)
    check_tokenizer(ids, config.engram.compressed_vocab_size)
    return pad_ids(ids, config.vocab_size, config.engram.pad_token_id)


def model_digest(folder: Path, config: ModelConfig) -> str:
    """Names geometry and weights: the config, every tensor's name and form, and its bytes.

    Of checkpoints above a gigabyte, 4 KiB of every 16 MiB stand for the rest, and the last ones of
    each tensor: training changes weights everywhere.

    Raises:
        CheckpointError: the folder is no readable checkpoint.
    """
    digest = xxhash.xxh3_128(json.dumps(asdict(config), sort_keys=True).encode())
    with Checkpoint(folder) as checkpoint:
        entries = checkpoint.entries
        is_small = sum(entry.num_bytes for entry in entries.values()) <= _HASHED_WHOLE_BYTES
        for name in sorted(entries):
            entry = entries[name]
            digest.update(f"{name} {entry.dtype} {entry.shape} {entry.num_bytes}\n".encode())
            size = _SAMPLE_EVERY_BYTES if is_small else _SAMPLE_BYTES
            for piece in checkpoint.pieces(name, size, _SAMPLE_EVERY_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _slice(output: EncoderOutput, start: int, stop: int) -> EncoderOutput:
    part = slice(start - output.start, stop - output.start)
    return EncoderOutput(start, output.hidden[part], output.pre_mix[part])
