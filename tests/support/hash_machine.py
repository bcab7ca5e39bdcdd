"""What would a model compute? A machine of hashes in its place, and a reference without a cache.

Every row's hash covers every token, window row, pool entry and open pair that it was allowed to
read, so a stale, missing, foreign or doubly written one changes the sampled tokens. Reading what
was never written raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from ripresa.workers.models.base import EncoderOutput, StepMasks, StepOutput
from ripresa.workers.replay import PlanKind, Recipe, TailVariant
from ripresa.workers.replay_query import ReplayGeometry
from ripresa.workers.request import FinishReason, GenerationRequest
from ripresa.workers.scheduling.step_plan import SequenceStep, StepPlan

WINDOW = 8
REWIND = 2
VOCABULARY = 64
EOS = 1
NUM_ENCODER_LAYERS = 2
GEOMETRY = ReplayGeometry(WINDOW, REWIND, NUM_ENCODER_LAYERS, 3)


def digest(*parts: object) -> int:
    """A 63-bit hash of the parts."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def embedding_hash(token: int, lookback: Iterable[int]) -> int:
    return digest("embedding", token, tuple(lookback))


def encoder_hash(layer: int, below: int, window: list[int], pool: list[int]) -> int:
    """Output of an encoder layer: its input, the window of its inputs, the pool entries."""
    return digest("encoder", layer, below, window, pool)


def entry_hash(encoded: int, pair: int | None) -> int:
    """A pool entry; at odd positions it needs the open pair of the position before."""
    return digest("entry", encoded, pair)


def decoder_hash(encoded: int, source: list[int], window: list[int], pool: list[int]) -> int:
    return digest("decoder", encoded, source, window, pool)


def sample(decoded: int, seed: int, position: int) -> int:
    return digest("sample", decoded, seed, position) % VOCABULARY


@dataclass
class Slot:
    """Rings and the open pair of one sequence."""

    encoder: list[dict[int, int]] = field(
        default_factory=lambda: [{} for _ in range(NUM_ENCODER_LAYERS)]
    )
    source: dict[int, int] = field(default_factory=dict)
    decoder: dict[int, int] = field(default_factory=dict)
    pair: int | None = None


