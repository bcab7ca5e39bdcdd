"""Is what the model said known to every gateway, whatever becomes of the store between them?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from chat_support import encode_output
from resumable_gateways import Gateways, resumable_gateways
from suspensions import Cancelling, for_every_wait

from ripresa.cluster.gateway.said_exchange import MAX_WAITING_TOKENS, SaidExchange
from ripresa.cluster.gateway.said_turns import SaidTurns
from ripresa.cluster.observability.metrics import SAID_ANSWERS, GatewayMetrics, SaidOutcome
from ripresa.cluster.sessions.said_feed import FeedPlace, SaidAnswer, SaidNews
from ripresa.cluster.sessions.store import LocalSessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import Unreachable

EOS = 1
CONFIG = pb.ConversationConfig(tools=[pb.ToolDefinition(name="search")])


class HeardTurns(SaidTurns):
    """Tells which answers are kept, as it happens."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    def keep(self, key: bytes, token_ids: Iterable[int]) -> None:
        super().keep(key, token_ids)
        self.heard.put_nowait(key)

    async def next(self) -> bytes:
        return await asyncio.wait_for(self.heard.get(), 10)


class Outcomes:
    """What a gateway counts of its exchange, as it happens."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._counted: asyncio.Queue[SaidOutcome] = asyncio.Queue()
        self._count = metrics.said
        metrics.said = self._said  # type: ignore[method-assign]

    def _said(self, outcome: SaidOutcome, num_answers: int) -> None:
        self._count(outcome, num_answers)
        for _ in range(num_answers):
            self._counted.put_nowait(outcome)

    async def until(self, outcome: SaidOutcome) -> None:
        while await asyncio.wait_for(self._counted.get(), 10) is not outcome:
            pass


class FrailStore:
    """A store that can be lost, slow, and begun anew."""

    def __init__(self) -> None:
        self.is_lost = False
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.restart()

    def restart(self) -> None:
        self._store = LocalSessionStore()

    async def share(self, gateway: str, answers: Sequence[SaidAnswer]) -> None:
        await self._pass("share")
        await self._store.share(gateway, answers)

    async def news(self, gateway: str, place: FeedPlace) -> SaidNews:
        await self._pass("news")
        store = self._store
        told = await store.news(gateway, place)
        if store is not self._store:
            raise Unreachable("the session store died")
        return told

    async def _pass(self, method: str) -> None:
        self.asked.put_nowait(method)
        await self.is_open.wait()
        if self.is_lost:
            raise Unreachable("no store")

    async def until_asked(self, method: str) -> None:
        while await asyncio.wait_for(self.asked.get(), 10) != method:
            pass


class Side:
    """One gateway's answers and its exchange."""

    def __init__(self, store: FrailStore, stop_s: float = 10.0) -> None:
        self.said = HeardTurns()
        self.metrics = GatewayMetrics()
        self.outcomes = Outcomes(self.metrics)
        self.exchange = SaidExchange(store, self.said, self.metrics, retry_s=0, stop_s=stop_s)
        self.exchange.start()

    def counted(self) -> tuple[int, ...]:
        """Answers shared, received, dropped."""
        counter = self.metrics.counter(SAID_ANSWERS)
        return tuple(int(counter.labels(outcome)._value.get()) for outcome in SaidOutcome)


@asynccontextmanager
async def sides(store: FrailStore) -> AsyncIterator[tuple[Side, Side]]:
    async with AsyncExitStack() as stack:
        pair = Side(store), Side(store)
        for side in pair:
            stack.push_async_callback(side.exchange.stop)
        yield pair


async def test_each_hears_of_the_other_and_a_newcomer_of_both() -> None:
    store = FrailStore()
    async with sides(store) as (one, two):
        one.exchange.tell(b"a", [1, 2, 3])
        assert await two.said.next() == b"a"
        two.exchange.tell(b"b", [4])
        assert await one.said.next() == b"b"
        assert list(two.said.find(b"a") or ()) == [1, 2, 3]
        assert one.said.find(b"a") is None, "its own does not come back"
        newcomer = Side(store)
        assert [await newcomer.said.next(), await newcomer.said.next()] == [b"a", b"b"]
        await newcomer.exchange.stop()
        assert (one.counted(), two.counted()) == ((1, 1, 0), (1, 1, 0))
        assert newcomer.counted() == (0, 2, 0)


