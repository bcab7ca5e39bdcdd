"""How do matrices that mix channels move? By orthogonalised momentum, in the products' type.

PyTorch's Muon multiplies in bfloat16 whatever the CPU: one without such instructions takes seven
times as long for these products as in float32, and rounds them in its own way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz, with Nesterov momentum and decoupled decay.

    A step moves W [m, n] by -lr sqrt(max(1, m/n)) NS(momentum) and scales it by 1 - lr decay: the
    algorithm of https://kellerjordan.github.io/posts/muon/. Matrices of one shape are taken
    together.

    Args:
        parameters: float32 matrices.
        dtype: of the products.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(parameters, defaults)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient; gradients are overwritten."""
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    of_shape[matrix.shape].append(matrix)
            for matrices in of_shape.values():
                self._move(matrices, group)

    def _move(self, matrices: list[torch.Tensor], group: dict[str, Any]) -> None:
        rows, columns = matrices[0].shape
        updates = orthogonalized(
            torch.stack([self._pushed(w, group) for w in matrices]).to(self._dtype)
        )
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update, alpha=-rate)

    def _pushed(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The gradient, looked at from where momentum leads to."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: torch.Tensor = state["momentum_buffer"]
        momentum.lerp_(matrix.grad, 1 - group["momentum"])
        return matrix.grad.lerp_(momentum, group["momentum"])


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [k, m, n] with their singular values near 1, by five Newton-Schulz steps."""
    if matrices.shape[1] > matrices.shape[2]:
        turned: torch.Tensor = orthogonalized(matrices.mT).mT
        return turned
    a, b, c = COEFFICIENTS
    x: torch.Tensor = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
