"""How far is a case's execution from the reference? Sums over its tokens, by kind and distance.

Sums and counts alone are kept of a conversation: they can be added up, and drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ripresa.cluster.evaluation.cases import Answer
from ripresa.cluster.evaluation.laboratory import Foretelling
from ripresa.cluster.evaluation.selections import overlap
from ripresa.workers.scoring import TokenDifferences, compare_logits

SUPERVISED, CONTEXT = "supervised", "context"
OVERLAP = "overlap of layer "


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens of one arm, kind and distance in one conversation.

    Attributes:
        kind: `supervised` for what the assistant says, `context` for the rest.
        bucket: of the distance, as `[16,64)`.
        num_tokens: how many there are.
        sums: by measure, over the tokens: `nll` and `reference nll`, `difference` of the two and
            `kl` in nats; `same top`, the reference's likeliest token is the likeliest here; the
            share of selected entries that are the reference's, `overlap of layer N`.
    """

    arm: str
    kind: str
    bucket: str
    num_tokens: int
    sums: dict[str, float]


@dataclass(frozen=True, slots=True)
class Match:
    """A message of the assistant: whether greedy decoding behind the reference's would say it."""

    arm: str
    task: str
    placement: str | None
    is_exact: bool


def bounds(window: int) -> tuple[int, ...]:
    """Where buckets of distances begin, and the last one ends: 0, 16, 64, 128, 256, 512, 1,024
    tokens for a window of 128."""
    return (0, window // 8, window // 2, window, 2 * window, 4 * window, 8 * window)


def bucket_names(window: int) -> list[str]:
    return [f"[{first},{last})" for first, last in pairwise(bounds(window))]


def groups(
    arm: str,
    reference: Foretelling,
    other: Foretelling,
    differences: TokenDifferences,
    boundary: int,
    window: int,
    supervised: frozenset[int],
) -> Iterator[Group]:
    """The sums of a case's tokens, foretold by the reference and by an arm.

    Args:
        differences: of the two; see `differences_of`.
        boundary: distances count from this token.
    """
    values = {
        "reference nll": differences.reference_nll,
        "nll": differences.nll,
        "difference": differences.nll - differences.reference_nll,
        "kl": differences.kl,
        "same top": differences.same_top.double(),
    }
    for layer in sorted(reference.selected.keys() & other.selected.keys()):
        shared = overlap(reference.selected[layer], other.selected[layer])
        values[f"{OVERLAP}{layer}"] = shared
    num_tokens = len(other.logits)
    positions = torch.arange(other.start, other.start + num_tokens)
    distance = positions - boundary
    said = torch.tensor([int(p) in supervised for p in positions], dtype=torch.bool)
    for name, (first, last) in zip(bucket_names(window), pairwise(bounds(window)), strict=True):
        inside = (distance >= first) & (distance < last)
        for kind, chosen in ((SUPERVISED, inside & said), (CONTEXT, inside & ~said)):
            count = int(chosen.sum())
            if count:
                sums = {key: float(value[chosen].sum()) for key, value in values.items()}
                yield Group(arm, kind, name, count, sums)


def differences_of(
    reference: Foretelling, other: Foretelling, token_ids: Sequence[int]
) -> TokenDifferences:
    """Compare what two executions say of the same tokens of a sequence."""
    stop = other.start + len(other.logits)
    return compare_logits(reference.logits, other.logits, token_ids[other.start : stop])


def matches(
    arm: str,
    differences: TokenDifferences,
    start: int,
    answers: Sequence[Answer],
    placement: str | None,
) -> Iterator[Match]:
    """The answers among the tokens from `start` on, each behind the reference's text.

    All its tokens likeliest is what greedy decoding would have said: the same exact match.
    """
    stop = start + len(differences.top_is_token)
    for answer in answers:
        if start <= answer.start and answer.stop <= stop:
            part = differences.top_is_token[answer.start - start : answer.stop - start]
            yield Match(arm, answer.task, placement, bool(part.all()))
