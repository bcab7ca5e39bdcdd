"""What must an answer's text be? A format as a request asks for it, and its grammar.

Grammars are llguidance's dialect of Lark. What could cost a worker too much is refused here by
counts: size, depth, repetitions. The worker that compiles the grammar refuses the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import InvalidArgument

MAX_SCHEMA_CHARS = 64 << 10
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 4096
MAX_REPEATS = 1000
MAX_MULTIPLE = 10_000

_HELD = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
        *("properties", "patternProperties", "additionalProperties", "required"),
        *("minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
"""Keywords that grammars can express, if not every use of them."""
_NOTES = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "contentEncoding"),
        *("contentMediaType", "discriminator"),
    )
)
"""Keywords that demand nothing."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_SCHEMAS = frozenset(
    (
        *("anyOf", "oneOf", "allOf", "prefixItems"),
        *("items", "additionalItems", "additionalProperties"),
    )
)

_AT_LEAST = frozenset(("minLength", "minItems", "minProperties"))
"""Keywords that make an answer long, however short the model would have it."""

_REGEX_PARTS = re.compile(
    r"\\[xpP]\{[^}]*\}|\\."
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}"
    r"|.",
    re.S,
)
"""Escapes, classes, repetitions, and single characters."""
_WHITESPACE = r"( |\n {0,32})?"
"""Between the parts of JSON: what writers of JSON put there, and no endless run of it."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A format that was accepted.

    Attributes:
        kind: of `text`.
        text: a JSON schema, or a regular expression; the whole answer matches it.
        field: the part of the request that asks for it.
        is_strict: every keyword of the schema holds; else those that no grammar can express do
            not.
    """

    kind: Literal["json_object", "json_schema", "regex"]
    text: str
    field: str
    is_strict: bool = True

    def rule(self) -> str:
        """The right side of a grammar's rule that matches it.

        Raises:
            InvalidArgument: it is none, or it is too large.
        """
        if self.kind == "regex":
            return regex_rule(self.text, self.field)
        return json_rule(self.schema, self.field, is_strict=self.is_strict)

    @property
    def schema(self) -> Any:
        """The JSON schema.

        Raises:
            InvalidArgument: it is none.
        """
        if self.kind == "json_object":
            return {"type": "object"}
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(self.field, f"is no JSON: {error}") from error


def format_of(message: pb.OutputConstraint | None, field: str) -> OutputFormat | None:
    """The format that a gRPC request asks for; None, which is any text, where it has no message.

    Raises:
        InvalidArgument: the message is there, and asks for nothing.
    """
    if message is None:
        return None
    match message.WhichOneof("kind"):
        case "json_schema":
            return OutputFormat("json_schema", message.json_schema, f"{field}.json_schema")
        case "regex":
            return OutputFormat("regex", message.regex, f"{field}.regex")
        case "json_object":
            if not message.json_object:
                raise InvalidArgument(
                    f"{field}.json_object", f"is false; leave `{field}` out where any text will do"
                )
            return OutputFormat("json_object", "", f"{field}.json_object")
    raise InvalidArgument(field, "is empty; give `json_schema`, `regex` or `json_object`")


def read_format(given: object, field: str) -> OutputFormat | None:
    """The format that an HTTP request asks for, in the words of any of its protocols.

    Raises:
        InvalidArgument: there is no such format.
    """
    if not isinstance(given, dict):
        raise InvalidArgument(field, "must be an object")
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return OutputFormat("json_object", "", field)
        case "regex" if isinstance(given.get("regex"), str):
            return OutputFormat("regex", given["regex"], f"{field}.regex")
        case "json_schema":
            if "schema" in given or "json_schema" not in given:
                holder, path = given, field
            else:
                holder, path = given["json_schema"], f"{field}.json_schema"
            if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
                raise InvalidArgument(f"{path}.schema", "must be a JSON schema")
            is_strict = holder.get("strict") or False
            if not isinstance(is_strict, bool):
                raise InvalidArgument(f"{path}.strict", "must be true or false")
            text = json.dumps(holder["schema"])
            return OutputFormat("json_schema", text, f"{path}.schema", is_strict)
    raise InvalidArgument(
        field, "must be of type text, json_object, json_schema with a schema, or regex with a regex"
    )


def whole_grammar(wanted: OutputFormat) -> str:
    """The grammar of an answer that is nothing but the format."""
    return f"start: {wanted.rule()}\n"


