"""Is a text completion over HTTP what OpenAI's client understands, streaming and not?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from http_gateway import http_gateway
from in_process_router import InProcessRouter

from ripresa.cluster.gateway.service import InferenceService
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.replay import ReplayMode
from ripresa.workers.request import CacheUse


@pytest.fixture
async def client(
    service: InferenceService, router: InProcessRouter
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        http_gateway(service) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0


@pytest.fixture
def spelled(router: InProcessRouter, tokenizer: Tokenizer) -> str:
    text = "héllo STOP 日"
    router.script = tuple(tokenizer.encode(text))
    return text


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 40, **fields}


async def test_a_whole_completion(
    client: openai.AsyncOpenAI, router: InProcessRouter, spelled: str, tokenizer: Tokenizer
) -> None:
    answer = await client.completions.create(**ask(max_tokens=len(router.script)))
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (spelled, "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(router.script)
    assert answer.usage.prompt_tokens == len(tokenizer.encode("hi"))


@pytest.mark.parametrize("batch", [1, 5])
async def test_a_stream_tells_the_same(
    client: openai.AsyncOpenAI, router: InProcessRouter, spelled: str, batch: int
) -> None:
    router.batch = batch
    question = ask(max_tokens=len(router.script), n=2)
    whole = await client.completions.create(**question)
    texts, reasons, usages = ["", ""], {}, []
    stream = await client.completions.create(
        **question, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] == [spelled] * 2
    assert reasons == {0: "length", 1: "length"}
    assert usages[-1] == whole.usage
    assert set(usages[:-1]) == {None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string(
    client: openai.AsyncOpenAI, router: InProcessRouter, spelled: str, stream: bool
) -> None:
    question = ask(stop=["STOP", "nope"])
    if stream:
        text, reason = "", None
        async for chunk in await client.completions.create(**question, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
    else:
        (choice,) = (await client.completions.create(**question)).choices
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == ("héllo ", "stop")


async def test_log_probabilities(
    client: openai.AsyncOpenAI, router: InProcessRouter, spelled: str, tokenizer: Tokenizer
) -> None:
    count = len(router.script)
    answer = await client.completions.create(**ask(max_tokens=count, logprobs=2))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    for entries in (
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
    ):
        assert len(entries or ()) == count
    for token_id, text, logprob in zip(
        router.script, logprobs.tokens or (), logprobs.token_logprobs or (), strict=True
    ):
        assert logprob == pytest.approx(-token_id / 100)
        raw = tokenizer.token_bytes([token_id])
        if text.startswith("bytes:"):
            assert bytes.fromhex(text.removeprefix("bytes:").replace("\\x", "")) == raw
        else:
            assert text.encode() == raw
    offsets = logprobs.text_offset or []
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    streamed: list[str] = []
    async for chunk in await client.completions.create(
        **ask(max_tokens=count, logprobs=2, stream=True)
    ):
        own = chunk.choices[0].logprobs
        streamed += (own.tokens or []) if own else []
    assert streamed == logprobs.tokens


async def test_prompts_of_token_ids(client: openai.AsyncOpenAI, router: InProcessRouter) -> None:
    for prompt in ([0, 2, 9], [[0, 2, 9]]):
        await client.completions.create(**ask(prompt=prompt, max_tokens=1))
    await client.completions.create(**ask(prompt=["hi"], max_tokens=1))
    assert [p.token_ids for p in router.seen[:2]] == [(0, 2, 9)] * 2


async def test_what_of_the_cache_a_request_uses(
    client: openai.AsyncOpenAI, router: InProcessRouter
) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"replay_mode": "exact"},
        {"replay_mode": "canonical", "disable_resume": True},
        {"disable_read": True, "disable_write": True},
    ]
    for policy in asked:
        await client.completions.create(**ask(max_tokens=1, extra_body={"cache_policy": policy}))
    assert [prompt.cache for prompt in router.seen] == [
        CacheUse(),
        CacheUse(ReplayMode.EXACT),
        CacheUse(ReplayMode.CANONICAL, resumes=False),
        CacheUse(reads=False, writes=False, resumes=False),
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two texts": ({"prompt": ["a", "b"]}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "a truth": ({"prompt": [True]}, "prompt"),
    "an id": ({"prompt": [4, 99999]}, "prompt[1]"),
    "a negative id": ({"prompt": [-1]}, "prompt[0]"),
    "too long": ({"prompt": "~" * 64}, "prompt"),
    "hopeless": ({"prompt": "~" * 9999}, "prompt"),
    "a suffix": ({"suffix": "x"}, "suffix"),
    "an echo": ({"echo": True}, "echo"),
    "a choice of several": ({"best_of": 3}, "best_of"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "a policy": ({"extra_body": {"cache_policy": "exact"}}, "cache_policy"),
    "a mode": ({"extra_body": {"cache_policy": {"replay_mode": "x"}}}, "cache_policy.replay_mode"),
    "no truth": (
        {"extra_body": {"cache_policy": {"disable_read": 1}}},
        "cache_policy.disable_read",
    ),
    "its rest": ({"extra_body": {"cache_policy": {"tail": "full"}}}, "cache_policy.tail"),
    "a priority": ({"extra_body": {"priority": 2**31}}, "priority"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_refusals_name_the_field(
    client: openai.AsyncOpenAI, router: InProcessRouter, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**ask(**fields))
    assert caught.value.param == param
    assert router.seen == []


async def test_chat_of_a_model_without_its_tokens_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}]
        )
    assert json.loads(caught.value.response.text)["error"]["code"] == "chat_unavailable"


@pytest.mark.parametrize("batch", [1, 5])
async def test_token_ids(
    client: openai.AsyncOpenAI, router: InProcessRouter, spelled: str, batch: int
) -> None:
    """In vLLM's names; the stream's pieces are the whole answer's, those without text included."""
    router.batch = batch
    asked = ask(n=2, seed=3, max_tokens=len(router.script), extra_body={"return_token_ids": True})
    whole = (await client.completions.create(**asked)).model_dump()
    prompt = list(router.seen[0].token_ids)
    for choice in whole["choices"]:
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == list(router.script)
    told: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    async for chunk in await client.completions.create(**asked, stream=True):
        (piece,) = chunk.model_dump()["choices"]
        told[piece["index"]] += piece["token_ids"]
        prompts += [piece["prompt_token_ids"]] if "prompt_token_ids" in piece else []
    assert list(told.values()) == [choice["token_ids"] for choice in whole["choices"]]
    assert prompts == [prompt, prompt]
    plain = await client.completions.create(**ask())
    assert "token_ids" not in plain.choices[0].model_dump()


async def test_more_choices_than_may_ever_run(
    client: openai.AsyncOpenAI, router: InProcessRouter
) -> None:
    with pytest.raises(openai.BadRequestError, match="max_running") as refused:
        await client.completions.create(**ask(n=4))
    assert refused.value.param == "n"
    assert router.seen == []