class HashMachine:
    """A `ModelRunner` whose rows are hashes.

    Args:
        num_drafts: rows of guessed tokens, all rejected, that follow every row that samples.

    Attributes:
        before_step: called in the step thread before every step.
        ring_rows: rows of every ring; older ones are overwritten.
        violations: uses of pages that were given back, and releases of pages in use.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        num_slots: int = 16,
        max_model_len: int = 512,
        num_drafts: int = 0,
    ) -> None:
        self.window = WINDOW
        self.geometry = GEOMETRY
        self.layout_digest = b"hash machine"
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.eos_token_id: int | None = EOS
        self.max_model_len = max_model_len
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.violations: list[str] = []
        self.ring_rows = WINDOW + REWIND
        self._num_drafts = num_drafts
        self._blocks: list[list[int | None]] = [[None] * WINDOW for _ in range(num_blocks)]
        self._slots: dict[int, Slot] = {}
        self._running: frozenset[int] = frozenset()
        self._lock = threading.Lock()

    @property
    def num_live_slots(self) -> int:
        """Slots of which something is stored."""
        return len(self._slots)

    def execute(
        self,
        plan: StepPlan,
        inbound: Mapping[int, EncoderOutput] | None = None,
        masks: StepMasks | None = None,
    ) -> StepOutput:
        slots = [step.slot for step in plan.sequences]
        assert len(set(slots)) == len(slots), "a slot occurs twice in a step"
        with self._lock:
            self._running = frozenset(slots)
        try:
            self.before_step(plan)
            output = StepOutput()
            for step in plan.sequences:
                self._run(step, (inbound or {}).get(step.slot), output)
                if step.sampling is not None:
                    self._run_drafts(step)
        finally:
            with self._lock:
                self._running = frozenset()
        return output

    def _run(self, step: SequenceStep, inbound: EncoderOutput | None, output: StepOutput) -> None:
        slot = self._slots.setdefault(step.slot, Slot())
        encoded: dict[int, int] = {}
        known = step.lookback_ids + step.token_ids
        for position in range(step.encoder_start, step.encoder_stop):
            index = position - step.encoder_start + len(step.lookback_ids)
            value = embedding_hash(known[index], known[max(0, index - 3) : index])
            pool = self._pool(step, position)
            for layer, first in enumerate(self.layer_starts(step)):
                ring = slot.encoder[layer]
                if position < first - WINDOW + 1:
                    break
                self._put(ring, position, digest("row", value))
                if position < first:
                    break
                window = self._window(ring, step.swa_floor, position)
                value = encoder_hash(layer, value, window, pool)
                output.num_row_layers += 1
            else:
                encoded[position] = value
            if position not in encoded:
                continue
            first = step.source_window_from
            if first is not None and position >= first:
                slot.source[position] = digest("source", value)
            if position >= step.write_floor:
                assert not position % 2 or slot.pair is not None, f"row {position} has no open pair"
                block = self._blocks[step.block_table[position // WINDOW]]
                block[position % WINDOW] = entry_hash(value, slot.pair if position % 2 else None)
            slot.pair = None if position % 2 else value
            if position + 1 in step.cut_windows:
                rows = [ring[j] for ring in slot.encoder for j in _window_rows(position + 1)]
                cut = output.windows.setdefault(step.slot, {})
                cut[position + 1] = _to_bytes(rows)
        if step.inbound:
            assert inbound is not None, "inbound rows were not given"
            assert (inbound.start, inbound.stop) == (step.decoder_start, step.decoder_stop)
            encoded = _unpack(inbound)
        for position in range(step.decoder_start, step.decoder_stop):
            value = decoder_hash(
                encoded[position],
                self._window(slot.source, step.source_floor, position),
                self._window(slot.decoder, step.decoder_floor, position),
                self._pool(step, position + 1),
            )
            slot.source[position] = digest("source", encoded[position])
            self._put(slot.decoder, position, digest("row", value))
            if step.sampling is not None and position == step.decoder_stop - 1:
                output.sampled[step.slot] = sample(value, step.sampling.seed, position)
        if step.hand_over_from is not None:
            output.encoder_output[step.slot] = _pack(encoded, step.hand_over_from)
        output.num_encoder_rows += step.num_encoder_rows
        output.num_decoder_rows += step.num_decoder_rows

    @staticmethod
    def layer_starts(step: SequenceStep) -> tuple[int, ...]:
        """First row that passes each layer; of the W - 1 below it the window rows are kept."""
        exact_from = step.encoder_start if step.exact_from is None else step.exact_from
        above = range(NUM_ENCODER_LAYERS - 1, -1, -1)
        return tuple(max(step.encoder_start, exact_from - (WINDOW - 1) * n) for n in above)

    def _put(self, ring: dict[int, int], position: int, value: int) -> None:
        """Write a row where its position lies in the ring; what lay there is gone."""
        for other in [p for p in ring if p != position and (p - position) % self.ring_rows == 0]:
            del ring[other]
        ring[position] = value

    def _run_drafts(self, step: SequenceStep) -> None:
        """Verify guesses that are all wrong, and rewind: their rows stay behind as garbage."""
        stop = step.decoder_stop
        room = min(len(step.block_table) * WINDOW, self.max_model_len) - stop
        slot, guesses = self._slots[step.slot], range(min(self._num_drafts, room))
        pair = slot.pair
        for guess in guesses:
            position = stop + guess
            garbage = digest("guess", step.slot, position)
            self._blocks[step.block_table[position // WINDOW]][position % WINDOW] = garbage
            slot.source[position] = garbage
            for ring in (*slot.encoder, slot.decoder):
                self._put(ring, position, garbage)
        slot.pair = pair

    @staticmethod
    def _window(ring: dict[int, int], floor: int, position: int) -> list[int]:
        return [ring[j] for j in range(max(floor, position - WINDOW + 1), position)]

    def _pool(self, step: SequenceStep, stop: int) -> list[int]:
        entries = []
        for position in range(stop):
            entry = self._blocks[step.block_table[position // WINDOW]][position % WINDOW]
            assert entry is not None, f"pool entry {position} was never written"
            entries.append(entry)
        return entries

    def block_bytes(self, num_blocks: int) -> int:
        return 8 * WINDOW * num_blocks

    @property
    def window_bytes(self) -> int:
        return 8 * NUM_ENCODER_LAYERS * WINDOW

    def export_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        entries = [entry for block in block_ids for entry in self._blocks[block]]
        return _to_bytes([_present(entry) for entry in entries])

    def import_blocks(self, block_ids: Sequence[int], payload: torch.Tensor) -> None:
        entries = _from_bytes(payload)
        for index, block in enumerate(block_ids):
            self._blocks[block] = list(entries[index * WINDOW : (index + 1) * WINDOW])

    def state_bytes(self, num_tokens: int, output_start: int, source_window: bool) -> int:
        source = len(_source_rows(output_start)) if source_window else 0
        rows = num_tokens % WINDOW + NUM_ENCODER_LAYERS * min(WINDOW, num_tokens) + 1 + source
        return 8 * (rows + num_tokens - output_start)

    def rows_bytes(self, num_rows: int) -> int:
        return 8 * num_rows

    def export_rows(self, output: EncoderOutput) -> torch.Tensor:
        rows = _unpack(output)
        return _to_bytes([rows[position] for position in sorted(rows)])

    def import_rows(self, start: int, num_rows: int, payload: torch.Tensor) -> EncoderOutput:
        values = _from_bytes(payload)
        assert len(values) == num_rows
        return _pack(dict(enumerate(values, start)), start)

    def export_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output: EncoderOutput,
        source_window: bool,
    ) -> torch.Tensor:
        if slot not in self._slots:
            self.violations.append(f"state of slot {slot} was exported after its release")
        state = self._slots[slot]
        partial = num_tokens % WINDOW
        values = []
        if partial:
            block = self._blocks[block_table[num_tokens // WINDOW]]
            values += [_present(entry) for entry in block[:partial]]
        last = range(max(0, num_tokens - WINDOW), num_tokens)
        values += [ring[j] for ring in state.encoder for j in last]
        values.append(-1 if state.pair is None else state.pair)
        if source_window:
            # Rows below the first computed one travel too; nobody may read them.
            values += [state.source.get(j, -1) for j in _source_rows(output.start)]
        rows = _unpack(output)
        values += [rows[j] for j in range(output.start, num_tokens)]
        return _to_bytes(values)

    def import_state(
        self,
        slot: int,
        block_table: Sequence[int],
        num_tokens: int,
        output_start: int,
        source_window: bool,
        payload: torch.Tensor,
    ) -> EncoderOutput:
        values = iter(_from_bytes(payload))
        state = Slot()
        for index in range(num_tokens % WINDOW):
            self._blocks[block_table[num_tokens // WINDOW]][index] = next(values)
        for ring in state.encoder:
            for j in range(max(0, num_tokens - WINDOW), num_tokens):
                ring[j] = next(values)
        pair = next(values)
        state.pair = None if pair == -1 else pair
        if source_window:
            source = {j: next(values) for j in _source_rows(output_start)}
            state.source.update({j: value for j, value in source.items() if value != -1})
        self._slots[slot] = state
        return _pack({j: next(values) for j in range(output_start, num_tokens)}, output_start)

    def import_window(self, slot: int, boundary: int, payload: torch.Tensor) -> None:
        state = self._slots.setdefault(slot, Slot())
        values = iter(_from_bytes(payload))
        for ring in state.encoder:
            for j in _window_rows(boundary):
                ring[j] = next(values)

    def export_image(self, slot: int, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        state = self._slots[slot]
        partial = num_tokens % WINDOW
        block = self._blocks[block_table[num_tokens // WINDOW]][:partial] if partial else []
        values = [_present(entry) for entry in block]
        values.append(-1 if state.pair is None else state.pair)
        # The model keeps layer E's rows in a ring like all others.
        source = dict(sorted(state.source.items())[-self.ring_rows :])
        for ring in (*state.encoder, source, state.decoder):
            values.append(len(ring))
            for position, value in ring.items():
                values += [position, value]
        # As large as for full rings, so that the size follows from the length alone.
        values += [0] * (self.image_bytes(num_tokens) // 8 - len(values))
        return _to_bytes(values)

    def image_bytes(self, num_tokens: int) -> int:
        num_rings = NUM_ENCODER_LAYERS + 2
        return 8 * (num_tokens % WINDOW + 1 + num_rings * (1 + 2 * self.ring_rows))

    def import_image(
        self, slot: int, block_table: Sequence[int], num_tokens: int, payload: torch.Tensor
    ) -> None:
        values = iter(_from_bytes(payload))
        state = Slot()
        for index in range(num_tokens % WINDOW):
            self._blocks[block_table[num_tokens // WINDOW]][index] = next(values)
        pair = next(values)
        state.pair = None if pair == -1 else pair
        for ring in (*state.encoder, state.source, state.decoder):
            for _ in range(next(values)):
                position = next(values)
                ring[position] = next(values)
        self._slots[slot] = state

    def release_slot(self, slot: int) -> None:
        with self._lock:
            if slot in self._running:
                self.violations.append(f"slot {slot} was released in its own step")
        self._slots.pop(slot, None)


@dataclass(frozen=True)
class ReferenceStream:
    """Tokens after the prompt, a stop token excluded, and why they end."""

    tokens: tuple[int, ...]
    reason: FinishReason
    stop_token_id: int | None


class ReferenceEncoder:
    """The encoder half by definition: its rows restart as the recipe says; nothing is cached.

    Attributes:
        encoded: its output, as the decoder half reads it, which does not restart in mode canonical.
        entries: block KV.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._floor = 0
        self._rings: list[dict[int, int]] = [{} for _ in range(NUM_ENCODER_LAYERS)]
        self.encoded: dict[int, int] = {}
        self.entries: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        """Compute the rows that `tokens` has beyond those already known."""
        for position in range(len(self.entries), len(tokens)):
            if position in self._recipe.restarts_below(position + 1):
                self._floor = position - WINDOW
                for before in range(self._floor, position):
                    value = self._row(tokens, before)
                    if self._is_decoded_anew():
                        self.encoded[before] = value
            value = self._row(tokens, position)
            self.encoded[position] = value
            pair = self.encoded[position - 1] if position % 2 else None
            self.entries.append(entry_hash(value, pair))

    def _is_decoded_anew(self) -> bool:
        """Whether the decoder half reads what the restart under way recomputes."""
        if self._recipe.anchor_interval is None:
            return True
        return self._recipe.kind is PlanKind.ANCHOR and self._floor == self._recipe.start

    def _row(self, tokens: list[int], position: int) -> int:
        floor = self._floor
        value = embedding_hash(tokens[position], tokens[max(0, position - 3) : position])
        for layer, ring in enumerate(self._rings):
            ring[position] = digest("row", value)
            window = [ring[j] for j in range(max(floor, position - WINDOW + 1), position)]
            value = encoder_hash(layer, value, window, self.entries[:position])
        return value


