"""How does a YAML document become a tree of frozen dataclasses, and refuse what it does not know?

Errors are `ConfigError`s whose field is the dotted path of the setting at fault.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from ripresa.workers.errors import ConfigError

T = TypeVar("T")

_AT_LEAST, _AT_MOST = "at_least", "at_most"


def setting(default: T, *, at_least: float | None = None, at_most: float | None = None) -> T:
    """A dataclass field with a range that `build` checks; typed as its default, as fields are."""
    field = dataclasses.field(default=default, metadata={_AT_LEAST: at_least, _AT_MOST: at_most})
    return field


def read_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML document holds; an empty document is an empty mapping.

    Raises:
        ConfigError: no YAML, a repeated key, or something else than a mapping on top.
    """
    try:
        document = _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(source, f"is not valid YAML: {_one_line(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(source, "must hold settings as `name: value`")
    return document


def override(document: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of the document with `a.b=value` assignments made; values are read as YAML.

    Raises:
        ConfigError: an assignment has no `=`, no name or no valid value, or its path leads
            through a setting that is no group.
    """
    result = _copy(document)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ConfigError("--set", f"{assignment!r} is not of the form a.b=value")
        try:
            value = _load(text)
        except yaml.YAMLError as error:
            raise ConfigError(path, f"{text!r} is not a valid value: {_one_line(error)}") from error
        *groups, name = path.strip().split(".")
        node = result
        for depth, group in enumerate(groups, start=1):
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise ConfigError(".".join(groups[:depth]), f"is no group, so {path} cannot exist")
        node[name] = value
    return result


def build(cls: type[T], document: Any, path: str = "") -> T:
    """An instance of a dataclass from a mapping; absent settings keep their defaults.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a wrong type, a value out of its
            range, or what the dataclass itself refuses.
    """
    if document is None:
        document = {}  # `encoders:` with nothing below it
    if not isinstance(document, Mapping):
        raise ConfigError(path, f"is a group of settings, not {_shown(document)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in document.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise ConfigError(where, _unknown(str(key), list(fields)))
        values[key] = _convert(hints[key], value, where)
        _check_range(fields[key], values[key], where)
    return cls(**values)


def dump(tree: Any) -> str:
    """A tree as YAML, defaults included; `build` reads it back."""
    return yaml.safe_dump(_plain(dataclasses.asdict(tree)), sort_keys=False)


def _convert(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        (hint,) = (member for member in hint.__args__ if member is not types.NoneType)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type[Any], hint), value, path)
    if typing.get_origin(hint) is tuple:  # tuple[X, ...]
        if not isinstance(value, list):
            raise ConfigError(path, f"must be a list, is {_shown(value)}")
        (member_hint, _) = typing.get_args(hint)
        return tuple(_convert(member_hint, v, f"{path}[{i}]") for i, v in enumerate(value))
    if issubclass(hint, StrEnum):
        choices = [member.value for member in hint]
        if value not in choices:
            raise ConfigError(path, f"must be one of {', '.join(choices)}, is {_shown(value)}")
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # a bool is no int here
        raise ConfigError(path, f"must be {_TYPE_NAMES[hint]}, is {_shown(value)}")
    return value


def _check_range(field: dataclasses.Field[Any], value: Any, path: str) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(path, f"must be a finite number, is {_shown(value)}")
    at_least, at_most = field.metadata.get(_AT_LEAST), field.metadata.get(_AT_MOST)
    if at_least is not None and value < at_least:
        raise ConfigError(path, f"must be at least {at_least}, is {_shown(value)}")
    if at_most is not None and value > at_most:
        raise ConfigError(path, f"must be at most {at_most}, is {_shown(value)}")


def _unknown(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if near:
        return f"is no setting; did you mean `{near[0]}`?"
    return f"is no setting; valid here: {', '.join(valid)}"


def _load(text: str) -> Any:
    """Raises yaml.YAMLError whatever the text is."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError:
        raise
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except Exception as error:
        # A scanner leaves some texts, like `"\\UFFFFFFFF"`, to Python's own conversions.
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    return value.value if isinstance(value, StrEnum) else value


def _shown(value: Any) -> str:
    """A value as a message quotes it; short, however large or deep it is."""
    try:
        return _REPR.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def _copy(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy(value) if isinstance(value, Mapping) else value
        for key, value in document.items()
    }


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; a setting that silently does nothing is refused."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            # Its conversions raise what Python does: for `2026-02-30`, or `!!int abc`.
            raise yaml.MarkedYAMLError(
                problem=f"this is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {_shown(key)} is no text", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key `{key}` stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
