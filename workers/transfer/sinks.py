"""Who stores what arrives? Hand-overs go to the engine, blocks to whoever pulled or keeps them."""

from __future__ import annotations

import torch

from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.transfer.base import (
    AnyManifest,
    Manifest,
    MoveManifest,
    PullManifest,
    Section,
    Sink,
)


class SinkByManifest:
    """The sink of a worker; see `Sink` for the contract.

    Args:
        pulls: takes pulled blocks and windows.
        moves: takes blocks that others have to evict.
        hand_overs: takes prompts' states; None for a worker that none are handed to.
    """

    def __init__(
        self,
        pulls: Sink[PullManifest],
        moves: Sink[MoveManifest],
        hand_overs: Sink[Manifest] | None = None,
    ) -> None:
        self._pulls = pulls
        self._moves = moves
        self._hand_overs = hand_overs

    def open(self, manifest: AnyManifest) -> int:
        match manifest:
            case PullManifest():
                return self._pulls.open(manifest)
            case MoveManifest():
                return self._moves.open(manifest)
            case Manifest():
                return self._engine().open(manifest)

    def section_bytes(self, manifest: AnyManifest, section: Section) -> int:
        match manifest:
            case PullManifest():
                return self._pulls.section_bytes(manifest, section)
            case MoveManifest():
                return self._moves.section_bytes(manifest, section)
            case Manifest():
                return self._engine().section_bytes(manifest, section)

    def write(self, manifest: AnyManifest, section: Section, payload: torch.Tensor) -> None:
        match manifest:
            case PullManifest():
                self._pulls.write(manifest, section, payload)
            case MoveManifest():
                self._moves.write(manifest, section, payload)
            case Manifest():
                self._engine().write(manifest, section, payload)

    def complete(self, manifest: AnyManifest) -> None:
        match manifest:
            case PullManifest():
                self._pulls.complete(manifest)
            case MoveManifest():
                self._moves.complete(manifest)
            case Manifest():
                self._engine().complete(manifest)

    def fail(self, manifest: AnyManifest, reason: str) -> None:
        match manifest:
            case PullManifest():
                self._pulls.fail(manifest, reason)
            case MoveManifest():
                self._moves.fail(manifest, reason)
            case Manifest():
                self._engine().fail(manifest, reason)

    def _engine(self) -> Sink[Manifest]:
        if self._hand_overs is None:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "this worker takes no hand-over; name a decode worker as the receiver",
            )
        return self._hand_overs
