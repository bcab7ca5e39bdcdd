"""Which grammar makes an answer call tools as the encoding writes it, with arguments by schema?

    <｜DSML｜ calls>
    <｜DSML｜ invoke name="get_weather">
    <｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>
    <｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

A string is written as it is, everything else as JSON. Parameters come in the schema's order. A
string that must keep to a pattern or a format is written as JSON, whose grammar knows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ripresa.cluster.gateway.output_format import check_keywords, check_schema, json_rule
from ripresa.workers.errors import InvalidArgument

MAX_TOOLS = 128
MAX_CHARS = 1 << 20
"""Of a grammar; schemas that refer to others may grow into it."""
MAX_VALUES = 4096
"""Alternatives of a tool's parameters, where these are unions, and unions of unions."""

_NOTES = frozenset(
    ("$schema", "$id", "title", "description", "default", "examples", "deprecated", "$comment")
)
_OBJECT = _NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_BAD_NAME = re.compile(r'["<>\x00-\x1f｜]')
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_MAX_REFERENCES = 32
_WITHOUT_SCHEMA: Mapping[str, Any] = MappingProxyType({"type": "object"})


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool.

    Attributes:
        parameters: the JSON schema of its arguments.
        is_strict: every keyword of the schema holds; else those that no grammar can express do
            not.
        field: the part of the request that declares its parameters.
    """

    name: str
    parameters: Any
    is_strict: bool
    field: str


def check_call_name(name: str, field: str) -> None:
    """Refuse the name of a call in a history that the encoding cannot write.

    Any other is fine: tools may have been renamed since, and models make names up.
    """
    if not name or _BAD_NAME.search(name):
        raise InvalidArgument(
            field, "must be a tool's name: some characters, none of \", <, >, ｜ or a line's end"
        )


def calls_rules(tools: Sequence[Tool], mark: int, *, is_single: bool) -> str:
    """Rules of a grammar; `calls` matches what follows the opening of a calls block.

    Args:
        tools: those that may be called, at least one.
        mark: token id of `｜DSML｜`.
        is_single: only one call is allowed.

    Raises:
        InvalidArgument: a tool's schema cannot be kept to.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"{len(tools)} are declared; {MAX_TOOLS} can be kept to")
    names = " | ".join(f"call{number}" for number in range(len(tools)))
    lines = [
        "calls: call closing" if is_single else "calls: call+ closing",
        f'call: "<" mark ({names})',
        'closing: "</" mark " calls>"',
        f"mark: <[{mark}]>",
    ]
    num_chars = 0
    for number, tool in enumerate(tools):
        rules = _ToolRules(tool, number).lines()
        lines += rules
        num_chars += sum(map(len, rules))
        if num_chars > MAX_CHARS:
            raise InvalidArgument("tools", f"their grammar has more than {MAX_CHARS} characters")
    return "\n".join(lines) + "\n"