async def test_a_lost_store_costs_what_is_said_meanwhile_and_its_successor_begins_empty() -> None:
    store = FrailStore()
    async with sides(store) as (one, two):
        one.exchange.tell(b"a", [1])
        assert await two.said.next() == b"a"
        store.is_lost = True
        one.exchange.tell(b"b", [2])
        await one.outcomes.until(SaidOutcome.DROPPED)
        store.restart()
        store.is_lost = False
        one.exchange.tell(b"c", [3])
        assert await two.said.next() == b"c"
        newcomer = Side(store)
        assert await newcomer.said.next() == b"c"
        await newcomer.exchange.stop()
        assert newcomer.said.find(b"a") is None


async def test_a_slow_store_holds_up_nobody_and_what_waits_is_bounded() -> None:
    store = FrailStore()
    store.is_open.clear()
    side = Side(store, stop_s=0)
    half = range(MAX_WAITING_TOKENS // 2 - 100)
    side.exchange.tell(b"a", half)
    await store.until_asked("share")
    for key in (b"b", b"c", b"d"):
        side.exchange.tell(key, half)
    assert side.exchange.num_tokens <= MAX_WAITING_TOKENS
    assert side.counted() == (0, 0, 2)
    store.is_open.set()
    other = Side(store)
    assert [await other.said.next(), await other.said.next()] == [b"a", b"b"]
    store.is_open.clear()
    side.exchange.tell(b"e", [1])
    await side.exchange.stop()
    assert side.counted() == (2, 0, 3), "a store that does not answer delays no stop"
    await other.exchange.stop()


async def test_what_waits_is_told_before_the_end() -> None:
    store = FrailStore()
    async with sides(store) as (one, two):
        one.exchange.tell(b"a", [1])
        await one.exchange.stop()
        assert await two.said.next() == b"a"


async def test_nothing_is_left_wherever_its_end_is_cancelled() -> None:
    async def scenario(cancelling: Cancelling[bool]) -> bool:
        before = asyncio.all_tasks()
        store = FrailStore()
        side = Side(store)
        side.exchange.tell(b"a", [1])

        async def stop() -> bool:
            await side.exchange.stop()
            return True

        ended = await cancelling(stop)
        assert asyncio.all_tasks() <= before
        assert side.exchange.num_tokens == 0
        return ended is not None

    assert await for_every_wait(scenario) >= 2


ANSWERS = {
    # Odd splits: no encoder would write these tokens again.
    1: [*encode_output("Need"), *encode_output("it.</think>It is "), *encode_output("co"), EOS],
    2: [*encode_output("Well.</think>No."), EOS],
}


def chat(*messages: pb.Message, seed: int, salt: str = "") -> pb.ChatRequest:
    return pb.ChatRequest(
        options=pb.RequestOptions(cache_salt=salt),
        # With tools, the encoding itself keeps all reasoning.
        full=pb.FullConversation(config=CONFIG, messages=messages),
        sampling=pb.SamplingParams(max_tokens=200, seed=seed),
    )


async def moved(gateways: Gateways, salts: Sequence[str]) -> tuple[int, ...]:
    """A conversation whose client drops the reasoning goes on at another gateway, first with one
    salt, then with the other: the last prompt."""
    first, second = gateways.another(), gateways.another()
    async with AsyncExitStack() as stack:
        for gateway in (first, second):
            gateway.service.share_answers(gateways.store)
            stack.push_async_callback(gateway.service.keep_answers)
        outcomes = Outcomes(second.service.metrics)
        question = pb.Message(role=pb.ROLE_USER, content="Is it cold?")
        told = await first.ask(chat(question, seed=1, salt=salts[0]))
        (answer,) = (one.finished.message for one in told if one.HasField("finished"))
        assert answer.reasoning_content
        answer.ClearField("reasoning_content")
        await outcomes.until(SaidOutcome.RECEIVED)
        more = pb.Message(role=pb.ROLE_USER, content="And in Rome?")
        await second.ask(chat(question, answer, more, seed=2, salt=salts[1]))
    return gateways.asked[-1].token_ids


@pytest.mark.parametrize("salts", [("", ""), ("mine", "yours")], ids=["same", "other_salt"])
async def test_a_conversation_moves_between_gateways_and_salts_stay_apart(
    salts: Sequence[str],
) -> None:
    async with resumable_gateways(ANSWERS) as gateways:
        after = await moved(gateways, salts)
        held = (*gateways.asked[0].token_ids, *ANSWERS[1])
        keeps = after[: len(held)] == held
        assert keeps == (salts[0] == salts[1])
