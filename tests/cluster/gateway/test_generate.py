"""Is a Generate stream what the contract promises, and does every way out of it clean up?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.service import InferenceService, expiry
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.observability.metrics import TokenSource
from ripresa.cluster.routing.prompt import Placed
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import Unavailable
from ripresa.workers.prefix_sources import PrefixOutcome
from ripresa.workers.replay import PlanKind


def ask(text: str = "hi", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text, sampling=pb.SamplingParams(**sampling), return_token_ids=True
    )


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """The rest of a stream."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


class _Clock:
    """Stands for the `time` module: seconds since the epoch that a test sets."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.time = now


def kinds(responses: list[pb.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def value(service: InferenceService, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"no series {name} {labels}")


async def test_the_shape_of_a_stream(stub: Any, tokenizer: Tokenizer) -> None:
    responses = await collect(stub.Generate(ask("the quick fox", max_tokens=3, seed=7)))
    assert kinds(responses) == ["started", *["delta"] * 3, "finished", "completed"]
    assert [response.sequence for response in responses] == list(range(6))
    started, finished, completed = responses[0].started, responses[-2].finished, responses[-1]
    num_prompt = len(tokenizer.encode("the quick fox"))
    assert (started.prompt_tokens, started.cached_tokens) == (num_prompt, 0)
    assert (started.model, started.worker_id, started.seed) == ("tiny", "decode-0", 7)
    assert started.cache.kind == pb.PLAN_KIND_COLD
    assert started.cache.tail == pb.TAIL_VARIANT_FLOORED
    assert not started.cache.HasField("replay_start_token")
    assert finished.reason == pb.FINISH_REASON_LENGTH
    usage = completed.completed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 3)
    assert completed.completed.cache == started.cache
    assert completed.completed.build.seed == 7
    assert completed.completed.build.tokenizer_digest == tokenizer.digest
    assert completed.completed.timings.HasField("time_to_first_token")
    assert not completed.completed.timings.HasField("replay")


async def test_token_ids_go_to_the_router_as_they_are(stub: Any, router: Any) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[0, 2, 9]), sampling=pb.SamplingParams(max_tokens=1)
    )
    await collect(stub.Generate(request))
    assert router.seen[0].token_ids == (0, 2, 9)


async def test_typed_special_tokens_reach_the_router_as_text(
    stub: Any, router: Any, tokenizer: Tokenizer
) -> None:
    await collect(stub.Generate(ask("<｜User｜>", max_tokens=1)))
    assert not set(router.seen[0].token_ids) & {0, 1, 2, 3}
    assert tokenizer.decode(router.seen[0].token_ids) == "<｜User｜>"


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
async def test_text_is_exact_however_tokens_are_batched(
    stub: Any, router: Any, tokenizer: Tokenizer, batch: int
) -> None:
    router.script = tuple(tokenizer.encode("日本 🦊 é"))
    router.batch = batch
    responses = await collect(stub.Generate(ask(max_tokens=17)))
    deltas = [response.delta for response in responses if response.HasField("delta")]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert len(ids) == 17
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids)
    assert all("\ufffd" not in delta.text for delta in deltas[:-1])


async def test_without_token_ids_no_empty_delta_is_sent(
    stub: Any, router: Any, tokenizer: Tokenizer
) -> None:
    router.script = tuple(tokenizer.encode("🦊"))
    request = ask(max_tokens=4)
    request.return_token_ids = False
    responses = await collect(stub.Generate(request))
    assert kinds(responses) == ["started", "delta", "finished", "completed"]
    assert responses[1].delta == pb.TokenDelta(text="🦊")


async def test_a_stop_token_ends_the_stream_without_text(stub: Any, router: Any) -> None:
    router.script = (40, 1, 41)
    responses = await collect(stub.Generate(ask(max_tokens=9)))
    finished = responses[-2].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop_token_id == 1
    text = "".join(response.delta.text for response in responses)
    assert "end▁of" not in text
    ignoring = await collect(stub.Generate(ask(max_tokens=3, ignore_eos=True)))
    assert "end▁of" in "".join(response.delta.text for response in ignoring)


async def test_defaults(stub: Any, router: Any, tokenizer: Tokenizer) -> None:
    await collect(stub.Generate(pb.GenerateRequest(text="hi")))
    await collect(stub.Generate(pb.GenerateRequest(text="hi")))
    first, second = (prompt.sampling for prompt in router.seen)
    assert first.max_tokens == 64 - len(tokenizer.encode("hi"))
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, None)
    assert first.seed != second.seed
    assert router.seen[0].deadline is None


async def test_the_drawn_seed_is_told(stub: Any, router: Any) -> None:
    responses = await collect(stub.Generate(ask(max_tokens=1)))
    assert responses[0].started.seed == router.seen[0].sampling.seed


async def test_zero_seed_and_zero_temperature_are_values(stub: Any, router: Any) -> None:
    await collect(stub.Generate(ask(max_tokens=1, seed=0, temperature=0.0)))
    assert (router.seen[0].sampling.seed, router.seen[0].sampling.temperature) == (0, 0.0)


async def test_client_cancel_closes_the_router(stub: Any, router: Any, service: Any) -> None:
    router.hold.clear()
    call = stub.Generate(ask(max_tokens=9))
    assert (await call.read()).HasField("started")
    assert (await call.read()).HasField("delta")
    call.cancel()
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert service.num_running == 0
    assert value(service, "ripresa_num_requests_running") == 0
    assert value(service, "ripresa_request_failure_total", code="CANCELLED") == 1


async def test_closing_a_stream_closes_the_router_at_once(service: Any, router: Any) -> None:
    stream = service.generate(ask(max_tokens=9), Call("r"))
    assert (await anext(stream)).HasField("started")
    assert router.open == {"r"}
    await stream.aclose()
    assert (router.open, service.num_running) == (set(), 0)


async def test_a_lost_connection_closes_the_router(server: Any, router: Any) -> None:
    from ripresa.protos import ripresa_pb2_grpc

    router.hold.clear()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
    call = ripresa_pb2_grpc.InferenceStub(channel).Generate(ask(max_tokens=9))
    assert (await call.read()).HasField("started")
    assert router.open
    await channel.close()
    await asyncio.wait_for(router.all_closed.wait(), 10)


async def test_a_deadline_reaches_the_router_and_ends_the_stream(
    stub: Any, router: Any, service: Any
) -> None:
    router.hold.clear()
    num_calls = 0
    # A loaded machine may take longer than that to reach the router.
    while not router.seen and num_calls < 5:
        num_calls += 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(ask(max_tokens=9), timeout=2**num_calls / 2))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(router.all_closed.wait(), 10)
    assert router.seen[0].deadline is not None
    assert service.num_running == 0
    # A stalled machine may carry the client's cancel further ahead of the server's deadline than
    # the service allows for; which cancel is late is tested with a clock below.
    codes = ("DEADLINE_EXCEEDED", "CANCELLED")
    counts = [value(service, "ripresa_request_failure_total", code=code) for code in codes]
    assert 1 <= sum(counts) <= num_calls


async def test_a_cancel_at_the_clients_deadline_counts_as_late(
    service: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's clock ends a call a moment before the server's copy of its deadline."""
    now = 1000.0
    monkeypatch.setattr("ripresa.cluster.gateway.service.time", _Clock(lambda: now))
    for cancelled_at, code in ((1098.0, "CANCELLED"), (1099.0, "DEADLINE_EXCEEDED")):
        now = 1000.0
        stream = service.generate(ask(max_tokens=9), Call(code, deadline=1100.0))
        assert (await anext(stream)).HasField("started")
        now = cancelled_at
        with pytest.raises(asyncio.CancelledError):
            await stream.athrow(asyncio.CancelledError())
        assert value(service, "ripresa_request_failure_total", code=code) == 1
    assert service.num_running == 0


