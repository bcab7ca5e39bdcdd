"""What does the planner decide? A route, what it costs, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from ripresa.workers.prefix_sources import PrefixSources
from ripresa.workers.replay import PlanKind


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds until the first token, by what they are spent on.

    Attributes:
        queue_s: until the worker that computes the prompt has done what it has.
        bring_s: cached state from other workers.
        prefill_s: new and recomputed rows of the encoder half, and the tail of a local prefill.
        hand_over_s: state from the encoder to the decode worker.
        tail_s: what the decode worker computes of a handed-over prompt, and has to do before.
    """

    queue_s: float = 0.0
    bring_s: float = 0.0
    prefill_s: float = 0.0
    hand_over_s: float = 0.0
    tail_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.queue_s + self.bring_s + self.prefill_s + self.hand_over_s + self.tail_s

    def __str__(self) -> str:
        terms = {
            "queue": self.queue_s,
            "bring": self.bring_s,
            "prefill": self.prefill_s,
            "hand-over": self.hand_over_s,
            "tail": self.tail_s,
        }
        spent = [f"{name} {1e3 * value:.1f}" for name, value in terms.items() if value]
        return f"{1e3 * self.total_s:.1f} ms ({', '.join(spent) or 'nothing to do'})"


@dataclass(frozen=True, slots=True)
class PlannedHit:
    """What the worker that computes a prompt should find of it.

    Attributes:
        kind: how the state before the first row comes to be.
        start: first encoder row.
        num_blocks: leading blocks whose KV is reused.
        num_local: leading blocks that this worker holds itself.
        restarts: lineage of the reused chain.
    """

    kind: PlanKind = PlanKind.COLD
    start: int = 0
    num_blocks: int = 0
    num_local: int = 0
    restarts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a prompt.

    Attributes:
        decoder: worker id of the decode worker.
        encoder: worker id of the encoder worker; None if the decode worker prefills by itself.
        note: why it was not even compared by cost; empty if it was.
    """

    decoder: str
    encoder: str | None
    hit: PlannedHit
    cost: Cost
    sources: PrefixSources = field(default_factory=PrefixSources)
    note: str = ""

    @property
    def computing(self) -> str:
        """The worker that computes the prompt's encoder rows."""
        return self.decoder if self.encoder is None else self.encoder

    @property
    def name(self) -> str:
        way = "local" if self.encoder is None else f"encoder {self.encoder}"
        return f"{self.decoder}, {way}"


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Where one execution of a request runs.

    Attributes:
        chosen: the route.
        reason: why, in words for a log line.
        alternatives: other routes, the cheapest first.
        max_chunk_rows: most rows of a chunk of a local prefill beside streams; None for any.
        left_out: workers that no route could use, and why, in words.
    """

    chosen: Candidate
    reason: str
    alternatives: tuple[Candidate, ...] = ()
    max_chunk_rows: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def decoder(self) -> str:
        return self.chosen.decoder

    @property
    def encoder(self) -> str | None:
        return self.chosen.encoder
