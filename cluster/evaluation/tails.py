"""Which tail should be the default? Both on the same tokens, and a rule that chooses.

`floored` computes and sends the least, so it is the default unless `layer_exact` is closer to the
cold run in what is served by default, beyond doubt and by something that matters: the whole
interval of the paired difference of KL on what the assistant says lies above MATTERS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ripresa.cluster.evaluation.arms import LAYER_EXACT
from ripresa.cluster.evaluation.bootstrap import Estimate, ratio
from ripresa.cluster.evaluation.experiments import Cost, Experiment, Result
from ripresa.cluster.evaluation.measures import CONTEXT, SUPERVISED
from ripresa.workers.replay import TailVariant

MATTERS = 1e-4
"""Nats a token."""


@dataclass(frozen=True, slots=True)
class TailRow:
    """An arm with tail `floored` and the same with `layer_exact`, on the same tokens and prompts.

    Attributes:
        arm: the one with `floored`.
        floored, layer_exact: KL from the cold run, a token's mean.
        kl, nll: what `floored` has more; differences of each conversation, drawn together.
        encoder_row_layers, decoder_row_layers: a prompt's mean with `floored`, and what
            `layer_exact` computes more.
        seconds: the time to the first token with `layer_exact`, of that with `floored`; the median.
    """

    arm: str
    kind: str
    num_tokens: int
    num_conversations: int
    floored: Estimate
    layer_exact: Estimate
    kl: Estimate
    nll: Estimate
    encoder_row_layers: tuple[float, float]
    decoder_row_layers: tuple[float, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pair:
    """A conversation's tokens of one kind: their number, and sums with either tail."""

    num_tokens: int
    floored: dict[str, float]
    whole: dict[str, float]


def tail_rows(results: Sequence[Result], seed: int) -> Iterator[TailRow]:
    """Compare the tails of every arm of `answer` that was computed with both.

    Args:
        seed: of the bootstrap.
    """
    answers = [result for result in results if result.experiment is Experiment.ANSWER]
    arms = dict.fromkeys(cost.arm for result in answers for cost in result.costs)
    for whole in (arm for arm in arms if arm.endswith(LAYER_EXACT)):
        arm = whole.removesuffix(LAYER_EXACT)
        for kind in (SUPERVISED, CONTEXT):
            pairs = [pair for each in answers for pair in _pairs(each, arm, whole, kind)]
            if pairs:
                yield _row(answers, arm, whole, kind, pairs, seed)


def chosen(rows: Sequence[TailRow], arm: str) -> TailVariant | None:
    """The tail that should be the default; None if there are too few conversations to say.

    Args:
        arm: what is served by default, with tail `floored`.
    """
    for row in rows:
        if (row.arm, row.kind) == (arm, SUPERVISED) and row.kl.low is not None:
            return TailVariant.LAYER_EXACT if row.kl.low > MATTERS else TailVariant.FLOORED
    return None


def _pairs(result: Result, arm: str, whole: str, kind: str) -> Iterator[_Pair]:
    """One, unless the conversation has no such tokens."""
    floored, other = (
        [g for g in result.groups if (g.arm, g.kind) == (name, kind)] for name in (arm, whole)
    )
    num_tokens = sum(group.num_tokens for group in floored)
    if num_tokens:
        names = ("kl", "nll")
        yield _Pair(
            num_tokens,
            *({n: sum(g.sums[n] for g in part) for n in names} for part in (floored, other)),
        )


def _row(
    answers: Sequence[Result], arm: str, whole: str, kind: str, pairs: Sequence[_Pair], seed: int
) -> TailRow:
    counts = [float(pair.num_tokens) for pair in pairs]

    def mean(values: Sequence[float]) -> Estimate:
        return ratio(values, counts, seed)

    costs = [_costs(result, arm, whole) for result in answers]
    encoder = np.mean([[f.encoder_row_layers, w.encoder_row_layers] for f, w in costs], axis=0)
    decoder = np.mean([[f.decoder_row_layers, w.decoder_row_layers] for f, w in costs], axis=0)
    return TailRow(
        arm,
        kind,
        int(sum(counts)),
        len(pairs),
        floored=mean([pair.floored["kl"] for pair in pairs]),
        layer_exact=mean([pair.whole["kl"] for pair in pairs]),
        kl=mean([pair.floored["kl"] - pair.whole["kl"] for pair in pairs]),
        nll=mean([pair.floored["nll"] - pair.whole["nll"] for pair in pairs]),
        encoder_row_layers=(float(encoder[0]), float(encoder[1] - encoder[0])),
        decoder_row_layers=(float(decoder[0]), float(decoder[1] - decoder[0])),
        seconds=float(np.median([w.seconds / f.seconds for f, w in costs])),
    )


def _costs(result: Result, arm: str, whole: str) -> tuple[Cost, Cost]:
    by_arm = {cost.arm: cost for cost in result.costs}
    return by_arm[arm], by_arm[whole]
