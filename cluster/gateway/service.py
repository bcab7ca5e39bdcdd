"""What does the gateway do for each call? The Inference service without any server around it."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol as TypingProtocol
from typing import TypeVar

from ripresa.cluster.gateway.admission import QUEUE_FULL, Admission, Admitted
from ripresa.cluster.gateway.answered_requests import AnsweredRequests
from ripresa.cluster.gateway.api_keys import KeyFile
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_answer import ChatAnswer
from ripresa.cluster.gateway.chat_encoding import PROMPT_ENCODING, ChatEncoding, Protocol, Turn
from ripresa.cluster.gateway.chat_messages import FULL, Paths, chat_body, conversation_body
from ripresa.cluster.gateway.chat_prompt import AskedChat, ChatReader
from ripresa.cluster.gateway.chat_responses import ChatResponses
from ripresa.cluster.gateway.keeping_teller import KeepingTeller
from ripresa.cluster.gateway.prefix_breaks import Conversations, turn_marks
from ripresa.cluster.gateway.quotas import Quotas
from ripresa.cluster.gateway.reading import Reading, is_short
from ripresa.cluster.gateway.responses import Responses
from ripresa.cluster.gateway.resumed_streams import ResumedStreams
from ripresa.cluster.gateway.run import CountedBooks, Run
from ripresa.cluster.gateway.said_exchange import SaidExchange
from ripresa.cluster.gateway.said_turns import SaidTurns, what_is_said
from ripresa.cluster.gateway.sampling import asked_by, in_message
from ripresa.cluster.gateway.served_model import (
    ServedModel,
    check_model,
    check_text_fits,
    check_token_ids,
)
from ripresa.cluster.gateway.session_opening import read_head
from ripresa.cluster.gateway.sessions import (
    HeardAnswers,
    Sessions,
    SessionSaid,
    SessionTurn,
    TurnPlace,
)
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.stream_facts import StreamFacts, build
from ripresa.cluster.gateway.stream_origin import StreamOrigin
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.told_stream import Teller, told
from ripresa.cluster.gateway.validation import (
    BOUNDS,
    Arrival,
    AskedText,
    ConversationBounds,
    check_name,
    check_request_id,
    read_generate,
    scoped_id,
    tenant_salt,
)
from ripresa.cluster.observability.metrics import GatewayMetrics
from ripresa.cluster.routing.prompt import PromptRequest, Router
from ripresa.cluster.sessions.store import SaidStore, SessionStore
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.replay import TailVariant

T = TypeVar("T")
M = TypeVar("M")
R = TypeVar("R", pb.GenerateResponse, pb.ChatResponse)


class Asked(TypingProtocol):
    """A request that was accepted."""

    @property
    def prompts(self) -> tuple[PromptRequest, ...]:
        """One for each choice."""


A = TypeVar("A", bound=Asked)

# A client's deadline passes a little before the server's copy of it: gRPC rounds the time given up
# by at most 1 % on the wire, and the client's clock started a transit earlier.
DEADLINE_ROUNDING = 0.01
TRANSIT_S = 0.05


class InferenceService:
    """Validates, routes, streams. Lives on one event loop.

    Args:
        router: runs prompts; nothing invalid reaches it.
        encoding: renders conversations and parses answers; None refuses them.
        max_said_tokens: how many tokens of finished answers are kept, to stand in for them when
            they come back in a conversation; 0 keeps none.
        window: W, tokens in a block.
        default_tail: tail variant of requests that name none.
        max_message_bytes: largest HTTP body; the gRPC server has its own setting.
        bounds: of conversations.
        max_running: most requests at once; one more is refused with RESOURCE_EXHAUSTED.
        max_queue_s: how long requests that do not say it wait while every worker is full.
        max_unread_s: how long the stream of a client may wait that takes nothing of it; then it is
            over, and whoever reads by gRPC may go on with what it missed.
        keep_streams_s: how long workers keep streams that have ended.
        transfer_backend: what moves state between workers, for the metrics.
        tokenizer_threads: most calls that tokenize beside the loop at once; further ones queue.
        keys: who the tenants are; None takes every request, of no tenant.
        clock: monotonic seconds.

    Attributes:
        sessions: opened conversations; None refuses their turns.
    """

    def __init__(
        self,
        router: Router,
        model: ServedModel,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        *,
        encoding: ChatEncoding | None = None,
        max_said_tokens: int = 4_000_000,
        window: int = 128,
        default_tail: TailVariant = TailVariant.FLOORED,
        max_message_bytes: int = 4 << 20,
        bounds: ConversationBounds = BOUNDS,
        max_running: int = 1024,
        max_queue_s: float = 0.0,
        max_unread_s: float = 60.0,
        keep_streams_s: float = 60.0,
        transfer_backend: str = "gloo",
        tokenizer_threads: int = 2,
        keys: KeyFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._encoding = encoding
        self._said = SaidTurns(max_said_tokens)
        self._exchange: SaidExchange | None = None
        self._conversations = Conversations(clock)
        self._answered = AnsweredRequests(keep_streams_s, clock)
        self._window = window
        self._default_tail = default_tail
        self.max_message_bytes = max_message_bytes
        self._bounds = bounds
        self._max_queue_s = max_queue_s
        self.max_unread_s = max_unread_s
        self._transfer_backend = transfer_backend
        self._clock = clock
        self._reading = Reading(tokenizer_threads)
        self._draining = False
        self._keys = keys
        self.sessions: Sessions | None = None
        self._quotas = None if keys is None else Quotas(keys.tenants, metrics, clock)
        self._admission = Admission(model.name, max_running, self._quotas)

    @property
    def num_running(self) -> int:
        """Choices of running requests."""
        return self._admission.num_running

    def authenticate(self, key: str | None) -> str:
        """The tenant of a call with this key; empty where there are no tenants.

        Raises:
            RequestError: UNAUTHENTICATED; the key is missing or nobody's.
        """
        if self._keys is None:
            return ""
        try:
            return self._keys.authenticate(key)
        except RequestError as error:
            self.metrics.request_rejected(error.code)
            raise

    async def follow_keys(self) -> None:
        """Take notice of changes of the key file, until `forget_keys`."""
        if self._keys is not None and self._quotas is not None:
            await self._keys.start(self._quotas.limit)

    async def forget_keys(self) -> None:
        if self._keys is not None:
            await self._keys.stop()

    def share_answers(self, store: SaidStore) -> None:
        """Tell other gateways what the model says here, and hear of it, until `keep_answers`."""
        self._exchange = SaidExchange(store, self._said, self.metrics)
        self._exchange.start()

    async def keep_answers(self) -> None:
        if self._exchange is not None:
            await self._exchange.stop()

    def explain(self, request_id: str) -> list[str]:
        """How a request was placed, in lines for a reader.

        Args:
            request_id: its `scoped_id`.

        Raises:
            RipresaError: NOT_FOUND; this gateway does not remember it.
        """
        return self._router.explain(request_id)

    async def ready(self) -> bool:
        """Whether new requests should come here."""
        return not self._draining and await self._router.why_not_ready() is None

    def start_draining(self) -> None:
        """From now on say "not ready"; requests that still arrive are served."""
        self._draining = True

    def close(self) -> None:
        """Give the tokenizer's threads back; no call may follow."""
        self._reading.close()

    async def generate(
        self, request: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream one answer. However the stream ends, the router's generator is closed.

        Raises:
            RipresaError: the request is refused or failed; nothing follows.
        """
        arrival = self.arrival(call)
        read = partial(read_generate, request, self.model, self.tokenizer, arrival)
        tell = partial(self.text_teller, request.return_token_ids)

        def origin(asked: AskedText, start_time: float) -> StreamOrigin:
            return StreamOrigin.of(request, asked.prompts, call, start_time)

        stream = self.stream(read, tell, call, is_short=is_short(request), origin=origin)
        async with aclosing(self._once(request, call, stream, _generated)) as responses:
            async for response in responses:
                yield response

    async def chat(self, request: pb.ChatRequest, call: Call) -> AsyncGenerator[pb.ChatResponse]:
        """Stream one answer to a conversation. However the stream ends, its work does.

        Raises:
            RipresaError: the request is refused or failed; nothing follows.
        """
        arrival, heard = self.arrival(call), HeardAnswers()
        turn: SessionTurn | None = None
        if request.HasField("turn") and self.sessions is not None:
            check_model(request.options.model, self.model, "options.model")
            turn = await self.sessions.turn(request, call)
        asked_for = request if turn is None else turn.request
        place = None if turn is None else turn.place
        reader = self.chat_reader()
        if turn is not None:
            reader = replace(reader, said=SessionSaid(turn.said, self._said))

        def read() -> AskedChat:
            options = asked_for.options
            check_request_id(options.request_id, "options.request_id")
            check_model(options.model, self.model, "options.model")
            asked = asked_by(asked_for.sampling)
            paths = FULL if turn is None else turn.paths
            body, protocol = chat_body(asked_for, paths), Protocol.CHAT_COMPLETIONS
            with paths.named():
                return reader.read(
                    body, protocol, options, asked, arrival, in_message, place=paths.of
                )

        def origin(asked: AskedChat, start_time: float) -> StreamOrigin:
            turn = asked.open_turn
            return StreamOrigin.of(asked_for, asked.prompts, call, start_time, turn, place)

        tell = partial(self.chat_teller, request.return_token_ids, heard)
        stream = self.stream(
            read,
            tell,
            call,
            is_short=is_short(asked_for),
            encoding=PROMPT_ENCODING,
            origin=origin,
        )
        stream = self.kept(stream, place, heard)
        incarnation = "" if place is None else place.incarnation
        once = self._once(request, call, stream, _chatted, incarnation)
        async with aclosing(once) as responses:
            async for response in responses:
                yield response

    def kept(
        self,
        messages: AsyncGenerator[pb.ChatResponse],
        place: TurnPlace | None,
        heard: HeardAnswers,
    ) -> AsyncGenerator[pb.ChatResponse]:
        """The messages; those of a session's turn are kept in its transcript."""
        if place is None or self.sessions is None:
            return messages
        return self.sessions.kept(messages, place, heard)

    async def resume(
        self, request: pb.ResumeRequest, call: Call
    ) -> AsyncGenerator[pb.ResumeResponse]:
        """Go on with a stream, from whatever gateway it came.

        Its messages from `next_sequence` on are those of the undisturbed stream, without timings.

        Raises:
            RipresaError: NOT_FOUND, UNAVAILABLE (what kept it is lost), INVALID_ARGUMENT, or what
                ended the stream; nothing follows.
        """
        streams = ResumedStreams(self, self._router, self._admission, self._window, self._clock)
        try:
            async with aclosing(streams.resume(request, call)) as messages:
                async for message in messages:
                    yield message
        except RipresaError as error:
            self.metrics.resumed(error.code)
            raise
        self.metrics.resumed(None)

    async def _once(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        call: Call,
        fresh: AsyncGenerator[R],
        told: Callable[[pb.ResumeResponse], R],
        incarnation: str = "",
    ) -> AsyncGenerator[R]:
        """What the request was answered a moment ago, or a fresh answer if that is not kept.

        Args:
            incarnation: of the session that it is a turn of.

        Raises:
            RipresaError: ALREADY_EXISTS (its id named another request), or what ends the stream.
        """
        is_told = False
        async with aclosing(fresh):
            stream_id = self._answered.find(request, call, incarnation)
            if stream_id is not None:
                kept = self.resume(pb.ResumeRequest(stream_id=stream_id), call)
                try:
                    async with aclosing(kept):
                        async for message in kept:
                            is_told = True
                            yield told(message)
                except RequestError as error:
                    if is_told or error.reason not in ("STREAM_NOT_FOUND", "WORKER_LOST"):
                        raise
            if not is_told:
                noted = self._answered.noting(fresh, request, call, incarnation)
                async with aclosing(noted) as responses:
                    async for response in responses:
                        yield response

    def text_teller(
        self, return_token_ids: bool, asked: AskedText, facts: StreamFacts
    ) -> Teller[pb.GenerateResponse]:
        """Tells a completion over gRPC."""
        return Responses(facts, asked, self.tokenizer, return_token_ids=return_token_ids)

    def chat_teller(
        self, return_token_ids: bool, heard: HeardAnswers, asked: AskedChat, facts: StreamFacts
    ) -> Teller[pb.ChatResponse]:
        """Tells a chat over gRPC.

        Args:
            heard: gets what the model says.
        """
        answers = self.answers(asked)
        heard.num_generated = facts.num_generated
        teller = ChatResponses(facts, answers, return_token_ids=return_token_ids)
        return self.keeping(teller, asked, heard)

    def answers(self, asked: AskedChat) -> list[ChatAnswer]:
        """One for each choice of a chat, to be fed with its tokens."""
        encoding = self.chat_reader().encoding
        return [
            ChatAnswer(
                encoding.parser(asked.prompt, "", Protocol.CHAT_COMPLETIONS),
                self.tokenizer.stream(),
                asked.prompt.stop,
            )
            for _ in asked.prompts
        ]

    def keeping(
        self, teller: Teller[M], asked: AskedChat, heard: HeardAnswers | None = None
    ) -> Teller[M]:
        """The teller of a chat that begins, and what the conversation's next turn will need.

        What the model says is kept, and workers hear of the tools that it calls.
        """
        first, outline, turn = asked.prompts[0], asked.outline, asked.open_turn
        known = None
        if outline is not None:
            known = self._conversations.arrived(first.tenant_salt, first.session_id, outline)
            self.metrics.continued(known.broken, known.gap_s)
        if turn is None:
            return teller
        end_of_reasoning_id = self.chat_reader().encoding.end_of_reasoning_id

        def keep(choice: int, said: Turn, token_ids: Sequence[int]) -> None:
            key = turn.key(said)
            self._said.keep(key, token_ids)
            if self._exchange is not None:
                self._exchange.tell(key, token_ids)
            if heard is not None:
                heard.answers[choice] = (key, token_ids)
            if outline is not None and known is not None:
                marks = turn_marks(
                    outline.last or b"",
                    array("I", [turn.mark, *token_ids]),
                    what_is_said(said),
                    bool(said.calls),
                    end_of_reasoning_id,
                )
                self._conversations.answered(known.conversation, marks)
            if said.calls:
                tools = dict.fromkeys(name for name, _ in said.calls)
                self._router.called(asked.prompts[choice].request_id, tuple(tools))

        return KeepingTeller(
            teller, self.answers(asked), turn.opening, self.model.eos_token_id, keep
        )

    def arrival(self, call: Call) -> Arrival:
        """What a reader needs to know of a call."""
        return Arrival(
            call.request_id, call.deadline, self._default_tail, call.tenant, self._max_queue_s
        )

    def chat_reader(self) -> ChatReader:
        """Reads conversations.

        Raises:
            RipresaError: FAILED_PRECONDITION; the model's tokenizer knows no chat encoding.
        """
        if self._encoding is None:
            raise RequestError(
                ErrorCode.FAILED_PRECONDITION,
                "CHAT_UNAVAILABLE",
                "the served model's tokenizer lacks the special tokens of a DeepSeek-V4.1 chat; "
                "use Generate",
            )
        return ChatReader(self._encoding, self.model, self.tokenizer, self._said, self._bounds)

    async def stream(
        self,
        read: Callable[[], A],
        tell: Callable[[A, StreamFacts], Teller[M]],
        call: Call,
        *,
        is_short: bool = False,
        encoding: str = "",
        origin: Callable[[A, float], StreamOrigin] | None = None,
    ) -> AsyncGenerator[M]:
        """Read a request, admit it, run it, and count whatever becomes of it.

        Args:
            read: the checked request; it raises what is wrong with it.
            tell: who makes the stream's messages.
            is_short: it is read on the loop.
            encoding: how the prompt was rendered, if it was.
            origin: what others must know to go on with the stream; None for one that ends with
                this gateway.

        Raises:
            RipresaError: the request is refused or failed; nothing follows.
        """
        received, start_time = self._clock(), time.time()
        late_from = expiry(start_time, call.deadline)
        try:
            asked = await self._reading.run(read, _remaining_s(call), is_short=is_short)
            prompts = asked.prompts
            if origin is not None:
                tickets = origin(asked, start_time).tickets()
                prompts = tuple(
                    replace(prompt, stream=ticket, hold=call.hold)
                    for prompt, ticket in zip(prompts, tickets, strict=True)
                )
            admitted = await self.admitted(partial(self._admission.admit, prompts, call))
        except RipresaError as error:
            self.metrics.request_rejected(error.code)
            raise
        books = CountedBooks(
            prompts, self.metrics, self._window, self._transfer_backend, admitted.meter
        )
        run = Run(self._router.generate, prompts, books)
        try:
            facts = StreamFacts(
                prompts,
                self.model,
                self.tokenizer,
                request_id=call.request_id,
                window=self._window,
                encoding=encoding,
                clock=self._clock,
                received=received,
                start_time=start_time,
            )
            async with aclosing(told(run, facts, tell(asked, facts))) as messages:
                async for message in messages:
                    yield message
        except BaseException as error:
            books.fail(_outcome(error, late_from))
            raise
        finally:
            admitted.close()

    def keep_sessions(
        self, store: SessionStore, *, idle_ttl_s: float = 3600.0, max_idle_ttl_s: float = 86400.0
    ) -> None:
        """Serve opened sessions; the store has their transcripts."""
        self.sessions = Sessions(
            store,
            self.model,
            partial(read_head, self),
            self._router.end_session,
            idle_ttl_s=idle_ttl_s,
            max_idle_ttl_s=max_idle_ttl_s,
            bounds=self._bounds,
        )

    async def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id", "name the request to end")
        check_request_id(request.request_id, "request_id")
        # It is the first choice's; the failure of one ends the others.
        aborted = scoped_id(call.tenant, request.request_id)
        return pb.AbortResponse(found=await self._router.abort(aborted))

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        check_model(request.model, self.model, "model")
        check_name(request.cache_salt, "cache_salt")
        conversation: pb.FullConversation | None = None
        match request.WhichOneof("input"):
            case None:
                raise InvalidArgument("input", "give `text` or `conversation`")
            case "conversation":
                conversation = request.conversation

        def encode() -> tuple[str, Sequence[int]]:
            if conversation is not None:
                paths = Paths("conversation.messages", "conversation.config")
                body = conversation_body(conversation, paths)
                with paths.named():
                    prompt, token_ids = self.chat_reader().encode(
                        body, Protocol.CHAT_COMPLETIONS, call.tenant, request.cache_salt
                    )
                return prompt.text, token_ids
            check_text_fits(request.text, self.model, self.tokenizer, "text")
            return request.text, self.tokenizer.encode(request.text)

        text, token_ids = await self.off_loop(encode, call)
        return pb.TokenizeResponse(
            token_ids=token_ids,
            prompt=text,
            max_model_len=self.model.max_model_len,
            cached_tokens=await self.num_held_tokens(token_ids, request.cache_salt, call),
        )

    async def num_held_tokens(self, token_ids: Sequence[int], cache_salt: str, call: Call) -> int:
        """Leading tokens of a prompt that a caller would find in the cluster's caches now."""
        salt = tenant_salt(call.tenant, cache_salt)
        return await self._router.num_held_tokens(token_ids, salt)

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        check_model(request.model, self.model, "model")
        count, limit = len(request.token_ids), self.model.max_model_len
        if count > limit:
            raise InvalidArgument(
                "token_ids", f"{count} ids were given; at most {limit} fit the model's context"
            )

        def decode() -> str:
            token_ids = tuple(request.token_ids)
            check_token_ids(token_ids, self.model, "token_ids")
            return self.tokenizer.decode(token_ids)

        return pb.DetokenizeResponse(text=await self.off_loop(decode, call))

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        model = pb.Model(
            id=self.model.name,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            capabilities=["generate"] if self._encoding is None else ["generate", "chat"],
            build=build(
                self.model, self.tokenizer, "" if self._encoding is None else PROMPT_ENCODING
            ),
        )
        if self.model.eos_token_id is not None:
            model.eos_token_id = self.model.eos_token_id
        return pb.ListModelsResponse(models=[model])

    async def admitted(self, admit: Callable[[], Admitted]) -> Admitted:
        """Let a request run by `Admission`.

        Raises:
            Unavailable: there is no room, as those who have it lack a worker.
            RequestError, InvalidArgument: see `Admission.admit`.
        """
        try:
            return admit()
        except RequestError as error:
            if error.reason == QUEUE_FULL and (missing := await self._router.why_not_ready()):
                raise missing from None
            raise

    async def off_loop(self, work: Callable[[], T], call: Call) -> T:
        """Run tokenizer work beside the loop; see `Reading.run`."""
        return await self._reading.run(work, _remaining_s(call))


def _generated(message: pb.ResumeResponse) -> pb.GenerateResponse:
    return message.generate


def _chatted(message: pb.ResumeResponse) -> pb.ChatResponse:
    return message.chat


def _remaining_s(call: Call) -> float | None:
    """Seconds until its deadline; None for none."""
    return None if call.deadline is None else call.deadline - time.time()


def expiry(now: float, deadline: float | None) -> float:
    """From when on a cancelled call counts as late, since its client's deadline has passed.

    Args:
        now: when the call arrived, seconds since the epoch.
        deadline: the server's copy of the client's, likewise; None for none.
    """
    if deadline is None:
        return math.inf
    return deadline - DEADLINE_ROUNDING * (deadline - now) - TRANSIT_S


def _outcome(error: BaseException, late_from: float) -> ErrorCode:
    """The code to count a failed stream under."""
    if isinstance(error, RipresaError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return ErrorCode.DEADLINE_EXCEEDED if time.time() >= late_from else ErrorCode.CANCELLED
    return ErrorCode.INTERNAL
