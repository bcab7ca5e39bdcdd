"""What is known of an evaluation that was stopped? JSON lines, one a finished experiment and case.

The first line says what is evaluated. A line is appended whole; what a kill left of the last one is
cut off when the evaluation goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ripresa.cluster.evaluation.experiments import Cost, Experiment, Result
from ripresa.cluster.evaluation.measures import Group, Match
from ripresa.cluster.evaluation.served import Hit
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError

FILE = "samples.jsonl"
FORMAT = "ripresa replay evaluation"
VERSION = 1

Settings = Mapping[str, Any]
"""Whatever changes results, as JSON has it."""


class ResultsFile:
    """The results of one evaluation, in a folder.

    Attributes:
        path: the file.
        results: those that are there, in the order in which they came.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Open the folder's file, or begin one.

        Raises:
            InvalidArgument: it holds another evaluation's results, or is no such file.
            RipresaError: FAILED_PRECONDITION; it cannot be written.
        """
        self.path = folder / FILE
        self.results: list[Result] = []
        head = {"format": FORMAT, "version": VERSION, **settings}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.path.exists() or not self.path.stat().st_size:
                self._append(head)
                return
            self._read(head)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _read(self, head: Settings) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:  # not even the first line was written
            self.path.write_bytes(b"")
            self._append(head)
            return
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        try:
            found, *lines = (json.loads(line) for line in whole.splitlines())
            self.results = [_result(line) for line in lines]
            changed = {key for key in {*found, *head} if found.get(key) != head.get(key)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                "--out",
                f"{self.path} holds no results of an evaluation ({error!r}); name another folder",
            ) from error
        if changed:
            raise InvalidArgument(
                "--out",
                f"{self.path} holds results of another {', '.join(sorted(changed))}; name another "
                "folder",
            )

    def add(self, result: Result) -> None:
        """Append a result.

        Raises:
            RipresaError: FAILED_PRECONDITION; it cannot be written. What was there stays whole.
        """
        try:
            self._append(asdict(result))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.results.append(result)

    def has(self, experiment: Experiment, number: int) -> bool:
        return any((r.experiment, r.number) == (experiment, number) for r in self.results)

    def _append(self, document: Mapping[str, Any]) -> None:
        with open(self.path, "ab") as file:
            file.write(json.dumps(document).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _result(line: Mapping[str, Any]) -> Result:
    return Result(
        Experiment(line["experiment"]),
        line["number"],
        tuple(Group(**each) for each in line["groups"]),
        tuple(Match(**each) for each in line["matches"]),
        tuple(Cost(**each) for each in line["costs"]),
        tuple(Hit(**each) for each in line["hits"]),
        line["worst_exact"],
    )


def _unwritable(path: Path, error: OSError) -> RipresaError:
    return RipresaError(
        ErrorCode.FAILED_PRECONDITION,
        f"{path} cannot be written: {error.strerror or error}; make room or name another --out, "
        "and run the command again: it goes on from what is there",
    )
