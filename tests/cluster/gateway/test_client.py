"""Does the client policy hide what it should, and repeat only what may be repeated?"""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import pytest
from gateway_thread import GatewayThread, gateway_thread

from ripresa.cluster.gateway.client import Began, Client, Ended, Piece
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable


def test_an_answer(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client:
        began, *pieces, ended = client.generate("hi", sampling={"max_tokens": 2, "seed": 3})
    assert isinstance(began, Began)
    assert (began.seed, began.worker_id) == (3, "decode-0")
    assert [piece.token_ids for piece in pieces if isinstance(piece, Piece)] == [(40,), (41,)]
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.completion_tokens) == ("length", 2)


def test_an_error_comes_back_as_it_was_raised(gateway: GatewayThread) -> None:
    gateway.router.failure = Unavailable("the worker died", retry_after_s=2.5)
    with Client(gateway.address) as client, pytest.raises(RipresaError) as caught:
        list(client.generate("hi", sampling={}))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert (caught.value.message, caught.value.retry_after_s) == ("the worker died", 2.5)
    with Client(gateway.address) as client, pytest.raises(RipresaError) as caught:
        list(client.generate("hi", sampling={"top_p": 2.0}))
    assert caught.value.field == "sampling.top_p"


def test_an_unknown_sampling_field_is_refused_here(gateway: GatewayThread) -> None:
    with Client(gateway.address) as client, pytest.raises(InvalidArgument, match="top_q"):
        list(client.generate("hi", sampling={"top_q": 2.0}))


def test_an_unavailable_start_is_repeated(gateway: GatewayThread) -> None:
    gateway.router.refusals = [Unavailable("no worker yet", retry_after_s=0.01)] * 2
    with Client(gateway.address) as client:
        *_, ended = client.generate("hi", sampling={"max_tokens": 1}, request_id="same")
    assert isinstance(ended, Ended)
    assert [prompt.request_id for prompt in gateway.router.seen] == ["same"] * 3


def test_an_aborted_request_is_not_repeated(gateway: GatewayThread) -> None:
    gateway.router.refusals = [RipresaError(ErrorCode.CANCELLED, "aborted while it waited")]
    with Client(gateway.address) as client, pytest.raises(RipresaError) as caught:
        list(client.generate("hi", sampling={"max_tokens": 1}))
    assert caught.value.code is ErrorCode.CANCELLED
    assert len(gateway.router.seen) == 1


def test_a_started_stream_is_not_repeated(gateway: GatewayThread) -> None:
    gateway.router.failure = Unavailable("the worker died")
    with Client(gateway.address) as client, pytest.raises(RipresaError, match="the worker died"):
        list(client.generate("hi", sampling={"max_tokens": 3}))
    assert len(gateway.router.seen) == 1


def test_a_restart_between_calls_does_not_show(model: ServedModel, tokenizer: Tokenizer) -> None:
    answers = []
    with gateway_thread(model, tokenizer) as first:
        client = Client(first.address)
        answers.append(list(client.generate("hi", sampling={"max_tokens": 1})))
        port = first.port
    later = threading.Thread(
        target=lambda: answers.append(list(client.generate("hi", sampling={"max_tokens": 1})))
    )
    later.start()  # nobody listens now
    with client, gateway_thread(model, tokenizer, port):
        later.join(60)
    assert [isinstance(answer[-1], Ended) for answer in answers] == [True, True]


def test_closing_the_answers_cancels_the_request(gateway: GatewayThread) -> None:
    router = gateway.router
    asyncio.run_coroutine_threadsafe(_clear(router.hold), gateway.loop).result(30)
    with Client(gateway.address) as client:
        with closing(client.generate("hi", sampling={"max_tokens": 9})) as answers:
            assert isinstance(next(answers), Began)
        closed = asyncio.run_coroutine_threadsafe(router.all_closed.wait(), gateway.loop)
        assert closed.result(30)


async def _clear(event: asyncio.Event) -> None:
    event.clear()


def test_nobody_there(gateway: GatewayThread) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(Unavailable, match="ripresa serve"):
        client.wait_until_connected(0.1)
