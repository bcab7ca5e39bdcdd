"""What does a recorded workload say? Requests by conversation, and which tokens are equal.

A trace names blocks of tokens by ids: equal ids after equal ids are equal tokens. Text traces name
them by their characters, four a token. Files may be gzipped; they are read line by line.

    claude_code_sessions    one conversation a line, 64-token ids of that conversation alone
    mooncake_*              one request a line, 512-token ids of the whole file, arrival times
    lmcache_*_text          one request a line, its whole prompt as text
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One model call, told as the difference to the one before it in the same list.

    Attributes:
        offset_s: seconds since its conversation began; never less than the one before it.
        num_tokens: length of the prompt.
        num_output: tokens of the answer.
        keep: leading blocks of the list's previous prompt that this one begins with.
        new: ids of the blocks after those.
        calls_after_s: seconds after which its answer had come, if that called tools; None if not,
            or if it is not recorded.
    """

    offset_s: float
    num_tokens: int
    num_output: int
    keep: int
    new: tuple[Hashable, ...]
    calls_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that belong together: a session's own calls and those of its sub-agents.

    Attributes:
        scope: block ids mean something only beside the same scope.
        granularity: tokens that one id stands for.
        starts_at_s: when it began, in seconds since the trace did; None if that is not recorded.
        lists: requests, each list in order of time.
    """

    scope: Hashable
    granularity: int
    starts_at_s: float | None
    lists: tuple[tuple[TraceRequest, ...], ...]


Lines = Iterator[tuple[str, dict[str, Any]]]
Layout = tuple[frozenset[str], Callable[[Lines, int], Iterator[Conversation]]]


def read_trace(path: Path, window: int, max_lines: int | None = None) -> Iterator[Conversation]:
    """The conversations of a trace, in the order of the file.

    Args:
        window: W, tokens in a block of the cluster; text is cut into these.
        max_lines: read no more lines; None for all.

    Raises:
        RipresaError: NOT_FOUND; the file cannot be read.
        InvalidArgument: a line is none of a known layout; the field is its number.
    """
    lines = _objects(path, max_lines)
    first = next(lines, None)
    if first is None:
        raise InvalidArgument(str(path), "the file is empty")
    for names, read in _LAYOUTS:
        if names <= first[1].keys():
            yield from read(_again(first, lines), window)
            return
    known = "; ".join(", ".join(sorted(names)) for names, _ in _LAYOUTS)
    raise InvalidArgument(
        first[0],
        "the trace records no prompt lengths with the identity of their tokens, so there is "
        f"nothing to replay; a line must have one of these sets of fields: {known}",
    )


def _objects(path: Path, max_lines: int | None) -> Lines:
    """Each line's place and fields."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if max_lines is not None and number > max_lines:
                    return
                place = f"{path.name}:{number}"
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InvalidArgument(
                        place,
                        f"is no JSON ({error}); a trace has one JSON object a line, with prompt "
                        "lengths and block ids",
                    ) from error
                if not isinstance(fields, dict):
                    raise InvalidArgument(place, "must be a JSON object")
                yield place, fields
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RipresaError(
            ErrorCode.NOT_FOUND,
            f"{path} cannot be read behind line {number}: {error}; is it whole?",
        ) from error


def _again(first: tuple[str, dict[str, Any]], rest: Lines) -> Lines:
    yield first
    yield from rest


def _sessions(lines: Lines, window: int) -> Iterator[Conversation]:
    """One conversation a line; sub-agents are nested and run beside their parent."""
    for place, fields in lines:
        granularity = _whole(place, fields, "block_size", 1)
        calls = _list(place, fields, "requests")
        nested = [call for call in calls if "requests" in call]
        own = [call for call in calls if "requests" not in call]
        lists = [_session_calls(place, own, 0.0, granularity)]
        for agent in nested:
            inner = _list(place, agent, "requests")
            lists.append(_session_calls(place, inner, _seconds(place, agent, "t"), granularity))
        scope = fields["id"]
        yield Conversation(f"{place} {scope}", granularity, None, tuple(filter(None, lists)))