def reference_stream(
    request: GenerationRequest, max_model_len: int = 512, recipe: Recipe | None = None
) -> ReferenceStream:
    """The stream of a request's prompt, from the definition: no cache, chunk, slot or block."""
    tokens = list(request.token_ids[: request.num_prompt_tokens])
    recipe = recipe or request.recipe
    assert recipe is not None
    sampling = request.sampling
    first = recipe.decoder_start
    source_first = first
    if recipe.tail is TailVariant.LAYER_EXACT:
        source_first = max(recipe.start, first - WINDOW + 1)
        if recipe.source_floor is not None:
            source_first = recipe.source_floor
    encoder = ReferenceEncoder(recipe)
    encoded = encoder.encoded
    decoded: dict[int, int] = {}

    def rows(values: Callable[[int], int], floor: int, position: int) -> list[int]:
        return [values(j) for j in range(max(floor, position - WINDOW + 1), position)]

    while True:
        encoder.extend(tokens)
        for i in range(max(first, max(decoded, default=-1) + 1), len(tokens)):
            source = rows(lambda j: digest("source", encoded[j]), source_first, i)
            window = rows(lambda j: digest("row", decoded[j]), first, i)
            decoded[i] = decoder_hash(encoded[i], source, window, encoder.entries[: i + 1])
        last = len(tokens) - 1
        token = sample(decoded[last], recipe.seed, last)
        generated = tuple(tokens[request.num_prompt_tokens :])
        is_eos = token == EOS and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return ReferenceStream(generated, FinishReason.STOP, token)
        tokens.append(token)
        if len(generated) + 1 == sampling.max_tokens or len(tokens) == max_model_len:
            return ReferenceStream((*generated, token), FinishReason.LENGTH, None)


