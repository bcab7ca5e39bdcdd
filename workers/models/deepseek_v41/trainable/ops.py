"""Which operations does a gradient pass through? Norms, rotations, hyper-connections, rounding.

The same formulas as the kernels', which write in place and have no gradients. Those that would keep
many tensors for the way back have it written out by hand.
"""

# torch's autograd functions are untyped.
# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch

from ripresa.kernels.dispatch import Grid

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis."""
    result: Tensor = _RmsNorm.apply(x, weight, eps)
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        scale = reciprocal_rms(x, eps)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed if weight is None else normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normed, scale, weight = ctx.saved_tensors
        of_weight = None
        if weight is not None:
            of_weight = (grad * normed).flatten(0, -2).sum(0)
            grad = grad * weight
        share = (grad * normed).mean(-1, keepdim=True)
        return torch.addcmul(grad, normed, share, value=-1).mul_(scale), of_weight, None


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`x @ weight^T` for x [R, in], multiplied in `dtype`; float32 in and out."""
    if dtype is torch.float32:
        return torch.nn.functional.linear(x, weight)
    result: Tensor = _Linear.apply(x, weight, dtype)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return (x @ weight.t()).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return (grad @ weight).float(), (grad.t() @ x).float(), None


_LOSS_ROWS = 512
"""Rows whose scores over the vocabulary are held at once."""


