"""Which tokenizer belongs to a checkpoint? Its tokenizer.json, a file that nobody vouches for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from ripresa.workers.errors import CheckpointError
from ripresa.workers.models.regular_file import file_within, open_regular

TOKENIZER_FILE = "tokenizer.json"
_MAX_BYTES = 256 << 20


def read_tokenizer_file(path: Path) -> bytes:
    """The bytes of a tokenizer.json.

    Raises:
        CheckpointError: it is missing, absurdly large, no regular file, or a link that leads out
            of its folder.
    """
    try:
        with open_regular(file_within(path.parent, path.name)) as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # a link may lead to itself
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}") from error
    if len(content) > _MAX_BYTES:
        raise CheckpointError(f"{path} is larger than {_MAX_BYTES} bytes, an absurd size")
    return content


def checkpoint_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None for a folder without a tokenizer.json.

    Raises:
        CheckpointError: the file cannot be read, or is no tokenizer.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists() and not path.is_symlink():
        return None
    content = read_tokenizer_file(path)
    with usable_tokenizer():
        return Tokenizer.from_str(content.decode("utf-8"))


@contextmanager
def usable_tokenizer() -> Iterator[None]:
    """What the library raises for a tokenizer that is none, or that breaks when it is used.

    Raises:
        CheckpointError: in place of the library's bare `Exception`, and of its panics, which are
            no `Exception` and would end the process.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(
                f"the checkpoint has no usable {TOKENIZER_FILE} ({error}); copy the file again"
            ) from error
        raise
