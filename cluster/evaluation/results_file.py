"""What is known of an evaluation that was stopped? JSON lines, one a finished experiment and case.

The first line says what is evaluated. A line is appended whole; what a kill left of the last one is
cut off when the evaluation goes on. One evaluation at a time has the file, by a lock that ends with
its process.
"""

from __future__ import annotations

import fcntl
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
VERSION = 2

Settings = Mapping[str, Any]
"""Whatever changes results, as JSON has it."""


class ResultsFile:
    """The results of one evaluation, in a folder that is this one's until its `with` block ends.

    Attributes:
        path: the file.
        results: those that are there, in the order in which they came.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Open the folder's file, or begin one.

        Raises:
            InvalidArgument: it holds another evaluation's results, or is no such file.
            RipresaError: FAILED_PRECONDITION; it cannot be written, or another evaluation is under
                way there.
        """
        self.path = folder / FILE
        self.results: list[Result] = []
        head = {"format": FORMAT, "version": VERSION, **settings}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path, "ab")  # noqa: SIM115
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            self._begin(head)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the folder to others."""
        self._lock.close()

    def _begin(self, head: Settings) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.stat().st_size:
                self._read(head)
            else:
                self._append(head)
        except BlockingIOError as error:
            raise RipresaError(
                ErrorCode.FAILED_PRECONDITION,
                f"another evaluation is writing to {self.path}; wait for its end, or name another "
                "--out",
            ) from error
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _read(self, head: Settings) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:  # not even the first line was written
            os.truncate(self.path, 0)
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
        line["hit"],
        line["worst_exact"],
        line["exact_start"],
    )


def _unwritable(path: Path, error: OSError) -> RipresaError:
    return RipresaError(
        ErrorCode.FAILED_PRECONDITION,
        f"{path} cannot be written: {error.strerror or error}; make room or name another --out, "
        "and run the command again: it goes on from what is there",
    )
