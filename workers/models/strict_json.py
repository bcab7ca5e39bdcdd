"""Is this text one JSON document that says each thing once? For files that nobody vouches for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ripresa.workers.models.regular_file import open_regular


def read_json(path: Path, max_bytes: int) -> Any:
    """A file's JSON value.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, or is no regular file.
        ValueError: it is larger than `max_bytes`, or `parse_json` refuses it.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"is larger than {max_bytes} bytes")
    return parse_json(content)


def parse_json(content: bytes) -> Any:
    """A JSON value, strictly: UTF-8, no name twice in an object, no NaN or infinity.

    Raises:
        ValueError: it is something else, or nested too deeply.
    """
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"names {name[:200]!r} twice in one object")
        document[name] = value
    return document


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
