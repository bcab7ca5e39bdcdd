"""How do parameters move? Muon for the matrices between layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ripresa.workers.demo.training.muon import Muon

Tensors = Mapping[str, torch.Tensor]

MUON_RATE = 0.02
ADAM_RATE = 4e-3
MUON_DECAY = 0.02
BALANCE_RATE = 2e-3
"""By how much a step moves the picking bias of an expert that has too many or too few rows."""

_BY_ROW = ("embed.weight", "head.weight")
_PICKING = ".ffn.gate.bias"


def is_trained(name: str) -> bool:
    """Whether gradients move a parameter; the picking bias is moved by `balance`."""
    return not name.endswith(_PICKING)


def uses_muon(name: str, tensor: torch.Tensor) -> bool:
    """Matrices that mix channels; tables, what chooses, and hyper-connections are not."""
    if tensor.dim() != 2 or name.endswith(_BY_ROW):
        return False
    return not any(
        part in name for part in (".hc_", ".indexer.", ".gate.", ".q_weight", ".k_weight")
    )


class Optimizer:
    """Both optimizers as one, with a common rate.

    Args:
        dtype: of the products of Muon.
    """

    def __init__(self, parameters: Tensors, dtype: torch.dtype = torch.float32) -> None:
        trained = {name: p for name, p in parameters.items() if is_trained(name)}
        self._muon = Muon(
            [p for name, p in trained.items() if uses_muon(name, p)],
            lr=MUON_RATE,
            weight_decay=MUON_DECAY,
            dtype=dtype,
        )
        self._adam = torch.optim.AdamW(
            [p for name, p in trained.items() if not uses_muon(name, p)],
            lr=ADAM_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def step(self, rate: float) -> None:
        """Move by the gradients, at a share of the highest rate; the gradients are dropped."""
        for optimizer, highest in ((self._muon, MUON_RATE), (self._adam, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = highest * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


def balance(parameters: Tensors, counts: torch.Tensor, rate: float) -> None:
    """Move picking biases towards experts with fewer rows.

    Args:
        counts: [layers, experts], rows that picked each expert.
    """
    counts = counts.to(torch.float32)
    for layer, count in enumerate(counts):
        bias = parameters[f"layers.{layer}{_PICKING}"]
        bias += BALANCE_RATE * rate * (count.mean() - count).sign()
