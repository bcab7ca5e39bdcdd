"""What can a model do? Exact matches on held-out conversations, by task and distance.

The model reads the reference's conversation and its most likely token is compared at every place of
an answer. All of them right is what greedy decoding would have said: the same exact match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ripresa.cluster.training.rendering import Renderer
from ripresa.cluster.training.scores import Score
from ripresa.workers.demo.ledger.checker import distance_bucket
from ripresa.workers.demo.ledger.conversation import Conversation
from ripresa.workers.models.deepseek_v41.trainable.model import TrainableModel

_PAD = 2


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
