"""Are formats that would cost too much, or never end, refused by counts, and all others taken?"""

from __future__ import annotations

from typing import Any

import pytest

from ripresa.cluster.gateway.output_format import MAX_REPEATS, check_schema, regex_rule
from ripresa.workers.errors import InvalidArgument


@pytest.mark.parametrize(
    "regex",
    [
        r"a{1000}b{1000}",
        r"([a-f]{3}[0-9]{2}-){30}",
        r"(a{10}){100}|(b{1000})",
        r"[{1001}(]{1000}",
        r"\(a{1000}\){1000}",
        r"\x{2000}{10}",
        r"(?:a{1000})b{1000}",
        r"(a{1000})*",
        r"a{2,}",
        r")a{1000}",
    ],
)
def test_expressions_that_are_taken(regex: str) -> None:
    assert regex_rule(regex, "regex")


@pytest.mark.parametrize(
    "regex",
    [
        r"a{1001}",
        r"a{0,1001}",
        r"a{1001,}",
        r"a{99999999999}",
        r"(a{1000}){1000}",
        r"((a{10}){10}){11}",
        r"(ab{100}c){11}",
        r"(a{1000}|b){2}",
        r"(a{1000})+{2}",
        r"a{1000}{2}",
    ],
)
def test_expressions_that_repeat_too_often(regex: str) -> None:
    with pytest.raises(InvalidArgument, match=f"at most {MAX_REPEATS}") as caught:
        regex_rule(regex, "regex")
    assert caught.value.field == "regex"
    with pytest.raises(InvalidArgument, match="at most"):
        check_schema({"type": "string", "pattern": regex}, "schema")


@pytest.mark.parametrize("keyword", ["minLength", "minItems", "minProperties"])
def test_schemas_that_demand_too_much(keyword: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {keyword: MAX_REPEATS}}}
    check_schema(schema, "schema")
    for count in (MAX_REPEATS + 1, 1e9):
        schema["properties"]["a"][keyword] = count
        with pytest.raises(InvalidArgument, match=keyword) as caught:
            check_schema(schema, "schema")
        assert caught.value.field == "schema"
    # A property of that name is none.
    check_schema({"properties": {keyword: {"type": "string"}}}, "schema")
