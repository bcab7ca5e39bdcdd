"""Are recorded workloads read as they were recorded, and bad lines named?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ripresa.cluster.simulation.trace import Conversation, read_trace
from ripresa.workers.errors import InvalidArgument, RipresaError

WINDOW = 128


def write(path: Path, *lines: object) -> Path:
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def call(t: float, num_tokens: int, keep: int, new: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": num_tokens, "out": 7, "keep": keep, "new": new, **more}


def session(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "requests": list(requests)}


def read(path: Path) -> list[Conversation]:
    return list(read_trace(path, WINDOW))


def test_a_session_keeps_its_differences_and_its_sub_agents_apart(tmp_path: Path) -> None:
    agent = {"t": 5.0, "requests": [call(0.5, 70, 0, [[90, 1]])]}
    asking = call(0.0, 200, 0, [[1, 3]], stop="tool_use", api_time=2.5)
    line = session(asking, agent, call(9.0, 300, 2, [[7, 1], [20, 2]], stop="end_turn"))
    (conversation,) = read(write(tmp_path / "t.jsonl.gz", line))
    own, nested = conversation.lists
    assert (conversation.granularity, conversation.starts_at_s) == (64, None)
    assert [(r.num_tokens, r.keep, r.new) for r in own] == [
        (200, 0, (1, 2, 3)),
        (300, 2, (7, 20, 21)),
    ]
    assert [(r.offset_s, r.new) for r in nested] == [(5.5, (90,))]
    assert [r.calls_after_s for r in (*own, *nested)] == [2.5, None, None]


def test_requests_with_arrival_times_stand_alone(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]}
    (conversation,) = read(write(tmp_path / "t.jsonl", line))
    assert conversation.starts_at_s == 1.5
    assert conversation.granularity == 512
    ((request,),) = conversation.lists
    assert (request.num_tokens, request.num_output, request.new) == (700, 3, (4, 9))


def test_text_is_cut_into_blocks_of_the_window(tmp_path: Path) -> None:
    rows = [
        {"session_id": s, "t_us": t, "input": "x" * n, "output": "y" * 8}
        for s, t, n in (("a", 0, 1000), ("a", 2_000_000, 1100), ("b", 0, 2))
    ]
    first, second = read(write(tmp_path / "t.jsonl", *rows))
    assert [r.num_tokens for r in first.lists[0]] == [250, 275]
    assert [[len(str(one)) for one in r.new] for r in first.lists[0]] == [
        [512, 488],
        [512, 512, 76],
    ]
    assert first.lists[0][1].offset_s == 2.0
    assert [r.num_tokens for r in second.lists[0]] == [1]


def test_a_line_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match=r"t\.jsonl:1: is no JSON"):
        read(path)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ([1], "must be a JSON object"),
        (session(call(0.0, 100, 1, [])), "keep is 1, but only 0"),
        (session(call(0.0, 100, 0, [[1]])), "new must hold"),
        (session(call(0.0, 0, 0, [[1, 2]])), "in must be a whole number from 1"),
        (session(call(-1.0, 10, 0, [[1, 2]])), "t must be a time"),
        ({**session(), "requests": 7}, "requests must be a list"),
        ({**session(), "block_size": 0}, "block_size must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, wrong: str) -> None:
    path = write(tmp_path / "t.jsonl", session(call(0.0, 10, 0, [])), line)
    with pytest.raises(InvalidArgument, match=r"t\.jsonl:2") as caught:
        read(path)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "wrong"), [("x", "list of whole numbers"), ([1], "do not cover 700")]
)
def test_ids_that_do_not_cover_the_prompt_are_refused(
    tmp_path: Path, ids: object, wrong: str
) -> None:
    line = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": ids}
    with pytest.raises(InvalidArgument, match=wrong):
        read(write(tmp_path / "t.jsonl", line))


@pytest.mark.parametrize("text", ["TIMESTAMP,ContextTokens\n1,2\n", '{"a": 1}\n', ""])
def test_a_file_without_lengths_and_ids_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InvalidArgument, match=r"t\.csv"):
        read(tmp_path / "t.csv")


def test_a_cut_or_missing_file_is_told_apart_from_a_bad_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.jsonl.gz", *[session(call(0.0, 10, 0, []))] * 200)
    whole.write_bytes(whole.read_bytes()[:-12])
    for path in (whole, tmp_path / "none.jsonl"):
        with pytest.raises(RipresaError, match="cannot be read"):
            read(path)
