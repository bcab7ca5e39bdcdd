"""What do all cases say together? Means with intervals, by experiment, arm, kind and distance."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ripresa.cluster.evaluation.bootstrap import Estimate, median, ratio
from ripresa.cluster.evaluation.experiments import Cost, Experiment, Result
from ripresa.cluster.evaluation.measures import Group, Match
from ripresa.cluster.evaluation.served import Hit
from ripresa.cluster.evaluation.tails import TailRow, tail_rows

ALL = "all"
"""All buckets, or all tasks, together."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens of one experiment, arm, kind and bucket.

    Attributes:
        measures: by name as in `Group.sums`, a token's mean.
    """

    experiment: str
    arm: str
    kind: str
    bucket: str
    num_tokens: int
    num_conversations: int
    measures: dict[str, Estimate]


@dataclass(frozen=True, slots=True)
class MatchRow:
    """Messages of one experiment, arm, task and placement; `exact` is the share of matches."""

    experiment: str
    arm: str
    task: str
    placement: str | None
    num_messages: int
    num_conversations: int
    exact: Estimate


@dataclass(frozen=True, slots=True)
class CostRow:
    """Prompts of one experiment and arm.

    Attributes:
        num_tokens: of a prompt, if all have the same; else None.
        encoder_row_layers, decoder_row_layers, num_skipped: a prompt's mean.
        seconds: the median. Of one prompt again and again with its 95 % interval, of different
            prompts with their quartiles.
    """

    experiment: str
    arm: str
    num_tokens: int | None
    num_prompts: int
    num_skipped: float
    encoder_row_layers: float
    decoder_row_layers: float
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Prompts that a gateway was asked in one mode.

    Attributes:
        kinds: how many of each `PlanKind`.
        skipped: share of the prompts' tokens that were not computed.
        num_recomputed: tokens computed although cached, a prompt's mean.
        num_generations: bounded hits behind one another, a prompt's mean, and the most.
        seconds: until the first token, the median and the quartiles; None if it is not known.
    """

    arm: str
    num_prompts: int
    kinds: dict[str, int]
    skipped: float
    num_recomputed: float
    num_generations: float
    most_generations: int
    seconds: Estimate | None


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The arm without approximation, held against the cold run.

    Attributes:
        num_able: cases in which it left rows out, and so could have differed.
        worst: the largest difference of a logit.
    """

    experiment: str
    num_cases: int
    num_able: int
    worst: float


@dataclass(frozen=True, slots=True)
class HitRow:
    """How many of an experiment's cases have a cached prefix of so many tokens."""

    experiment: str
    num_tokens: int
    num_cases: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that tables and plots show."""

    tokens: tuple[TokenRow, ...]
    matches: tuple[MatchRow, ...]
    costs: tuple[CostRow, ...]
    served: tuple[ServedRow, ...]
    checks: tuple[CheckRow, ...]
    hits: tuple[HitRow, ...]
    tails: tuple[TailRow, ...]


def summarise(results: Sequence[Result], seed: int) -> Summary:
    """Add up results; rows come in the order of first appearance.

    Args:
        seed: of the bootstrap.
    """
    return Summary(
        tuple(_token_rows(results, seed)),
        tuple(_match_rows(results, seed)),
        tuple(_cost_rows(results)),
        tuple(_served_rows(results)),
        tuple(_check_rows(results)),
        tuple(_hit_rows(results)),
        tuple(tail_rows(results, seed)),
    )


def _token_rows(results: Sequence[Result], seed: int) -> Iterable[TokenRow]:
    found: dict[tuple[str, str, str, str], dict[int, list[Group]]] = {}
    for result in results:
        for group in result.groups:
            for bucket in (group.bucket, ALL):
                key = (result.experiment.value, group.arm, group.kind, bucket)
                cases = found.setdefault(key, defaultdict(list))
                cases[result.number].append(group)
    for key, cases in found.items():
        everything = [group for part in cases.values() for group in part]
        # Every conversation of one model has the same measures.
        names = everything[0].sums
        counts = [float(sum(g.num_tokens for g in part)) for part in cases.values()]
        measures = {
            name: ratio([sum(g.sums[name] for g in part) for part in cases.values()], counts, seed)
            for name in names
        }
        yield TokenRow(*key, sum(g.num_tokens for g in everything), len(cases), measures)


def _match_rows(results: Sequence[Result], seed: int) -> Iterable[MatchRow]:
    found: dict[tuple[str, str, str, str | None], dict[int, list[Match]]] = {}
    for result in results:
        for match in result.matches:
            whole = (result.experiment.value, match.arm)
            keys: list[tuple[str, str, str, str | None]] = [
                (*whole, ALL, None),
                (*whole, match.task, None),
            ]
            if match.placement is not None:
                keys.append((*whole, match.task, match.placement))
            for key in keys:
                found.setdefault(key, defaultdict(list))[result.number].append(match)
    for key, cases in found.items():
        exact = [float(sum(m.is_exact for m in part)) for part in cases.values()]
        counts = [float(len(part)) for part in cases.values()]
        yield MatchRow(*key, int(sum(counts)), len(cases), ratio(exact, counts, seed))


def _cost_rows(results: Sequence[Result]) -> Iterable[CostRow]:
    found: dict[tuple[str, str, int | None], list[Cost]] = {}
    for result in results:
        for cost in result.costs:
            length = cost.num_tokens if result.experiment is Experiment.GROWTH else None
            found.setdefault((result.experiment.value, cost.arm, length), []).append(cost)
    for key, costs in found.items():
        yield CostRow(
            *key,
            num_prompts=len(costs),
            num_skipped=_mean(costs, lambda cost: cost.num_skipped),
            encoder_row_layers=_mean(costs, lambda cost: cost.encoder_row_layers),
            decoder_row_layers=_mean(costs, lambda cost: cost.decoder_row_layers),
            seconds=(_quartiles if key[2] is None else median)([cost.seconds for cost in costs]),
        )


def _check_rows(results: Sequence[Result]) -> Iterable[CheckRow]:
    found: dict[str, list[tuple[float, int]]] = {}
    for result in results:
        if result.worst_exact is not None and result.exact_start is not None:
            told = (result.worst_exact, result.exact_start)
            found.setdefault(result.experiment.value, []).append(told)
    for experiment, checks in found.items():
        num_able = sum(start > 0 for _, start in checks)
        differences = [worst for worst, _ in checks]
        # `max` would pass over it.
        worst = math.nan if any(map(math.isnan, differences)) else max(differences)
        yield CheckRow(experiment, len(checks), num_able, worst)


def _hit_rows(results: Sequence[Result]) -> Iterable[HitRow]:
    found = Counter((r.experiment.value, r.hit) for r in results if r.hit is not None)
    for (experiment, num_tokens), number in sorted(found.items()):
        yield HitRow(experiment, num_tokens, number)


def _mean(costs: Sequence[Cost], of: Callable[[Cost], int]) -> float:
    return sum(of(cost) for cost in costs) / len(costs)


def _served_rows(results: Sequence[Result]) -> Iterable[ServedRow]:
    found: dict[str, list[Hit]] = {}
    for result in results:
        for hit in result.hits:
            found.setdefault(hit.arm, []).append(hit)
    for arm, hits in found.items():
        seconds = [hit.seconds for hit in hits if hit.seconds is not None]
        yield ServedRow(
            arm=arm,
            num_prompts=len(hits),
            kinds=dict(Counter(hit.kind for hit in hits)),
            skipped=sum(h.num_skipped for h in hits) / sum(h.num_tokens for h in hits),
            num_recomputed=sum(hit.num_recomputed for hit in hits) / len(hits),
            num_generations=sum(hit.num_generations for hit in hits) / len(hits),
            most_generations=max(hit.num_generations for hit in hits),
            seconds=_quartiles(seconds) if seconds else None,
        )


def _quartiles(values: Sequence[float]) -> Estimate:
    first, middle, third = np.percentile(values, (25, 50, 75))
    return Estimate(float(middle), float(first), float(third))
