"""Which served tokens are scored again, and what is kept of them until then?

    step ── row of a sampled token ──▶ kept ── request finished ──▶ waiting ── idle ──▶ re-scored
                                        └────── cancelled, failed, too much, too old ─▶ counted

An answer is cut into segments, and each is taken or not by a hash of the request's id and its
number. So every served token has the same chance, whatever the length of its answer; a request is
re-scored with a chance that grows with its tokens; and the same request is so again. Segments and
not single tokens, because re-scoring one row costs the whole prompt and its neighbours next to
nothing.

Kept are the model's own distributions, as they were computed beside other requests, and the token
ids: in memory, until they are scored.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import xxhash

from ripresa.workers.config import ShadowConfig
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import Recipe
from ripresa.workers.sequence import Sequence
from ripresa.workers.shadow_counters import ShadowOutcome

SEGMENT_TOKENS = 32
"""Tokens of an answer that are taken together."""


def is_sampled(request_id: str, index: int, share: float) -> bool:
    """Whether the token at `index` of an answer is among the `share` that is scored again."""
    name = f"{request_id}\0{index // SEGMENT_TOKENS}"
    # Clients name requests, and JSON has lone surrogates.
    digest = xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))
    return digest < share * 2.0**64


def is_behind_restart(recipe: Recipe) -> bool:
    """Whether rows of an execution read what a bounded replay has left.

    Restarts of mode canonical are the mode's own, hit or not, and nothing that a cache did.
    """
    return bool(recipe.restarts) and recipe.anchor_interval is None


@dataclass(slots=True)
class ServedSample:
    """Tokens of one answer that are to be scored again.

    Attributes:
        recipe: what the request's execution followed.
        tenant_salt: whose it is.
        num_prompt_tokens: how many of `token_ids` are prompt.
        token_ids: up to the last sampled token, it included.
        rows: by a token's position, the logits [vocab] that it was chosen from, unchanged by
            sampling parameters and constraints; float32 on the host.
        expires: engine clock in seconds at which it is dropped.
    """

    recipe: Recipe
    tenant_salt: bytes
    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    expires: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows.values())


class ServedSamples:
    """The sampled tokens of a worker's requests, running ones and such as wait to be scored.

    Args:
        config: how many, and how much of them is kept.
        clock: seconds since the epoch.
    """

    def __init__(self, config: ShadowConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._running: dict[Sequence, ServedSample] = {}
        self._waiting: deque[ServedSample] = deque()
        self._scoring: ServedSample | None = None
        self._num_bytes = 0
        self._outcomes: Counter[ShadowOutcome] = Counter()
        self._has_some = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def outcomes(self) -> dict[ShadowOutcome, int]:
        """What became of the sampled tokens so far; those kept are in none."""
        return {outcome: self._outcomes[outcome] for outcome in ShadowOutcome}

    @property
    def num_bytes(self) -> int:
        """Distributions kept."""
        return self._num_bytes

    @property
    def num_waiting(self) -> int:
        """Answers that wait to be scored again, or are."""
        return len(self._waiting) + (self._scoring is not None)

    def wants(self, sequence: Sequence) -> bool:
        """Whether the distribution of the sequence's next token should be kept."""
        request, share = sequence.request, self._config.share
        if share == 0 or request.given or not is_behind_restart(sequence.recipe):
            return False
        index = sequence.num_tokens - request.num_prompt_tokens
        if not is_sampled(request.request_id, index, share):
            return False
        if sequence.num_tokens >= self._config.max_tokens:
            self._outcomes[ShadowOutcome.TOO_LONG] += 1
            return False
        return True

    def keep(self, sequence: Sequence, row: torch.Tensor) -> None:
        """Keep the logits [vocab] that the sequence's newest token was chosen from."""
        if self._num_bytes + row.nbytes > self._config.capacity_bytes:
            self._outcomes[ShadowOutcome.NO_ROOM] += 1
            return
        sample = self._running.get(sequence)
        if sample is None:
            request = sequence.request
            sample = ServedSample(sequence.recipe, request.tenant_salt, request.num_prompt_tokens)
            self._running[sequence] = sample
        sample.rows[sequence.num_tokens - 1] = row
        self._num_bytes += row.nbytes

    def finished(self, sequence: Sequence) -> None:
        """The answer is whole: what was kept of it waits to be scored."""
        sample = self._running.pop(sequence, None)
        if sample is None:
            return
        sample.token_ids = tuple(sequence.token_ids[: max(sample.rows) + 1])
        sample.expires = self._clock() + self._config.max_wait_s
        self._waiting.append(sample)
        self._has_some.set()
        self._is_empty.clear()

    def over(self, sequence: Sequence) -> None:
        """The request is over, finished or not. Idempotent."""
        sample = self._running.pop(sequence, None)
        if sample is not None:
            self._drop(sample, ShadowOutcome.UNFINISHED)

    def flush(self, is_of: Callable[[bytes], bool]) -> None:
        """Drop what waits of tenants with these salts."""
        for sample in tuple(self._waiting):
            if is_of(sample.tenant_salt):
                self._waiting.remove(sample)
                self._drop(sample, ShadowOutcome.FLUSHED)

    async def emptied(self) -> None:
        """Return when nothing waits to be scored, or is."""
        await self._is_empty.wait()

    async def next(self) -> ServedSample:
        """The oldest one that waits, for as long as it takes; `done` must follow."""
        while True:
            while self._waiting:
                sample = self._waiting.popleft()
                if sample.expires > self._clock():
                    self._scoring = sample
                    return sample
                self._drop(sample, ShadowOutcome.BUSY)
            self._has_some.clear()
            await self._has_some.wait()

    def done(self, outcome: ShadowOutcome) -> None:
        """What `next` returned last is scored, or dropped."""
        sample, self._scoring = self._scoring, None
        if sample is None:
            raise RipresaError(ErrorCode.INTERNAL, "no answer is being scored again")
        self._drop(sample, outcome)

    def close(self) -> None:
        """Drop everything that waits."""
        while self._waiting:
            self._drop(self._waiting.popleft(), ShadowOutcome.STOPPED)

    def check_integrity(self) -> None:
        """Raise RipresaError (INTERNAL) unless the bytes are those of what is kept."""
        scoring = () if self._scoring is None else (self._scoring,)
        kept = (*self._running.values(), *self._waiting, *scoring)
        num_bytes = sum(sample.num_bytes for sample in kept)
        if num_bytes != self._num_bytes:
            raise RipresaError(
                ErrorCode.INTERNAL,
                f"{self._num_bytes} bytes of distributions are counted and {num_bytes} are kept",
            )

    def _drop(self, sample: ServedSample, outcome: ShadowOutcome) -> None:
        self._num_bytes -= sample.num_bytes
        self._outcomes[outcome] += len(sample.rows)
        sample.rows.clear()
        if self.num_waiting == 0:
            self._is_empty.set()
