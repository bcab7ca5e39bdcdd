"""How is a stream told on that another gateway began? From its first event, the known part unheard.

find its origin ──▶ read the request again ──▶ follow its events ──▶ tell from `next_sequence` on
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ripresa.cluster.gateway.admission import Admission
from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.chat_encoding import PROMPT_ENCODING, Protocol
from ripresa.cluster.gateway.chat_messages import chat_body
from ripresa.cluster.gateway.chat_prompt import AskedChat
from ripresa.cluster.gateway.run import ResumedBooks, Run
from ripresa.cluster.gateway.sessions import HeardAnswers
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.stream_facts import StreamFacts
from ripresa.cluster.gateway.stream_origin import ResumedRequest, read_id, resumed_request
from ripresa.cluster.gateway.told_stream import Teller, told
from ripresa.cluster.gateway.validation import AskedText
from ripresa.cluster.routing.prompt import Hold, Router
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError

if TYPE_CHECKING:
    from ripresa.cluster.gateway.service import InferenceService

R = TypeVar("R", pb.GenerateResponse, pb.ChatResponse)


class ResumedStreams:
    """Tells streams of other gateways on.

    Args:
        service: how it reads requests and tells streams of its own.
        window: W, tokens in a block.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        service: InferenceService,
        router: Router,
        admission: Admission,
        window: int,
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._router = router
        self._admission = admission
        self._window = window
        self._clock = clock

    async def resume(
        self, request: pb.ResumeRequest, call: Call
    ) -> AsyncGenerator[pb.ResumeResponse]:
        """See `InferenceService.resume`."""
        service = self._service
        resumed = await self._find(request, call.tenant)
        origin = resumed.origin
        if isinstance(origin.request, pb.GenerateRequest):
            asked_text = AskedText(resumed.prompts, tuple(origin.request.sampling.stop))
            tell = partial(service.text_teller, origin.request.return_token_ids, asked_text)
            async with aclosing(self._told(request, resumed, tell, "", call.hold)) as texts:
                async for text in texts:
                    yield pb.ResumeResponse(generate=text)
            return
        asked = await service.off_loop(partial(self._reread, origin.request, resumed), call)
        heard = HeardAnswers()
        tell_chat = partial(service.chat_teller, origin.request.return_token_ids, heard, asked)
        stream = self._told(request, resumed, tell_chat, PROMPT_ENCODING, call.hold, heard)
        async with aclosing(stream) as chats:
            async for chat in chats:
                yield pb.ResumeResponse(chat=chat)

    async def _find(self, request: pb.ResumeRequest, tenant: str) -> ResumedRequest:
        """The request of the tenant's stream that is to be resumed."""
        stream_id, worker_id = read_id(request.stream_id)
        try:
            kept = await self._router.find_stream(stream_id, worker_id)
        except RipresaError as error:
            raise _lost(f"the stream cannot be resumed: {error}") from error
        resumed = None if kept is None else resumed_request(kept)
        if resumed is None or resumed.origin.tenant != tenant:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                "STREAM_NOT_FOUND",
                "no such stream is kept; its tokens stay for a while after its end "
                "(decoders.keep_streams_s), then send the request again",
                field="stream_id",
                resource=("stream", request.stream_id),
            )
        return resumed

    def _reread(self, request: pb.ChatRequest, resumed: ResumedRequest) -> AskedChat:
        body, protocol = chat_body(request), Protocol.CHAT_COMPLETIONS
        open_turn = resumed.origin.open_turn
        return self._service.chat_reader().reread(body, protocol, resumed.prompts, open_turn)

    async def _told(
        self,
        request: pb.ResumeRequest,
        resumed: ResumedRequest,
        tell: Callable[[StreamFacts], Teller[R]],
        encoding: str,
        hold: Hold,
        heard: HeardAnswers | None = None,
    ) -> AsyncGenerator[R]:
        """The stream's messages from `next_sequence` on."""
        origin = resumed.origin
        prompts = tuple(replace(prompt, hold=hold) for prompt in resumed.prompts)
        num_told = 0

        def caught_up(is_lost: bool, *, is_over: bool = False) -> None:
            if request.next_sequence < num_told + (not is_over):
                return
            # The stream goes on for whoever asks better.
            hold.ends_work = False
            if is_lost:
                raise _lost("a part of the stream is lost with its decode worker")
            if is_over:
                raise InvalidArgument(
                    "next_sequence",
                    f"the stream is complete: number {num_told - 1} is its last message",
                )
            raise InvalidArgument(
                "next_sequence",
                f"the stream has {num_told} messages yet; ask for one that has not come, of which "
                f"the first is {num_told}",
            )

        admit = partial(self._admission.resume, len(prompts), origin.tenant)
        admitted = await self._service.admitted(admit)
        try:
            facts = StreamFacts(
                prompts,
                self._service.model,
                self._service.tokenizer,
                request_id=origin.request_id,
                window=self._window,
                encoding=encoding,
                clock=self._clock,
                received=None,
                start_time=origin.start_time,
            )
            books = ResumedBooks(caught_up, admitted.meter)
            run = Run(self._router.resume, prompts, books)
            stream: AsyncGenerator[Any] = told(run, facts, tell(facts))
            if heard is not None:
                stream = self._service.kept(stream, origin.place, heard)
            async with aclosing(stream) as messages:
                async for message in messages:
                    num_told = message.sequence + 1
                    is_new = message.sequence >= request.next_sequence
                    books.told(is_new=is_new)
                    if is_new:
                        yield message
            caught_up(is_lost=False, is_over=True)
        finally:
            admitted.close()


def _lost(message: str) -> RequestError:
    return RequestError(
        ErrorCode.UNAVAILABLE,
        "WORKER_LOST",
        f"{message}; send the request again",
        retry_after_s=1.0,
        is_final=True,
    )
