"""Do parameters do with a real model what they say, from an HTTP client to the sampler and back?"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from chat_support import GET_WEATHER, MARK
from engine_gateway import MODEL, engine_gateway, noise_runner

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.model_runner import TorchModelRunner

QUESTION = [{"role": "user", "content": "Weather in Oslo?"}]
OFF = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def runner() -> TorchModelRunner:
    return noise_runner()


@pytest.fixture
async def client(
    runner: TorchModelRunner, demo: Tokenizer, encoding: ChatEncoding
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        engine_gateway(runner, demo, encoding) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    extra = {**OFF, **fields.pop("extra_body", {})}
    return {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [GET_WEATHER],
        "max_tokens": 24,
        "temperature": 0.0,
        "extra_body": extra,
        **fields,
    }


async def test_greedy_answers_are_the_same_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**ask())
    streamed = ""
    async for chunk in await client.chat.completions.create(**ask(stream=True)):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


async def test_a_second_request_finds_the_first_ones_prompt(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(**ask())
    again = await client.chat.completions.create(**ask())
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 128


async def test_choices_differ_by_seed_and_agree_with_their_own(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ask(n=3, temperature=1.0, seed=7))
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    alone = await client.chat.completions.create(**ask(temperature=1.0, seed=8))
    # Choice i has the seed plus i.
    assert alone.choices[0].message.content == texts[1]


async def test_log_probabilities_of_a_greedy_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ask(logprobs=True, top_logprobs=3))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content or []
    # A token that is held back at the end, as part of a character, has none.
    assert len(entries) >= 22
    told = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert (answer.choices[0].message.content or "").encode().startswith(told)
    for entry in entries:
        first, *others = entry.top_logprobs
        assert entry.logprob == first.logprob
        assert all(other.logprob <= first.logprob for other in others)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1


async def test_a_bias_a_ban_and_an_ending(
    client: openai.AsyncOpenAI, demo: Tokenizer, encoding: ChatEncoding
) -> None:
    (letter,) = demo.encode("Z")
    biased = await client.chat.completions.create(**ask(logit_bias={str(letter): 100}))
    assert biased.choices[0].message.content == "Z" * 24
    stopped = await client.chat.completions.create(
        **ask(logit_bias={str(letter): 100}, stop=["ZZZ"])
    )
    assert stopped.choices[0].message.content == ""
    assert stopped.choices[0].finish_reason == "stop"
    eager = {"1": 100}
    ended = await client.chat.completions.create(**ask(logit_bias=eager))
    assert ended.usage is not None
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (1, "stop")
    later = await client.chat.completions.create(
        **ask(logit_bias=eager, extra_body={"min_tokens": 5})
    )
    assert later.usage is not None
    assert later.usage.completion_tokens == 6
    call_token = {str(encoding.call_token_id): 100}
    free = await client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=4, logit_bias=call_token
    )
    assert free.choices[0].text == MARK * 4
    banned = await client.chat.completions.create(**ask(logit_bias=call_token, tool_choice="none"))
    assert MARK not in (banned.choices[0].message.content or "")
    assert banned.choices[0].message.tool_calls is None