def json_rule(schema: object, field: str, *, is_strict: bool) -> str:
    """Matches JSON text by a schema, of which only literal parts and counts are checked here.

    Raises:
        InvalidArgument: it is none, it is too large, or it is strict and has an unknown keyword.
    """
    check_schema(schema, field)
    if is_strict:
        check_keywords(schema, field)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidArgument(field, "a JSON schema is an object")
    options = {
        "whitespace_pattern": _WHITESPACE,
        "lenient": not is_strict,
        "coerce_one_of": not is_strict,
    }
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex_rule(regex: str, field: str) -> str:
    """Matches a whole text by a regular expression (RE2's syntax: no look-around, no references).

    Raises:
        InvalidArgument: it is too large.
    """
    if len(regex) > MAX_REGEX_CHARS:
        raise InvalidArgument(field, f"has {len(regex)} characters; {MAX_REGEX_CHARS} are allowed")
    _check_repeats(regex, field)
    if not regex:
        return '""'
    return "/" + _in_slashes(regex) + "/"


def check_schema(schema: object, field: str) -> None:
    """Refuse a schema that would cost too much.

    Raises:
        InvalidArgument: it is too large or too deep, or counts too far.
    """
    multiple = 1
    for key, value, depth in _parts(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidArgument(field, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if key in ("pattern", "patternProperties"):
            for pattern in [value] if isinstance(value, str) else value or ():
                if isinstance(pattern, str):
                    _check_repeats(pattern, f"{field} ({key})")
        if key in _AT_LEAST and isinstance(value, int | float) and value > MAX_REPEATS:
            raise InvalidArgument(field, f"{key} is {value}; at most {MAX_REPEATS} is allowed")
        if key == "multipleOf":
            multiple = math.lcm(multiple, _digits(value))
            if multiple > MAX_MULTIPLE:
                raise InvalidArgument(
                    field,
                    "the numbers of multipleOf need too many states: the digits of their least "
                    f"common multiple may count to {MAX_MULTIPLE}",
                )
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARS:
        raise InvalidArgument(field, f"has {size} characters; {MAX_SCHEMA_CHARS} are allowed")


def check_keywords(schema: object, field: str) -> None:
    """Refuse a strict schema that says what no answer could be kept to.

    Args:
        schema: no deeper than `check_schema` allows.

    Raises:
        InvalidArgument: it has a keyword that is unknown, or that no grammar expresses.
    """
    for path, keyword in _unheld(schema, "#"):
        raise InvalidArgument(
            field,
            f"a strict schema cannot hold the keyword {keyword[:64]!r} at {path[-256:]}; leave it "
            "out, or ask without `strict`",
        )


def _unheld(schema: object, path: str) -> Iterator[tuple[str, str]]:
    """Where keywords stand that are not held, as JSON pointers, and which."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        below = f"{path}/{_escaped(keyword)}"
        if keyword not in _HELD and keyword not in _NOTES:
            yield path, keyword
        elif keyword in _BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from _unheld(part, f"{below}/{_escaped(name)}")
        elif keyword in _SCHEMAS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from _unheld(part, f"{below}/{index}")
        elif keyword in _SCHEMAS:
            yield from _unheld(value, below)


def _escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _parts(root: object) -> Iterator[tuple[str, Any, int]]:
    """Key, value and depth of everything in a JSON value; list items have no key."""
    waiting: list[tuple[str, Any, int]] = [("", root, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        yield key, value, depth
        if depth > MAX_SCHEMA_DEPTH:
            continue
        if isinstance(value, dict):
            waiting += [(name, child, depth + 1) for name, child in value.items()]
        elif isinstance(value, list):
            waiting += [("", child, depth + 1) for child in value]


def _digits(value: object) -> int:
    """A number's digits without its point: what a machine that divides by it counts to."""
    try:
        number = Decimal(str(value)).normalize()
    except InvalidOperation:
        return 1
    if not number.is_finite() or number <= 0:
        return 1
    _, digits, exponent = number.as_tuple()
    if isinstance(exponent, int) and exponent > 6:
        return MAX_MULTIPLE + 1
    whole = int("".join(map(str, digits)))
    return whole * int(10 ** max(0, exponent if isinstance(exponent, int) else 0))


def _check_repeats(regex: str, field: str) -> None:
    """Refuse an expression that repeats a part more than `MAX_REPEATS` times, by nesting too."""
    last, most = 1, [1]  # of what could be repeated next; in each group that is open
    for part in _REGEX_PARTS.finditer(regex):
        counts = [count for count in part.groups() if count]
        if counts:
            last *= max(1, *(int(count[:9]) for count in counts))
            if last > MAX_REPEATS:
                raise InvalidArgument(
                    field,
                    f"repeats a part {part[0]}; at most {MAX_REPEATS} repetitions are allowed, "
                    "those of its own parts included",
                )
        elif part[0] == "(":
            most.append(1)
            last = 1
        elif part[0] == ")":
            last = most.pop() if len(most) > 1 else 1
        elif part[0] not in "*+?":
            last = 1
        most[-1] = max(most[-1], last)


def _in_slashes(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    escaped = re.sub(r"\\.|/", lambda part: "\\/" if part[0] == "/" else part[0], regex, flags=re.S)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")
