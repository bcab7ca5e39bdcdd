"""What is kept of a training's steps? A JSON line each, in order; none of a step lost to a kill."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from ripresa.workers.demo.training.trainer import unwritten


def entries(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The steps and tables that led to the last line.

    A training that went on from its saved state computes the steps behind it again; a kill may tear
    a line. Neither what was computed again nor what is torn is kept.
    """
    kept: list[dict[str, Any]] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or "tokens" not in entry:
            continue
        while "step" in entry and kept and kept[-1]["tokens"] >= entry["tokens"]:
            kept.pop()
        kept.append(entry)
    return kept


class StepLog:
    """A log that a training adds to.

    Args:
        path: of the log, which may exist.
        num_tokens: read by the state that the training goes on from; lines behind it are dropped.

    Raises:
        RipresaError: it cannot be written; `write` likewise.
    """

    def __init__(self, path: Path, num_tokens: int) -> None:
        self._path = path
        try:
            if path.exists():
                _keep(path, num_tokens)
            # Unbuffered: what could not be written is not tried again by closing it.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise unwritten(path, error) from error

    def write(self, entry: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise unwritten(self._path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _keep(path: Path, num_tokens: int) -> None:
    found = entries(path.read_text(encoding="utf-8", errors="replace").splitlines())
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for entry in found:
                if entry["tokens"] <= num_tokens:
                    file.write(json.dumps(entry) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
