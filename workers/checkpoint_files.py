"""Are the files of a checkpoint the ones that were copied? Their SHA-256, against a record.

A flipped bit among the weights is a valid weight; only a hash finds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from ripresa.workers.errors import CheckpointError, ConfigError
from ripresa.workers.models.checkpoint import ProgressLines
from ripresa.workers.models.checkpoint_index import INDEX_FILE, shard_paths
from ripresa.workers.models.regular_file import file_within, open_regular

SUMS_FILE = "SHA256SUMS"
_PIECE = 8 << 20
_MAX_SUMS_BYTES = 16 << 20

Echo = Callable[[str], None]


class CheckpointFiles:
    """The files that a model is loaded from: config, tokenizer, index and shards.

    Args:
        folder: the checkpoint. A `SHA256SUMS` in it, as `sha256sum` writes them, is the record.

    Raises:
        CheckpointError: the index is unusable, or a link leads out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        names = ("config.json", "tokenizer.json", INDEX_FILE)
        try:
            self._paths = [file_within(folder, name) for name in names if (folder / name).exists()]
            self._record = file_within(folder, SUMS_FILE)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder} points outside: {error}") from error
        self._paths += shard_paths(folder)

    def check(self, echo: Echo, *, record: bool = False) -> bool:
        """Hash every file and hold it against the record; True unless one differs.

        Args:
            echo: takes a line a file.
            record: write the record anew instead.

        Raises:
            CheckpointError: a file or the record cannot be read.
            ConfigError: the record cannot be written.
        """
        recorded = {} if record else self._read_record()
        hashes = {}
        good = True
        progress = ProgressLines("hashing", echo)
        total = sum(path.stat().st_size for path in self._paths)
        done = 0
        for path in self._paths:
            digest = hashlib.sha256()
            try:
                with open_regular(path) as file:
                    while piece := file.read(_PIECE):
                        digest.update(piece)
                        done += len(piece)
                        progress(done, total)
            except OSError as error:
                raise CheckpointError(f"{path.name} cannot be read: {error}") from error
            hashes[path.name] = digest.hexdigest()
            good &= recorded.get(path.name, hashes[path.name]) == hashes[path.name]
            verdict = _verdict(recorded.get(path.name), hashes[path.name], record)
            echo(f"{path.name}  sha256 {hashes[path.name]}  {verdict}")
        if record:
            self._write_record(hashes)
        return good

    def _read_record(self) -> dict[str, str]:
        path = self._record
        if not path.exists():
            return {}
        try:
            with open_regular(path) as file:
                lines = file.read(_MAX_SUMS_BYTES).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{SUMS_FILE} cannot be read: {error}") from error
        pairs = (line.split(maxsplit=1) for line in lines if line.strip())
        return {pair[1].lstrip("*"): pair[0].lower() for pair in pairs if len(pair) == 2}

    def _write_record(self, hashes: dict[str, str]) -> None:
        path = self._record
        try:
            path.write_text("".join(f"{value}  {name}\n" for name, value in hashes.items()))
        except OSError as error:
            raise ConfigError("--record", f"{path} cannot be written: {error}") from error


def _verdict(expected: str | None, found: str, record: bool) -> str:
    if record:
        return "recorded"
    if expected is None:
        return f"not in {SUMS_FILE}"
    return f"as in {SUMS_FILE}" if expected == found else f"DIFFERS from {SUMS_FILE}: copy it again"