def test_without_a_deadline_no_cancel_is_late() -> None:
    assert expiry(1000.0, None) == math.inf
    assert expiry(1000.0, 1100.0) < 1099.0


async def test_abort_from_another_call(stub: Any, router: Any) -> None:
    router.hold.clear()
    request = ask(max_tokens=9)
    request.options.request_id = "mine"
    call = stub.Generate(request)
    assert (await call.read()).started.request_id == "mine"
    assert (await stub.Abort(pb.AbortRequest(request_id="mine"))).found
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert not (await stub.Abort(pb.AbortRequest(request_id="mine"))).found


async def test_a_failing_router_fails_the_stream(stub: Any, router: Any, service: Any) -> None:
    router.failure = Unavailable("the decode worker died", retry_after_s=2.0)
    call = stub.Generate(ask(max_tokens=3))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the decode worker died"
    assert service.num_running == 0
    assert value(service, "ripresa_request_failure_total", code="UNAVAILABLE") == 1


async def test_an_unexpected_failure_shows_no_internals(stub: Any, router: Any) -> None:
    router.failure = ZeroDivisionError("secret detail")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(ask(max_tokens=3)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_a_gap_in_the_tokens_is_an_error(stub: Any, router: Any, monkeypatch: Any) -> None:
    from ripresa.workers.request import Tokens

    events = router._events

    async def skipping(prompt: Any) -> Any:
        async for event in events(prompt):
            if not (isinstance(event, Tokens) and event.position == len(prompt.token_ids) + 1):
                yield event

    monkeypatch.setattr(router, "_events", skipping)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(ask(max_tokens=4)))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "continued at position" in (caught.value.details() or "")


