"""Which pool entries does a query read, and how does the indexer learn to choose them?

Choosing has no gradient. The indexer therefore has a loss of its own, as in DeepSeek-V3.2's
report: its scores' distribution shall be that of the attention which reads them, summed over the
heads of every layer that shares the selection. Nothing else learns from that loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

_HIDDEN = -1e30
"""A score that no share is left for; finite, so that a row without any choice has no NaN."""


@dataclass(slots=True)
class Selection:
    """What one index source chose, a block of queries at a time (`attention.py`).

    Attributes:
        scores: of each block [B, rows, entries seen by its last query], with gradients.
        chosen: bool, as `scores`.
        is_dense: everything visible is chosen.
        attended: as `scores`, attention summed over heads and layers so far, without gradients.
    """

    scores: list[Tensor]
    chosen: list[Tensor]
    is_dense: bool
    attended: list[Tensor] = field(default_factory=list)

    def add_attended(self, shares: list[Tensor]) -> None:
        """Take in what the blocks of one layer attended to."""
        if not self.attended:
            self.attended = shares
        else:
            for total, share in zip(self.attended, shares, strict=True):
                total += share

    def loss(self) -> Tensor:
        """Mean over queries of KL(attention || softmax of scores), both over what was chosen."""
        total = self.scores[0].new_zeros(())
        count = 0
        for scores, chosen, attended in zip(self.scores, self.chosen, self.attended, strict=True):
            has_choice = chosen.sum(-1, keepdim=True) > 1
            count += int(has_choice.sum())
            target = attended / attended.sum(-1, keepdim=True).clamp(min=1e-20) * has_choice
            log_share = torch.log_softmax(scores.masked_fill(~chosen, _HIDDEN), -1)
            total = total - (target * log_share).sum() - torch.special.entr(target).sum()
        return total / max(count, 1)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """score[m, t] = sum over heads of weights[m, h] * max(0, q[m, h] . key_t).

    Args:
        q: [B, M, H, D]; weights: [B, M, H]; keys: [B, N, D].

    Returns:
        [B, M, N].
    """
    rows, heads = q.shape[1:3]
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).relu().unflatten(1, (rows, heads))
    return torch.einsum("bmhn,bmh->bmn", dots, weights)


def visible_entries(first: int, rows: int, ratio: int) -> Tensor:
    """Which entries queries [first, first + rows) see: bool [rows, entries of the last one]."""
    seen = (torch.arange(first, first + rows) + 1).div(ratio, rounding_mode="floor")
    return torch.arange(int(seen[-1])) < seen[:, None]


def choose(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """The k best allowed columns of each row, ties to the lower one: bool as `scores`.

    Args:
        scores: [B, M, N], without gradients.
        allowed: bool [M, N] or [B, M, N].
    """
    columns = scores.shape[-1]
    if columns <= k:
        return allowed.expand(scores.shape)
    masked = scores.masked_fill(~allowed, -torch.inf)
    threshold = masked.kthvalue(columns - k + 1, dim=-1, keepdim=True).values
    chosen = masked >= threshold
    tied = (chosen.sum(-1) > k) & (threshold[..., 0] > -torch.inf)
    if bool(tied.any()):
        equal = (masked == threshold)[tied]
        over = (masked > threshold)[tied]
        room = k - over.sum(-1, keepdim=True)
        chosen[tied] = over | (equal & (equal.cumsum(-1) <= room))
    return chosen & allowed


def choose_candidates(scores: Tensor, allowed: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Entries of the best candidate blocks of each row; that of the newest entry is forced in.

    Args:
        scores: [B, M, N]; allowed: bool [M, N], every row's visible entries.

    Returns:
        bool [B, M, N].
    """
    columns = scores.shape[-1]
    padding = -columns % block_size
    best = F.pad(scores.masked_fill(~allowed, -torch.inf), (0, padding), value=-torch.inf)
    best = best.unflatten(-1, (-1, block_size)).amax(-1)
    newest = (allowed.sum(-1) - 1).div(block_size, rounding_mode="floor")
    blocks = torch.arange(best.shape[-1])
    best = best.masked_fill(blocks == newest[:, None], torch.inf)
    chosen = choose(best, best > -torch.inf, num_blocks)
    return chosen.repeat_interleave(block_size, -1)[..., :columns] & allowed
