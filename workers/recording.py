"""What must be kept of an answer, so that it can be computed again? One JSON file.

The request with its sampling as it was really used, the recipe that its execution followed, what
computed it, and the tokens that came out. Plain values: no torch, ray or clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ripresa.workers.errors import InvalidArgument
from ripresa.workers.models.strict_json import read_json
from ripresa.workers.replay import PlanKind, Recipe, ReplayMode, TailVariant
from ripresa.workers.request import FinishReason, OutputConstraint, SamplingParams

FORMAT = "ripresa recording"
VERSION = 2
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer.

    Attributes:
        weights_digest: names geometry and weights, as `model_digest` does.
        token_ids: the prompt.
        sampling: as it was used; `max_tokens` is the number of tokens that came out.
        mode: which cached blocks could be reused.
        recipe: what the execution computed, read and wrote; the seed is in it.
        output_ids: the answer, without the token that ended it.
        reason: why it ended.
        stop_token_id: the token that ended it, if one did.
    """

    weights_digest: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    mode: ReplayMode
    recipe: Recipe
    output_ids: tuple[int, ...]
    reason: FinishReason
    stop_token_id: int | None = None

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            InvalidArgument: it cannot be written.
        """
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        try:
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(str(path), f"cannot be written: {error.strerror}") from error


def read_recording(path: Path) -> Recording:
    """Read what `Recording.write` wrote.

    Raises:
        InvalidArgument: it cannot be read, or is no such file; `field` names the part.
    """
    try:
        document = read_json(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidArgument(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgument(str(path), f"is no recording: {error}") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise InvalidArgument(str(path), "is no recording; make one with `generate --record`")
    version = document.pop("version", None)
    if version != VERSION:
        raise InvalidArgument(
            str(path), f"is of version {version}, this ripresa reads {VERSION}; use its own"
        )
    recording: Recording = _build(Recording, document, "")
    return recording


_CHOICES = (ReplayMode, TailVariant, PlanKind, FinishReason)


def _build(kind: Any, value: object, name: str) -> Any:
    """A value of a type from JSON; `name` is its dotted place in the file."""
    if kind in (SamplingParams, OutputConstraint, Recipe, Recording):
        return _record(kind, value, name)
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
        return _build(kind, value, name)
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if not isinstance(value, list):
            raise InvalidArgument(name, f"must be a list, is {value!r}"[:200])
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(parts) != len(value):
            raise InvalidArgument(name, f"must have {len(parts)} entries, has {len(value)}")
        return tuple(
            _build(p, each, f"{name}[{n}]")
            for n, (p, each) in enumerate(zip(parts, value, strict=True))
        )
    if kind in _CHOICES:
        try:
            return kind(value)
        except ValueError as error:
            raise InvalidArgument(name, f"is no known one: {value!r}"[:200]) from error
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidArgument(name, f"must be {kind.__name__}, is {value!r}"[:200])
    return value


def _record(kind: Any, value: object, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, "must be an object")
    prefix = f"{name}." if name else ""
    types = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            raise InvalidArgument(f"{prefix}{key}", "is unknown; use the ripresa that wrote it")
    for key in known:
        if key not in value:
            raise InvalidArgument(f"{prefix}{key}", "is missing")
    return kind(**{key: _build(types[key], value[key], f"{prefix}{key}") for key in known})
