"""Do several choices, stop strings and log probabilities keep the contract of a stream?"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import Unavailable


def ask(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(**sampling))


async def collect(call: Any) -> list[pb.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def texts(responses: list[pb.GenerateResponse]) -> dict[int, str]:
    found: dict[int, str] = {}
    for response in responses:
        if response.HasField("delta"):
            choice = response.delta.choice
            found[choice] = found.get(choice, "") + response.delta.text
    return found


async def test_choices_share_a_prompt_and_differ_by_seed(stub: Any, router: Any) -> None:
    responses = await collect(stub.Generate(ask(n=3, max_tokens=4, seed=2**64 - 1)))
    kinds = Counter(response.WhichOneof("event") for response in responses)
    assert kinds == {"started": 1, "delta": 12, "finished": 3, "completed": 1}
    assert responses[0].HasField("started")
    assert responses[-1].HasField("completed")
    assert [response.sequence for response in responses] == list(range(17))
    finished = [r.finished for r in responses if r.HasField("finished")]
    assert sorted(end.choice for end in finished) == [0, 1, 2]
    assert len(set(texts(responses).values())) == 1
    assert responses[-1].completed.usage.completion_tokens == 12
    first, *others = router.seen
    assert responses[-1].completed.usage.prompt_tokens == len(first.token_ids)
    assert [p.sampling.seed for p in router.seen] == [2**64 - 1, 0, 1]
    assert all(other.token_ids == first.token_ids for other in others)
    assert len({p.request_id for p in router.seen}) == 3
    assert [" " in p.request_id for p in router.seen] == [False, True, True]


async def test_other_choices_wait_for_the_first_ones_prefill(stub: Any, router: Any) -> None:
    """They find its prompt in the cache then."""
    router.hold_prefill.clear()
    call = stub.Generate(ask(n=2, max_tokens=2))
    assert (await call.read()).HasField("started")
    assert len(router.seen) == 1
    router.hold_prefill.set()
    await collect(call)
    assert len(router.seen) == 2


async def test_a_failing_choice_fails_the_stream_and_ends_the_others(
    stub: Any, router: Any, service: Any
) -> None:
    router.failure = Unavailable("gone")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(ask(n=3, max_tokens=5)))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0


async def test_a_cancel_ends_every_choice(stub: Any, router: Any, service: Any) -> None:
    router.hold.clear()
    call = stub.Generate(ask(n=3, max_tokens=9))
    for _ in range(4):
        await call.read()
    assert service.num_running == 3
    call.cancel()
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_choices_count_as_requests(stub: Any, router: Any) -> None:
    router.hold.clear()
    running = stub.Generate(ask(n=2, max_tokens=5))
    assert (await running.read()).HasField("started")
    for n, code in (
        (2, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (4, grpc.StatusCode.INVALID_ARGUMENT),  # more than may ever run
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(ask(n=n)))
        assert caught.value.code() is code
    router.hold.set()
    await collect(running)
    assert len(router.seen) == 2


@pytest.fixture
def spelled(router: Any, tokenizer: Tokenizer) -> str:
    """The answer of the scripted router, with every character in its own token."""
    text = "one STOP two"
    router.script = tuple(token for letter in text for token in tokenizer.encode(letter))
    return text


@pytest.mark.parametrize("batch", [1, 3, 50])
async def test_a_stop_string_ends_a_choice(
    stub: Any, router: Any, service: Any, spelled: str, batch: int
) -> None:
    router.batch = batch
    responses = await collect(stub.Generate(ask(max_tokens=40, stop=["nope", "STOP", "P"])))
    assert texts(responses) == {0: "one "}
    finished, completed = responses[-2].finished, responses[-1].completed
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop_string == "STOP"
    generated = min(40, -(-len("one STOP") // batch) * batch)
    assert completed.usage.completion_tokens == generated
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0
    # The work until then is counted, though the worker could not tell an end.
    told = service.metrics.render().decode()
    assert f'ripresa_decoder_rows_total{{phase="decode"}} {4.0 * generated}' in told
    assert 'ripresa_transfer_bytes_total{backend="gloo"} 1000.0' in told


async def test_text_that_is_no_stop_string_after_all_comes_later(
    stub: Any, router: Any, spelled: str
) -> None:
    responses = await collect(stub.Generate(ask(max_tokens=len(spelled), stop=["STOPS", "two!"])))
    assert texts(responses) == {0: spelled}
    assert responses[-2].finished.reason == pb.FINISH_REASON_LENGTH
    assert not responses[-2].finished.HasField("stop_string")


async def test_no_stop_string_before_min_tokens(stub: Any, router: Any, spelled: str) -> None:
    request = ask(max_tokens=len(spelled) * 2, min_tokens=len(spelled), stop=["STOP"])
    responses = await collect(stub.Generate(request))
    assert texts(responses) == {0: spelled + "one "}


async def test_one_of_several_choices_is_stopped(
    stub: Any, router: Any, service: Any, spelled: str
) -> None:
    responses = await collect(stub.Generate(ask(n=2, max_tokens=40, stop=["STOP"])))
    assert texts(responses) == {0: "one ", 1: "one "}
    assert responses[-1].HasField("completed")
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_log_probabilities_come_with_their_tokens(
    stub: Any, router: Any, tokenizer: Tokenizer
) -> None:
    responses = await collect(stub.Generate(ask(max_tokens=3, logprobs=2)))
    entries = [entry for r in responses for entry in r.delta.logprobs]
    assert [entry.token_id for entry in entries] == [40, 41, 42]
    for entry in entries:
        assert entry.token_bytes == tokenizer.token_bytes([entry.token_id])
        assert entry.logprob == pytest.approx(-entry.token_id / 100)
        assert [top.token_id for top in entry.top] == [0, 1]
        assert entry.top[1].token_bytes == tokenizer.token_bytes([1])
    responses = await collect(stub.Generate(ask(max_tokens=3)))
    assert not any(r.delta.logprobs for r in responses)