def _session_calls(
    place: str, calls: list[dict[str, Any]], start_s: float, granularity: int
) -> tuple[TraceRequest, ...]:
    requests: list[TraceRequest] = []
    known = 0
    for call in calls:
        keep = _whole(place, call, "keep", 0)
        if keep > known:
            raise InvalidArgument(place, f"keep is {keep}, but only {known} blocks came before")
        new: list[int] = []
        for run in call.get("new", ()):
            if not (isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)):
                raise InvalidArgument(place, f"new must hold [first id, count] pairs, got {run}")
            new += range(run[0], run[0] + run[1])
        known = keep + len(new)
        offset_s = start_s + _seconds(place, call, "t")
        if requests:
            offset_s = max(offset_s, requests[-1].offset_s)
        num_tokens = _whole(place, call, "in", 1)
        num_output = _whole(place, call, "out", 0)
        is_call = call.get("stop") == "tool_use"
        after_s = _seconds(place, call, "api_time") if is_call else None
        requests.append(TraceRequest(offset_s, num_tokens, num_output, keep, tuple(new), after_s))
    return tuple(requests)


def _arrivals(lines: Lines, window: int) -> Iterator[Conversation]:
    """One request a line, with the time at which it came."""
    for place, fields in lines:
        ids = fields["hash_ids"]
        if not (isinstance(ids, list) and all(type(one) is int for one in ids)):
            raise InvalidArgument(place, "hash_ids must be a list of whole numbers")
        num_tokens = _whole(place, fields, "input_length", 1)
        if len(ids) * MOONCAKE_BLOCK < num_tokens:
            raise InvalidArgument(
                place, f"{len(ids)} ids of {MOONCAKE_BLOCK} tokens do not cover {num_tokens}"
            )
        num_output = _whole(place, fields, "output_length", 0)
        request = TraceRequest(0.0, num_tokens, num_output, 0, tuple(ids))
        starts_at_s = _seconds(place, fields, "timestamp") / 1000
        yield Conversation("", MOONCAKE_BLOCK, starts_at_s, ((request,),))


def _texts(lines: Lines, window: int) -> Iterator[Conversation]:
    """One request a line; those of a session stand together, in order."""
    session: str | None = None
    place = ""
    calls: list[TraceRequest] = []
    for place, fields in lines:
        for name in ("session_id", "input", "output"):
            if not isinstance(fields.get(name), str):
                raise InvalidArgument(place, f"{name} must be text")
        if fields["session_id"] != session:
            if calls:
                yield Conversation("", window, None, (tuple(calls),))
            session, calls = fields["session_id"], []
        size = window * CHARACTERS_PER_TOKEN
        text = fields["input"]
        offset_s = _seconds(place, fields, "t_us") / 1e6
        if calls:
            offset_s = max(offset_s, calls[-1].offset_s)
        calls.append(
            TraceRequest(
                offset_s,
                max(1, len(text) // CHARACTERS_PER_TOKEN),
                len(fields["output"]) // CHARACTERS_PER_TOKEN,
                0,
                tuple(text[start : start + size] for start in range(0, len(text), size)),
            )
        )
    if calls:
        yield Conversation("", window, None, (tuple(calls),))


MOONCAKE_BLOCK = 512
_LAYOUTS: tuple[Layout, ...] = (
    (frozenset({"id", "block_size", "requests"}), _sessions),
    (frozenset({"timestamp", "input_length", "output_length", "hash_ids"}), _arrivals),
    (frozenset({"session_id", "t_us", "input", "output"}), _texts),
)


def _whole(place: str, fields: Mapping[str, Any], name: str, lowest: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < lowest:
        raise InvalidArgument(place, f"{name} must be a whole number from {lowest} on, got {value}")
    return value


def _seconds(place: str, fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, int | float) and 0 <= value < 1e12:
        return float(value)
    raise InvalidArgument(place, f"{name} must be a time, a number not below 0, got {value}")


def _list(place: str, fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = fields.get(name)
    if not (isinstance(value, list) and all(isinstance(entry, dict) for entry in value)):
        raise InvalidArgument(place, f"{name} must be a list of objects")
    return value
