"""How does a session's parked state move to another decode worker? Sealed, so that it is checked.

An image that does not fit, or was damaged on the way, is as good as none: the session's next turn
is then an ordinary hit. Whole blocks are no part of it; they are pulled like any others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ripresa.workers.cache.parked_states import ParkedState
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.replay import RULES_VERSION
from ripresa.workers.transfer.checksum import payload_checksum


@dataclass(frozen=True, slots=True)
class SessionImage:
    """A session's state on its way between two decode workers.

    Attributes:
        tenant_salt, session_id: whose it is.
        layout_digest: names model, weights, KV format and geometry.
        state: the state, with a payload of its own in host memory.
        checksum: of the payload.
    """

    tenant_salt: bytes
    session_id: str
    layout_digest: bytes
    state: ParkedState[torch.Tensor]
    checksum: int


def seal(
    tenant_salt: bytes, session_id: str, layout_digest: bytes, state: ParkedState[torch.Tensor]
) -> SessionImage:
    """Make an image of a state that leaves this worker."""
    checksum = payload_checksum(state.payload)
    return SessionImage(tenant_salt, session_id, layout_digest, state, checksum)


def check(image: SessionImage, layout_digest: bytes) -> None:
    """Raise RipresaError unless the image is whole, and of this worker's kind.

    FAILED_PRECONDITION: another layout or version of the rules. DATA_LOSS: damaged.
    """
    if image.layout_digest != layout_digest:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            "the session's state is of another KV layout; run one model and configuration "
            "everywhere",
        )
    if image.state.recipe.rules_version != RULES_VERSION:
        raise RipresaError(
            ErrorCode.FAILED_PRECONDITION,
            f"the session's state follows rules {image.state.recipe.rules_version!r}, and this "
            f"worker {RULES_VERSION!r}; run one version of ripresa in the whole cluster",
        )
    if payload_checksum(image.state.payload) != image.checksum:
        raise RipresaError(
            ErrorCode.DATA_LOSS, "the session's state was damaged on its way; it is computed again"
        )
