"""Who stores what arrives? Hand-overs go to the engine, pulled blocks to whoever pulled them."""

from __future__ import annotations

import torch

from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.transfer.base import AnyManifest, Manifest, PullManifest, Section, Sink


class SinkByManifest:
    """The sink of a worker; see `Sink` for the contract.

    Args:
        pulls: takes pulled blocks and windows.
        hand_overs: takes prompts' states; None for a worker that none are handed to.
    """

    def __init__(self, pulls: Sink[PullManifest], hand_overs: Sink[Manifest] | None = None) -> None:
        self._pulls = pulls
        self._hand_overs = hand_overs

    def open(self, manifest: AnyManifest) -> int:
        if isinstance(manifest, PullManifest):
            return self._pulls.open(manifest)
        return self._engine().open(manifest)

    def section_bytes(self, manifest: AnyManifest, section: Section) -> int:
        if isinstance(manifest, PullManifest):
            return self._pulls.section_bytes(manifest, section)
        return self._engine().section_bytes(manifest, section)

    def write(self, manifest: AnyManifest, section: Section, payload: torch.Tensor) -> None:
        if isinstance(manifest, PullManifest):
            self._pulls.write(manifest, section, payload)
        else:
            self._engine().write(manifest, section, payload)

    def complete(self, manifest: AnyManifest) -> None:
        if isinstance(manifest, PullManifest):
            self._pulls.complete(manifest)
        else:
            self._engine().complete(manifest)

    def fail(self, manifest: AnyManifest, reason: str) -> None:
        if isinstance(manifest, PullManifest):
            self._pulls.fail(manifest, reason)
        else:
            self._engine().fail(manifest, reason)

    def _engine(self) -> Sink[Manifest]:
        if self._hand_overs is None:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                "this worker takes no hand-over; name a decode worker as the receiver",
            )
        return self._hand_overs
