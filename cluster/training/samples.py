"""What does each step of a training read? Rendered conversations and texts, cut to one length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ripresa.cluster.training.rendering import Renderer, Sample
from ripresa.workers.demo.ledger.draws import Draws, Split
from ripresa.workers.demo.ledger.filler import paragraphs
from ripresa.workers.demo.ledger.scripts import DISTANT, RECALL, WARM_UP, Mix, draw_conversation
from ripresa.workers.demo.training.plan import Phase, Step
from ripresa.workers.demo.training.trainer import Batch

TEXT_WEIGHT = CONTEXT_WEIGHT = 0.3
REPEAT_WEIGHT = 0.5
"""Half as much as an answer; a tool's result names its subject in every line."""
TOOLS_SHARE = 0.3
"""Of samples that are long enough for the tools' preamble."""
_LONG = 1024
_CHARACTERS_PER_TOKEN = 2.3
"""A little more than conversations have, so that few samples are too short."""
_PAD = 2


@dataclass(frozen=True, slots=True)
class Diet:
    """What the samples of a phase are.

    Attributes:
        text: share of samples that are prose and code; context: of the conversations, those in
            which what others say is learnt too. Both are hard to predict, so their gradients are
            much larger than those of answers.
    """

    mix: Mix
    text: float
    context: float


DIETS = {
    Phase.WARM_UP: Diet(WARM_UP, text=0.0, context=0.25),
    Phase.FULL: Diet(RECALL, text=0.12, context=0.25),
    Phase.DISTANT: Diet(DISTANT, text=0.02, context=0.05),
}


class LedgerBatches:
    """Samples by step and process, the same whenever they are asked for.

    Args:
        seed: below 2^22; trainings with different ones share no sample.
    """

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        self._renderer = Renderer(tokenizer_file)
        self._seed = seed

    def batch(self, number: int, step: Step, rank: int) -> Batch:
        token_ids = torch.full((step.num_sequences, step.length), _PAD, dtype=torch.int64)
        weights = torch.zeros(step.num_sequences, step.length)
        for place in range(step.num_sequences):
            # 2^44 indices a seed: 2^28 steps of 2^8 processes of 2^8 sequences.
            index = ((self._seed << 28 | number) << 8 | rank) << 8 | place
            sample = self._sample(Draws(Split.TRAINING, index), step)
            size = min(len(sample.token_ids), step.length)
            token_ids[place, :size] = torch.tensor(sample.token_ids[:size])
            weights[place, :size] = torch.tensor(sample.weights[:size])
        return Batch(token_ids, weights)

    def _sample(self, draws: Draws, step: Step) -> Sample:
        filler = paragraphs(draws.split)
        num_characters = int(step.length * _CHARACTERS_PER_TOKEN)
        diet = DIETS[step.phase]
        if diet.text and draws.chance(diet.text):
            text = ""
            first = draws.below(len(filler))
            while len(text) < 2 * num_characters:
                text += filler[first % len(filler)] + "\n\n"
                first += 1
            return self._renderer.text(text, TEXT_WEIGHT)
        conversation = draw_conversation(
            draws,
            diet.mix,
            filler,
            num_characters,
            TOOLS_SHARE if step.length >= _LONG else 0.0,
        )
        context_weight = CONTEXT_WEIGHT if draws.chance(diet.context) else 0.0
        return self._renderer.conversation(conversation, context_weight, REPEAT_WEIGHT)
