"""Does whatever a grammar lets through satisfy it, whatever a model would rather say?"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ripresa.cluster.gateway.call_grammar import Tool, calls_rules
from ripresa.cluster.gateway.output_format import check_schema, json_rule, regex_rule
from ripresa.workers import grammar
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.errors import InvalidArgument
from ripresa.workers.grammar import Grammars, Matcher
from ripresa.workers.models.vocabulary import read_vocabulary
from ripresa.workers.request import OutputConstraint, SamplingParams
from ripresa.workers.sampler import sample

VOCABULARY = read_vocabulary(DEMO_MODEL, 4096, 1)
MARK = VOCABULARY.bytes_of.index("｜DSML｜".encode())
EOS = VOCABULARY.eos_token_id


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY)


def matcher(grammars: Grammars, rule: str) -> Matcher:
    return grammars.matcher(OutputConstraint(f"start: {rule}\n", "field"))


def spell(token_ids: list[int]) -> str:
    """Strict: what ended by itself is whole UTF-8."""
    return b"".join(VOCABULARY.bytes_of[t] for t in token_ids).decode()


def drawn(matcher: Matcher, seed: int, most: int = 250) -> list[int] | None:
    """An answer from random logits; None if it did not end by itself."""
    noise = np.random.default_rng(seed)
    params = SamplingParams(most, seed=seed)
    said: list[int] = []
    for position in range(most):
        logits = torch.from_numpy(noise.normal(scale=3, size=4096))
        token_id = sample(logits, params, position, None, matcher.mask())
        if token_id == EOS:
            return said
        said.append(token_id)
        matcher.follow([token_id])
    return None


_names = st.sampled_from(["a", "b", "é", "a b", "from"])
_leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-20, 20),
        st.integers(0, 300),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(
        [
            {"enum": ["x", "x</", 'q"', "\n", 3, None]},
            {"const": {"k": [1]}},
            {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]$"},
            {"type": "string", "format": "date"},
            {"type": ["string", "null"], "maxLength": 3},
            {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
            {"$ref": "#/$defs/shared"},
        ]
    ),
)


def _objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], optional: bool) -> dict[str, Any]:
        required = list(properties)[: len(properties) // 2] if optional else list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(_names, children, max_size=3), st.booleans())


_schemas = st.recursive(
    _leaves,
    lambda children: st.one_of(
        _objects(children),
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, children),
        st.builds(lambda arms: {"anyOf": arms}, st.lists(children, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)
SHARED = {"shared": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}
SHARED["shared"]["additionalProperties"] = False


@settings(max_examples=30, deadline=None)
@given(_schemas, st.integers(0, 2**32))
def test_json_that_ended_by_itself_is_valid(
    grammars: Grammars, schema: dict[str, Any], seed: int
) -> None:
    schema = {**schema, "$defs": SHARED}
    said = drawn(matcher(grammars, json_rule(schema, "field", is_strict=True)), seed)
    if said is not None:
        jsonschema.validate(json.loads(spell(said)), schema)


def test_most_random_json_ends_by_itself(grammars: Grammars) -> None:
    """The property above is about something."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    rule = json_rule({**schema, "additionalProperties": False}, "field", is_strict=True)
    assert all(drawn(matcher(grammars, rule), seed) is not None for seed in range(5))


@settings(max_examples=20, deadline=None)
@given(_objects(_schemas), st.booleans(), st.integers(0, 2**32))
def test_tool_schemas_make_grammars_that_can_be_followed(
    grammars: Grammars, schema: dict[str, Any], is_strict: bool, seed: int
) -> None:
    tool = Tool("f", {**schema, "$defs": SHARED}, is_strict, "field")
    follower = matcher(grammars, f"calls\n{calls_rules([tool], MARK, is_single=True)}")
    said = drawn(follower, seed, 600)
    if said is not None:
        assert said.count(MARK) % 2 == 1
        assert spell(said).endswith("</｜DSML｜ invoke>\n</｜DSML｜ calls>")


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(
        ["[a-f]{3}/[0-9]{2}", "(ja|nein)", "ä{1,4}€?", "a\nb", "\\/x[/]", "", "日本(語)?"]
    ),
    st.integers(0, 2**32),
)
def test_expressions_are_matched_whole_over_partial_characters(
    grammars: Grammars, regex: str, seed: int
) -> None:
    said = drawn(matcher(grammars, regex_rule(regex, "field")), seed)
    assert said is not None
    assert re.fullmatch(regex, spell(said))


def test_only_the_end_may_follow_a_whole_match(grammars: Grammars) -> None:
    follower = matcher(grammars, '"yes"')
    while (token_id := int(follower.mask().argmax())) != EOS:
        follower.follow([token_id])
    assert np.flatnonzero(follower.mask()).tolist() == [EOS]


def test_a_state_is_a_function_of_the_tokens(grammars: Grammars) -> None:
    rule = json_rule({"type": "array", "items": {"type": "integer"}}, "field", is_strict=True)
    one, said = matcher(grammars, rule), []
    for seed in range(12):
        allowed = np.flatnonzero(one.mask())
        said.append(int(np.random.default_rng(seed).choice(allowed[allowed != EOS])))
        one.follow(said[-1:])
        other = matcher(grammars, rule)
        other.follow(said)
        assert (one.mask() == other.mask()).all()
    with pytest.raises(InvalidArgument, match="satisfy the grammar"):
        one.follow([MARK])


def test_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_KEPT", 3)
    keeper = Grammars(lambda: VOCABULARY)
    for number in range(10):
        matcher(keeper, f'"{number}"')
    assert len(keeper._kept) == 3
    assert keeper._kept_bytes == sum(map(len, keeper._kept))
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_BYTES", 100)
    with pytest.raises(InvalidArgument, match="too large"):
        matcher(keeper, '"' + "x" * 200 + '"')


HOSTILE: dict[str, Any] = {
    "a long text": {"const": "x" * 70_000},
    "a prime divisor": {"type": "integer", "multipleOf": 999983},
    "two divisors": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "a fine divisor": {"type": "number", "multipleOf": 1.00003},
    "a count": {"type": "string", "pattern": "a{1,1000000000}"},
    "a counting name": {"type": "object", "patternProperties": {"^a{9999}$": {}}},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_schemas_that_count_too_far_are_refused_before_a_worker_sees_them(schema: Any) -> None:
    with pytest.raises(InvalidArgument):
        check_schema(schema, "field")


BOMB: dict[str, Any] = {
    f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
    for n in range(30)
}
STRANGE_TOOLS: dict[str, tuple[Any, str]] = {
    "a bomb": (
        {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**BOMB, "a30": {}}},
        "alternatives",
    ),
    "references": (
        {"properties": {f"p{n}": {"items": {"$ref": "#"}} for n in range(1000)}},
        "too large",
    ),
    "a list": ([1], "schema of an object"),
    "a quote in a name": ({"type": "object", "properties": {'a"b': {}}}, "cannot write"),
    "a circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "circle"),
    "nowhere": ({"$ref": "#/$defs/b"}, "refers to no schema"),
    "a strict union": ({"type": "object", "anyOf": []}, "'anyOf'"),
    "a length": (
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": -1}}},
        "-1",
    ),
}


@pytest.mark.parametrize(("schema", "words"), STRANGE_TOOLS.values(), ids=STRANGE_TOOLS)
def test_strange_parameters_are_refused_by_their_tool(schema: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        calls_rules([Tool("f", schema, True, "tools[3]")], MARK, is_single=True)
    assert caught.value.field == "tools[3]"
