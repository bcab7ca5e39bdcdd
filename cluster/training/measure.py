"""What can a model do? Exact matches on held-out conversations, by task and distance.

The model reads the reference's conversation and its most likely token is compared at every place of
an answer. All of them right is what greedy decoding would have said: the same exact match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.ledger.checker import distance_bucket
from ripresa.workers.demo.ledger.conversation import Conversation, Task
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

_PAD = 2


@dataclass(frozen=True, slots=True)
class Score:
    """One assistant's message: whether all of its tokens, and which share of them, were right."""

    task: Task
    bucket: str | None
    is_exact: bool
    token_share: float


def measure(
    model: TrainableModel, renderer: Renderer, conversations: Iterable[Conversation]
) -> Iterator[Score]:
    """Every message of some conversations."""
    window = model.config.sliding_window
    for conversation in conversations:
        answers = renderer.answers(conversation)
        ids = torch.tensor([answers.token_ids])
        padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % window), value=_PAD)
        with torch.no_grad():
            best = model.logits(model.forward(padded).hidden)[0].argmax(-1)
        right = best[: ids.shape[1] - 1] == ids[0, 1:]
        for span in answers.spans:
            part = right[span.start - 1 : span.stop - 1].float()
            bucket = None if span.distance is None else distance_bucket(span.distance)
            yield Score(span.task, bucket, bool(part.all()), float(part.mean()))


def table(scores: Sequence[Score]) -> Iterator[str]:
    """Lines: task, distance, number of messages, exact matches, tokens right."""
    groups: dict[tuple[str, str], list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.task, "all"].append(score)
        if score.bucket is not None:
            groups[score.task, score.bucket].append(score)

    def order(key: tuple[str, str]) -> tuple[int, int]:
        return list(Task).index(Task(key[0])), -1 if key[1] == "all" else int(key[1].split("-")[0])

    yield f"{'task':14} {'distance':>10} {'messages':>8} {'exact':>6} {'tokens':>7}"
    for key in sorted(groups, key=order):
        part = groups[key]
        exact = sum(score.is_exact for score in part) / len(part)
        tokens = sum(score.token_share for score in part) / len(part)
        yield f"{key[0]:14} {key[1]:>10} {len(part):8} {exact:6.3f} {tokens:7.3f}"
