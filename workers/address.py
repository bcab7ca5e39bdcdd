"""Which worker of the cluster is meant, and how is it reached? Its id and its kind."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WorkerKind(StrEnum):
    ENCODER = "encoder"
    DECODE = "decode"


class WorkerAddress(NamedTuple):
    """A worker that others send to.

    Attributes:
        worker_id: unique for ever; a restarted process has another one.
        kind: its deployment.
    """

    worker_id: str
    kind: WorkerKind