class _ToolRules:
    """The rules of one tool."""

    def __init__(self, tool: Tool, number: int) -> None:
        self._tool = tool
        self._number = number
        root = tool.parameters if tool.parameters not in (None, {}) else dict(_WITHOUT_SCHEMA)
        if not isinstance(root, dict):
            raise InvalidArgument(tool.field, "the parameters must be a JSON schema of an object")
        check_schema(root, tool.field)
        if tool.is_strict:
            check_keywords(root, tool.field)
        self._root = root
        self._num_values = 0
        self._num_chars = 0

    def lines(self) -> list[str]:
        name, number = self._tool.name, self._number
        call = f' invoke name="{name}">\n'
        head = f'call{number}: {json.dumps(call)} arguments{number} "</" mark " invoke>\\n"'
        top = self._resolved(self._root)
        self._check_top(top)
        properties = dict(top.get("properties") or {})
        required = [name for name in top.get("required") or () if isinstance(name, str)]
        for name in required:
            properties.setdefault(name, True)
        if not properties:
            return [head, *self._free(top.get("additionalProperties", True))]
        return [head, *self._listed(properties, frozenset(required))]

    def _check_top(self, top: Mapping[str, Any]) -> None:
        unknown = sorted(set(top) - _OBJECT)
        if self._tool.is_strict and unknown:
            raise InvalidArgument(
                self._tool.field,
                f"a strict tool's parameters cannot be kept to {unknown[0]!r} at their top",
            )
        if not isinstance(top.get("properties") or {}, dict):
            raise InvalidArgument(self._tool.field, "`properties` must be an object")
        if not isinstance(top.get("required") or [], list):
            raise InvalidArgument(self._tool.field, "`required` must be a list")

    def _listed(self, properties: Mapping[str, Any], required: frozenset[str]) -> list[str]:
        """Arguments that are declared: those not required may be left out.

        `rest<k>` is what may follow the parameters before number k.
        """
        number = self._number
        lines = []
        rests = []
        for place, (name, schema) in enumerate(properties.items()):
            if _BAD_NAME.search(name):
                raise InvalidArgument(
                    self._tool.field, f"the encoding cannot write a parameter named {name[:64]!r}"
                )
            lines.append(f"par{number}x{place}: {self._parameter(name, schema)}")
            mark = "" if name in required else "?"
            rests.append(
                f"rest{number}x{place}: par{number}x{place}{mark} rest{number}x{place + 1}"
            )
        rests.append(f'rest{number}x{len(properties)}: ""')
        if required:
            return [f"arguments{number}: rest{number}x0", *lines, *rests]
        # An empty line stands for no arguments.
        first = [f"par{number}x{n} rest{number}x{n + 1}" for n in range(len(properties))]
        return [f"arguments{number}: " + " | ".join(['"\\n"', *first]), *lines, *rests]

    def _free(self, schema: object) -> list[str]:
        """Arguments of any names, with values by one schema; none if it is false."""
        number = self._number
        if schema is False:
            return [f'arguments{number}: "\\n"']
        return [
            f'arguments{number}: "\\n" | (any{number})+',
            f"any{number}: {self._parameter(None, schema)}",
        ]

    def _parameter(self, name: str | None, schema: object) -> str:
        """One parameter; None for any name."""
        tail = '"</" mark " parameter>\\n"'
        raw, values = self._values(schema, 0)
        choices = []
        for is_string, value in [*(("true", r) for r in raw), *(("false", v) for v in values)]:
            if name is None:
                head = f'" parameter name=\\"" {_ANY_NAME} "\\" string=\\"{is_string}\\">"'
            else:
                head = json.dumps(
                    f' parameter name="{name}" string="{is_string}">', ensure_ascii=False
                )
            end = ' mark " parameter>\\n"' if is_string == "true" else f" {tail}"
            choices.append(f'"<" mark {head} {value}{end}')
        return " | ".join(f"({choice})" for choice in choices)

    def _values(self, schema: object, depth: int) -> tuple[list[str], list[str]]:
        """How a value may be written: as text with its end `</`, and as JSON."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidArgument(self._tool.field, f"has more than {MAX_VALUES} alternatives")
        if schema is True or schema == {}:
            return [_text_rule()], [self._json({})]
        if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
            return [], [self._json(schema)]
        schema = self._resolved(schema)
        said = set(schema) - _NOTES
        if said == {"anyOf"} and isinstance(schema["anyOf"], list):
            raw: list[str] = []
            values: list[str] = []
            for arm in schema["anyOf"]:
                more_raw, more_values = self._values(arm, depth + 1)
                raw += more_raw
                values += more_values
            return raw, values
        kinds = schema.get("type")
        if isinstance(kinds, list) and "string" in kinds and not said & {"enum", "const"}:
            others = [kind for kind in kinds if kind != "string"]
            raw, values = self._values({**schema, "type": "string"}, depth + 1)
            return raw, [*values, *([self._json({**schema, "type": others})] if others else [])]
        literals = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if said <= {"type", "enum", "const"} and isinstance(literals, list):
            texts = [text for text in literals if isinstance(text, str)]
            rest = [value for value in literals if not isinstance(value, str)]
            raw = ["/(" + "|".join(map(_literal, texts)) + ")<\\//"] if texts else []
            return raw, [self._json({"enum": rest})] if rest or not texts else []
        if kinds == "string" and said <= {"type", "minLength", "maxLength"}:
            return [self._text(schema)], []
        return [], [self._json(schema)]

    def _text(self, schema: Mapping[str, Any]) -> str:
        counts = (schema.get("minLength", 0), schema.get("maxLength"))
        for count in counts:
            is_count = isinstance(count, int) and not isinstance(count, bool)
            if count is not None and not (is_count and count >= 0):
                raise InvalidArgument(self._tool.field, f"{count!r} is no length of a string")
        return _text_rule(*counts)

    def _json(self, schema: object) -> str:
        """JSON by a part of the tool's schema, which may refer to other parts."""
        if isinstance(schema, dict) and _refers(schema):
            schema = {**_moved(schema), "$defs": {"root": _moved(self._root)}}
        rule = json_rule(schema, self._tool.field, is_strict=self._tool.is_strict)
        self._num_chars += len(rule)
        if self._num_chars > MAX_CHARS:
            raise InvalidArgument(self._tool.field, "its references make it too large")
        return rule

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema that only refers to another one stands for that."""
        for _ in range(_MAX_REFERENCES):
            path = schema.get("$ref")
            if not isinstance(path, str) or set(schema) - _NOTES - {"$ref", "$defs", "definitions"}:
                return schema
            found = _found(self._root, path)
            if not isinstance(found, dict):
                raise InvalidArgument(
                    self._tool.field, f"{path[:64]!r} refers to no schema inside the parameters"
                )
            schema = found
        raise InvalidArgument(self._tool.field, "its references go in a circle")


def _text_rule(least: int = 0, most: int | None = None) -> str:
    """Raw text and the beginning of the tag that ends it."""
    counts = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return f"/(.|\\n){counts}<\\//"


def _literal(text: str) -> str:
    """A text inside a regular expression between slashes."""
    escaped = _SPECIAL.sub(lambda special: "\\" + special[0], text)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")


def _refers(schema: object) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _moved(schema: Any) -> Any:
    """The same, where the whole it refers to lies below `$defs`."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    path = schema.get("$ref")
    if isinstance(path, str) and path.startswith("#"):
        moved["$ref"] = "#/$defs/root" + path[1:]
    return moved


def _found(root: Any, path: str) -> Any:
    """What a JSON pointer of the document itself leads to; None for nothing."""
    if not path.startswith("#"):
        return None
    for part in path[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, dict):
            root = root.get(key)
        elif isinstance(root, list) and key.isdigit() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root
