"""How is a file of a checkpoint folder opened, so that it can only be a file of that folder?"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open for reading; never blocks on a pipe and never reads a device.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the name
        raise OSError(f"{path!s} is no file name: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def file_within(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`.

    Raises:
        ValueError: `name` is a path, or a link that leads out of the folder.
        RuntimeError: it is a link that leads to itself.
    """
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(
            f"{name!r} is a link that leads out of the folder; copy the file itself into it"
        )
    return path