async def test_metrics_of_a_finished_stream(
    stub: Any, service: InferenceService, tokenizer: Tokenizer
) -> None:
    await collect(stub.Generate(ask("hi", max_tokens=5)))
    tokens = [value(service, "ripresa_prompt_tokens_total", source=s) for s in TokenSource]
    assert tokens == [0, 0, 0, 0, 0, len(tokenizer.encode("hi"))]
    assert value(service, "ripresa_plan_kind_total", kind="cold") == 1
    assert value(service, "ripresa_generation_tokens_total") == 5
    assert value(service, "ripresa_time_to_first_token_seconds_count") == 1
    assert value(service, "ripresa_inter_token_latency_seconds_count") == 4
    assert value(service, "ripresa_transfer_bytes_total", backend="gloo") == 1000
    assert value(service, "ripresa_request_success_total", finish_reason="length") == 1
    assert value(service, "ripresa_num_requests_waiting") == 0


@pytest.mark.parametrize(
    ("kind", "start", "behind"),
    [
        (PlanKind.WINDOW, 40, (pb.CACHE_TIER_DEVICE, "encoder-0", 32, 8)),
        (PlanKind.RESUME, 37, (pb.CACHE_TIER_HOST, "encoder-0", 32, 5)),
    ],
)
async def test_where_cached_tokens_were_is_told_and_counted(
    stub: Any,
    service: InferenceService,
    router: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: PlanKind,
    start: int,
    behind: tuple[Any, ...],
) -> None:
    events = router._events
    prefix = PrefixOutcome(from_peers=((1, 2),), from_disk=((2, 4),))

    async def reusing(prompt: Any) -> Any:
        async for event in events(prompt):
            if isinstance(event, Placed):
                assert event.recipe is not None
                recipe = replace(event.recipe, kind=kind, start=start, write_floor=start)
                event = replace(event, recipe=recipe, prefix=prefix)
            yield event

    monkeypatch.setattr(router, "_events", reusing)
    monkeypatch.setattr(service, "_window", 8)
    request = ask(max_tokens=1)
    request.token_ids.ids.extend([7] * 50)
    responses = await collect(stub.Generate(request))
    started, completed = responses[0].started, responses[-1].completed
    assert [
        (s.tier, s.source_worker_id, s.start_token, s.num_tokens) for s in started.cache.segments
    ] == [
        (pb.CACHE_TIER_DEVICE, "encoder-0", 0, 8),
        (pb.CACHE_TIER_PEER, "", 8, 8),
        (pb.CACHE_TIER_DISK, "encoder-0", 16, 16),
        behind,
    ]
    assert completed.cache == started.cache
    by_source = {s: value(service, "ripresa_prompt_tokens_total", source=s) for s in TokenSource}
    if kind is PlanKind.RESUME:
        assert by_source[TokenSource.RESUMED] == start
    else:
        assert by_source[TokenSource.SKIPPED_LOCAL] == start - 24
        assert by_source[TokenSource.SKIPPED_PEER] == 8
        assert by_source[TokenSource.SKIPPED_DISK] == 16


async def test_many_streams_at_once_are_each_their_own(stub: Any, router: Any) -> None:
    router.hold.clear()
    calls = [stub.Generate(ask(max_tokens=n)) for n in (2, 3, 4)]
    for call in calls:
        assert (await call.read()).HasField("started")
    router.hold.set()
    lengths = [len([r for r in await collect(call) if r.HasField("delta")]) for call in calls]
    assert lengths == [2, 3, 4]
