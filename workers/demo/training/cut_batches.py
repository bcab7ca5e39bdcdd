"""Where are a training's sequences cut? At drawn boundaries, as if workers had begun there.

Of the sequences that are cut, one half is cut in the decoder half of the model alone, as at the end
of every prompt, the other in both halves, as behind a prefix hit without its windows. Only tokens
behind the boundary then teach anything: nothing else has changed, and a cache passes no gradient.
"""

from __future__ import annotations

import random

import torch

from ripresa.workers.demo.training.plan import Step
from ripresa.workers.demo.training.trainer import Batch, Batches
from ripresa.workers.models.deepseek_v41.trainable.cuts import Cuts

REPLAYS = (0, 32, 64, 128)
"""Lengths R of a replay: the rows [b - R, b) are computed again."""
_BOTH_SHARE = 0.5


class CutBatches:
    """Batches of somebody else's with cuts, which depend on seed, step and process alone.

    Args:
        window: boundaries of prefix hits are its multiples.
        share: of the sequences, those that are cut, but for too short ones.
    """

    def __init__(self, batches: Batches, window: int, seed: int, share: float) -> None:
        self._batches, self._window = batches, window
        self._seed, self._share = seed, share

    def batch(self, number: int, step: Step, rank: int) -> Batch:
        whole = self._batches.batch(number, step, rank)
        weights = whole.weights.clone()
        places = []
        for sequence, row in enumerate(weights):
            draw = random.Random(f"cuts:{self._seed}:{number}:{rank}:{sequence}").random
            counted = row.nonzero()
            stop = int(counted[-1]) + 1 if len(counted) else 0
            is_cut, in_both = draw() < self._share, draw() < _BOTH_SHARE
            replay = REPLAYS[int(draw() * len(REPLAYS))]
            # What a cut changes lies within a window behind its boundary.
            last = stop - self._window
            boundary = _boundary(draw(), replay, last, self._window if in_both else 1)
            if not is_cut or boundary is None:
                places.append((0, 0, 0))
                continue
            row[:boundary] = 0.0
            start = boundary - replay
            places.append((start, boundary, start) if in_both else (0, 0, start))
        encoder, known, decoder = torch.tensor(places).unbind(1)
        return Batch(whole.token_ids, weights, Cuts(encoder, known, decoder))


def _boundary(drawn: float, replay: int, last: int, step: int) -> int | None:
    """A multiple of `step` in (replay, last]; None if there is none."""
    lowest, highest = replay // step + 1, last // step
    if highest < lowest:
        return None
    return step * (lowest + int(drawn * (highest - lowest + 1)))