def next_token_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cross entropy of rows' next tokens.

    Args:
        hidden: [R, d]; head: [vocab, d].
        targets: [R] int64; weights: [R].

    Returns:
        the weighted sum, and each row's own loss [R] without gradients.
    """
    total, losses = _NextTokenLoss.apply(hidden, head, targets, weights, dtype)
    return total, losses


class _NextTokenLoss(torch.autograd.Function):
    """Both ways in one go, so that no score is kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        narrow = head.to(dtype)
        losses = torch.empty_like(weights)
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head)
        for first in range(0, len(hidden), _LOSS_ROWS):
            part = slice(first, first + _LOSS_ROWS)
            x, target = hidden[part].to(dtype), targets[part, None]
            logits = (x @ narrow.t()).to(hidden.dtype)
            chance = torch.softmax(logits, -1)
            losses[part] = -chance.gather(1, target)[:, 0].clamp(min=1e-30).log()
            chance.scatter_add_(1, target, -torch.ones_like(target, dtype=chance.dtype))
            of_logits = chance.mul_(weights[part, None]).to(dtype)
            of_hidden[part] = of_logits @ narrow
            of_head += of_logits.t() @ x
        ctx.save_for_backward(of_hidden, of_head)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * grad, of_head * grad, None, None, None


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """The last channels of x rotated.

    Args:
        x: [..., T, D] or, with heads, [..., T, H, D].
        phases: complex64 [T, rope / 2] or [T, 1, rope / 2].
    """
    result: Tensor = _Rotate.apply(x, phases)
    return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phases: Tensor) -> Tensor:
        ctx.save_for_backward(phases)
        return _rotated(x, phases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (phases,) = ctx.saved_tensors
        return _rotated(grad, phases.conj()), None


def _rotated(x: Tensor, phases: Tensor) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    tail = y[..., y.shape[-1] - 2 * phases.shape[-1] :]
    torch.view_as_complex(tail.unflatten(-1, (-1, 2))).mul_(phases)
    return y


def rounded(x: Tensor, grid: Grid) -> Tensor:
    """x as a cache would give it back; the gradient passes as if nothing had been rounded."""
    return x + (grid.round_trip(x.detach()) - x.detach())


def read_streams(
    streams: Tensor,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rounds: int,
    hc_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a site's sublayer reads, and the weights that the site mixes with (`hc_mix`).

    Args:
        streams: [R, n, d]; pre: [R, n], from the site before.

    Returns:
        x [R, d], pre_next [R, n], post [R, n] and comb [R, n, n], rows outgoing.
    """
    n = streams.shape[1]
    x, m = _ReadStreams.apply(streams, pre, fn, eps)
    pre_next = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2.0 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    comb: Tensor = _Sinkhorn.apply(logits, rounds, hc_eps)
    return x, pre_next, post, comb


class _ReadStreams(torch.autograd.Function):
    """`collapse(streams, pre)` and `flat(streams) @ fn^T / rms(flat)`.

    The streams are by far the largest tensor of a layer: what counts is how often they are passed.
    """

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, pre: Tensor, fn: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        flat = streams.flatten(1)
        scale = reciprocal_rms(flat, eps)
        m = torch.nn.functional.linear(flat, fn).mul_(scale)
        ctx.save_for_backward(streams, pre, fn, scale, m)
        return collapse(streams, pre), m

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_m: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        streams, pre, fn, scale, m = ctx.saved_tensors
        flat = streams.flatten(1)
        of_product = of_m * scale
        of_streams = (of_product @ fn).view_as(streams)
        share = (of_m * m).sum(-1, keepdim=True).mul_(scale.square()).div_(-flat.shape[1])
        of_streams.addcmul_(streams, share[:, :, None])
        of_streams.addcmul_(pre[:, :, None], of_x[:, None, :])
        of_pre = torch.bmm(streams, of_x[:, :, None])[:, :, 0]
        return of_streams, of_pre, of_product.t() @ flat, None


class _Sinkhorn(torch.autograd.Function):
    """Softmax over the last axis, then alternating divisions; [R, n, n] in and, transposed, out.

    Works on [n, n, R], where every sum runs over whole vectors, and keeps each division's result.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rounds: int, eps: float) -> Tensor:
        soft = torch.softmax(logits.permute(1, 2, 0).contiguous(), 1)
        comb = soft + eps
        steps = []
        for number in range(2 * rounds - 1):
            axis = number % 2
            total = comb.sum(axis, keepdim=True).add_(eps)
            comb = comb / total
            steps.append((axis, comb, total))
        ctx.soft, ctx.steps = soft, steps
        return comb.permute(2, 1, 0).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.permute(2, 1, 0).contiguous()
        for axis, comb, total in reversed(ctx.steps):
            # y = x / (sum x + eps): dx = (dy - sum(dy y)) / total
            grad = (grad - (grad * comb).sum(axis, keepdim=True)).div_(total)
        soft = ctx.soft
        grad = (grad - (grad * soft).sum(1, keepdim=True)) * soft
        return grad.permute(2, 0, 1), None, None


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """[R, n, d], [R, n] -> [R, d]."""
    return torch.bmm(pre[:, None, :], streams)[:, 0]


def write_streams(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """streams'[k] = post[k] y + sum_j comb[k, j] streams[j]: [R, d], [R, n, d] -> [R, n, d]."""
    result: Tensor = _WriteStreams.apply(y, streams, post, comb)
    return result


class _WriteStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(y, streams, post, comb)
        return torch.bmm(comb, streams).addcmul_(post[:, :, None], y[:, None, :])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, streams, post, comb = ctx.saved_tensors
        of_y = torch.bmm(post[:, None, :], grad)[:, 0]
        of_streams = torch.bmm(comb.transpose(1, 2), grad)
        of_post = torch.bmm(grad, y[:, :, None])[:, :, 0]
        return of_y, of_streams, of_post, torch.bmm(grad, streams.transpose(1, 2))


def inject(
    streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    """Streams with an n-gram memory's values added, as `engram_inject` does.

    Args:
        streams: [R, n, d]; projected: [R, (n + 1) d].
    """
    rows, n, d = streams.shape
    keys, value = projected.view(rows, n + 1, d).split((n, 1), dim=1)
    products = rms_norm(streams, None, eps) * rms_norm(keys, None, eps) * (q_weight * k_weight)
    dots = products.sum(-1) * d**-0.5
    gates = torch.sigmoid(dots.abs().clamp(min=1e-6).sqrt() * dots.sign())
    return torch.addcmul(streams, gates[:, :, None], value)