def _window_rows(boundary: int) -> range:
    return range(boundary - WINDOW, boundary)


def _source_rows(output_start: int) -> range:
    return range(max(0, output_start - WINDOW + 1), output_start)


def _present(entry: int | None) -> int:
    assert entry is not None, "a pool entry that was never written leaves the worker"
    return entry


def _to_bytes(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).view(torch.uint8)


def _from_bytes(payload: torch.Tensor) -> list[int]:
    return [int(value) for value in payload.clone().view(torch.int64).tolist()]


def _pack(encoded: Mapping[int, int], start: int) -> EncoderOutput:
    """Hashes as four 16-bit pieces each, which float32 holds exactly."""
    positions = [position for position in sorted(encoded) if position >= start]
    pieces = [[(encoded[p] >> shift) & 0xFFFF for shift in (0, 16, 32, 48)] for p in positions]
    hidden = torch.tensor(pieces, dtype=torch.float32).reshape(len(positions), 1, 4)
    return EncoderOutput(positions[0], hidden, torch.zeros(len(positions), 1))


def _unpack(output: EncoderOutput) -> dict[int, int]:
    rows = output.hidden[:, 0].to(torch.int64).tolist()
    return {
        output.start + index: sum(piece << (16 * k) for k, piece in enumerate(row))
        for index, row in enumerate(rows)
    }
