"""Is an answer parsed into the same parts, however it was cut into tokens and steps?"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
from chat_support import (
    GET_WEATHER,
    MARK,
    Parameter,
    Parsed,
    asked,
    calls_block,
    chat_body,
    encode_output,
)

from ripresa.cluster.gateway.chat_encoding import ChatEncoding, Prompt, Protocol
from ripresa.cluster.gateway.tokenizer import Tokenizer

USER = {"role": "user", "content": "Weather?"}
TWO_CALLS = calls_block(
    [
        ("get_weather", [("city", "true", 'Os"lo\n'), ("days", "false", "2")]),
        ("get_weather", [("city", "true", "Rome")]),
    ]
)


@pytest.fixture(scope="module")
def prompt(encoding: ChatEncoding) -> Prompt:
    return encoding.render(chat_body(USER, tools=[GET_WEATHER]))


Ask = Callable[..., Parsed]


@pytest.fixture(scope="module")
def ask(encoding: ChatEncoding, prompt: Prompt) -> Ask:
    def parse(text: str, **how: bool) -> Parsed:
        return asked(encoding, prompt, text, **how)

    return parse


def test_reasoning_content_and_two_calls(ask: Ask) -> None:
    answer = ask(f"Need it.</think>Let me look.\n\n{TWO_CALLS}")
    assert (answer.reasoning, answer.content) == ("Need it.", "Let me look.")
    assert answer.tool_calls == [
        ("get_weather", '{"city": "Os\\"lo\\n", "days": 2}'),
        ("get_weather", '{"city": "Rome"}'),
    ]
    assert answer.finish_reason == "tool_calls"


def test_the_order_of_deltas(ask: Ask) -> None:
    answer = ask(f"Need it.</think>Let me look.\n\n{TWO_CALLS}")
    first, *others = answer.deltas
    assert first == {"role": "assistant", "content": None, "reasoning_content": ""}
    kinds = []
    for delta in others:
        (call,) = delta.get("tool_calls") or (None,)
        kind = next(
            kind
            for kind, there in (
                ("begin", call and "id" in call),
                ("arguments", call),
                ("reasoning", delta.get("reasoning_content")),
                ("content", True),
            )
            if there
        )
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    calls = ["begin", "arguments"] * 2
    assert kinds == ["reasoning", "content", *calls, "content"]
    assert others[-1] == {"content": "", "reasoning_content": None}
    begin = next(d["tool_calls"][0] for d in others if d.get("tool_calls"))
    assert begin.pop("id").startswith("call_00_")
    function = {"name": "get_weather", "arguments": ""}
    assert begin == {"index": 0, "type": "function", "function": function}


def test_usage(ask: Ask, encoding: ChatEncoding) -> None:
    text = "Need it.</think>Yes."
    usage = ask(text).usage
    assert usage["prompt_tokens"] == 10
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["completion_tokens"] == len(encode_output(text))
    # The closing tag belongs to neither part.
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": len(encode_output("Need it."))
    }


@pytest.mark.parametrize("protocol", [Protocol.CHAT_COMPLETIONS, Protocol.RESPONSES])
def test_no_more_reasoning_than_tokens(
    encoding: ChatEncoding, demo: Tokenizer, protocol: Protocol
) -> None:
    """Noise, whose text takes more tokens when it is encoded anew."""
    name = "input" if protocol is Protocol.RESPONSES else "messages"
    count = "output_tokens" if protocol is Protocol.RESPONSES else "completion_tokens"
    for seed in range(20):
        noise = random.Random(seed).choices(range(demo.num_ids), k=30)
        parser = encoding.parser(encoding.render({name: [USER]}, protocol), "id")
        whole = encoding.whole(protocol, "id", 0)
        told = []
        for chunk in (*parser.begin(9, 0), *parser.feed(noise), *parser.finish(is_cut=True)):
            told.append(json.loads(chunk.json()))
            whole.add(chunk)
        for answer in (told[-1].get("response", told[-1]), json.loads(whole.json())):
            usage = answer["usage"]
            assert 0 < usage[f"{count}_details"]["reasoning_tokens"] <= usage[count]


def test_cut_in_an_argument(ask: Ask) -> None:
    text = f"x</think>{calls_block([('get_weather', [('city', 'true', 'Os')])])}"
    answer = ask(text[: text.index("Os") + 2], is_cut=True)
    assert answer.tool_calls == [("get_weather", '{"city": "Os')]
    assert answer.finish_reason == "length"


def test_cut_in_the_reasoning(ask: Ask) -> None:
    answer = ask("Need", is_cut=True)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("Need", "", "length")


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("think {calls}", "think ", "", 1),
        ("</think>{calls}after", "", "", 1),
        ("</think>a < b ｜DSML b</think>", "", "a < b ｜DSML b", 0),
        ("</think>x <｜User｜> y", "", "x <｜User｜> y", 0),
        ("</think>\n\n\nx", "", "x", 0),
    ],
    ids=["in_reasoning", "text_after", "nearly_a_tag", "special_token", "newlines"],
)
def test_odd_answers(ask: Ask, text: str, reasoning: str, content: str, calls: int) -> None:
    block = calls_block([("get_weather", [("city", "true", "Oslo")])])
    answer = ask(text.format(calls=block))
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert len(answer.tool_calls) == calls


def test_a_stop_string_over_tokens_ends_the_answer(encoding: ChatEncoding) -> None:
    prompt = encoding.render(chat_body(USER, stop=["STOP", "zzz"]))
    assert prompt.stop == ("STOP", "zzz")
    parser = encoding.parser(prompt, "id")
    parsed = Parsed()
    ids = [encode_output(part) for part in ("ST</think>a ST", "O", "P never seen")]
    for piece in ids:
        assert not parser.is_over
        parsed.add(parser.feed(piece))
    assert parser.is_over
    assert (parsed.reasoning, parsed.content, parsed.finish_reason) == ("ST", "a ", "stop")
    assert parser.feed(ids[0]) == parser.finish(is_cut=False) == []


def test_the_end_of_sentence_is_no_text(encoding: ChatEncoding, prompt: Prompt) -> None:
    ids = encode_output("a</think>b<｜end▁of▁sentence｜>")
    answer = asked(encoding, prompt, [ids])
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("a", "b", "stop")
    assert asked(encoding, prompt, [ids[:-1], ids[-1:]]).content == "b"


def test_log_probabilities_come_with_their_tokens(encoding: ChatEncoding) -> None:
    prompt = encoding.render(chat_body(USER, logprobs=True, top_logprobs=1))
    parser = encoding.parser(prompt, "id")
    parser.begin(1, 0)
    ids = encode_output("é</think>ok")
    found: dict[str, list[bytes]] = {"content": [], "reasoning_content": []}
    for token_id in ids:
        for chunk in parser.feed([token_id], [(-0.5, [(token_id, -0.5)])]):
            logprobs = json.loads(chunk.json())["choices"][0]["logprobs"] or {}
            for part, entries in logprobs.items():
                for entry in entries:
                    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -0.5
                    found[part].append(bytes(entry["bytes"]))
    assert b"".join(found["reasoning_content"]) == "é".encode()
    assert b"".join(found["content"]) == b"ok"


@pytest.mark.parametrize("protocol", [Protocol.MESSAGES, Protocol.RESPONSES])
def test_other_protocols_have_their_own_events(encoding: ChatEncoding, protocol: Protocol) -> None:
    tool = GET_WEATHER["function"]
    if protocol is Protocol.MESSAGES:
        schema = {"name": tool["name"], "input_schema": tool["parameters"]}
        body = {"messages": [USER], "max_tokens": 100, "tools": [schema]}
    else:
        body = {"input": "Weather?", "tools": [{"type": "function", **tool}]}
    prompt = encoding.render(body, protocol)
    parser = encoding.parser(prompt, "id-1")
    whole = encoding.whole(protocol, "id-1", 7)
    chunks = parser.begin(10, 4)
    for token_id in encode_output(f"Hm.</think>Look.\n\n{TWO_CALLS}"):
        chunks += parser.feed([token_id])
    chunks += parser.finish(is_cut=False)
    events = [(chunk.event, json.loads(chunk.json())) for chunk in chunks]
    assert all(name == body["type"] for name, body in events)
    for chunk in chunks:
        whole.add(chunk)
    answer = json.loads(whole.json())
    if protocol is Protocol.MESSAGES:
        kinds = [part["type"] for part in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        assert answer["content"][2]["input"] == {"city": 'Os"lo\n', "days": 2}
        assert answer["usage"]["cache_read_input_tokens"] == 4
    else:
        kinds = [part["type"] for part in answer["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert json.loads(answer["output"][2]["arguments"])["days"] == 2


class Writer:
    """Writes answers as a model might, and cuts them as a tokenizer and an engine might not."""

    ALPHABET = ('"', "\\", "\n", " ", "{", "}", "[", "]", ",", ":", "<", ">", "/", "a", "b", "c")
    MORE = ("é", "日本", "🙂", "\u0301", "\u2028", "</", "｜", "think", "<|", MARK[:3], "STOP", "0")

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._byte_ids: dict[int, int] = {}
        for token_id in range(tokenizer.num_ids):
            raw = tokenizer.token_bytes([token_id])
            if len(raw) == 1:
                self._byte_ids.setdefault(raw[0], token_id)

    def text(self, most: int = 12) -> str:
        pieces = self.ALPHABET + self.MORE
        return "".join(self._random.choices(pieces, k=self._random.randint(0, most)))

    def value(self, depth: int = 0) -> object:
        kind = self._random.randrange(6 if depth < 3 else 4)
        if kind == 0:
            return self._random.choice([None, True, False, 0, -2.5, 1e300, 10**20])
        if kind < 4:
            return self.text()
        keys = range(self._random.randint(0, 3))
        if kind == 4:
            return [self.value(depth + 1) for _ in keys]
        return {self.text(4): self.value(depth + 1) for _ in keys}

    def parameter(self) -> Parameter:
        key = self._random.choice(["city", "days", "é", "a_b"])
        if self._random.random() < 0.5:
            return key, "true", self.text(30)
        indent = self._random.choice([None, 0, 2])
        ascii_only = self._random.random() < 0.5
        return key, "false", json.dumps(self.value(), indent=indent, ensure_ascii=ascii_only)

    def answer(self) -> str:
        calls = []
        for _ in range(self._random.randint(1, 3)):
            parameters = [self.parameter() for _ in range(self._random.randint(0, 3))]
            calls.append((self._random.choice(["get_weather", "f"]), parameters))
        content = self._random.choice(["", "\n\n", self.text() + "\n\n", self.text()])
        after = self._random.choice(["", "", self.text()])
        text = f"{self.text()}</think>{content}{calls_block(calls)}{after}"
        if self._random.random() < 0.1:
            text = text[: self._random.randrange(len(text))]
        return text

    def tokens(self, text: str) -> list[int]:
        """Some tokens that spell the text, seldom those of an encoder; special ones are one."""
        ids: list[int] = []
        for part in re.split(f"({MARK}|</think>)", text):
            if part in (MARK, "</think>"):
                ids += encode_output(part)
                continue
            while part:
                size = self._random.randint(1, 9)
                piece, part = part[:size], part[size:]
                if self._random.random() < 0.3:
                    ids += [self._byte_ids[byte] for byte in piece.encode()]
                else:
                    ids += encode_output(piece)
        return ids

    def cut(self, ids: list[int]) -> list[list[int]]:
        most = self._random.choice([1, 3, 40])
        pieces = []
        while ids:
            size = self._random.randint(1, most)
            pieces.append(ids[:size])
            ids = ids[size:]
        return pieces


def check_cuts(encoding: ChatEncoding, tokenizer: Tokenizer, seeds: range) -> int:
    """Every answer is the same in one piece, in random pieces of odd tokens, and token by token.

    Returns how many calls were compared.
    """
    num_calls = 0
    prompt = encoding.render(chat_body(USER, tools=[GET_WEATHER]))
    writer = Writer(tokenizer, seeds.start)
    for _ in seeds:
        text = writer.answer()
        whole = asked(encoding, prompt, [encode_output(text)])
        odd = asked(encoding, prompt, writer.cut(writer.tokens(text)))
        single = asked(encoding, prompt, text)
        for cut in (odd, single):
            assert cut.tool_calls == whole.tool_calls, text
            assert (cut.reasoning, cut.content) == (whole.reasoning, whole.content), text
            assert cut.finish_reason == whole.finish_reason, text
        num_calls += len(whole.tool_calls)
    return num_calls


def test_any_cut_gives_the_same_calls(encoding: ChatEncoding, demo: Tokenizer) -> None:
    assert check_cuts(encoding, demo, range(500)) > 500


@pytest.mark.slow
def test_any_cut_gives_the_same_calls_10_000_times(encoding: ChatEncoding, demo: Tokenizer) -> None:
    assert check_cuts(encoding, demo, range(500, 10_500)) > 10_000
