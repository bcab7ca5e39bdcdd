"""What does the gateway do for each call? The Inference service without any server around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from ripresa.cluster.gateway.responses import Responses, build
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.cluster.gateway.validation import (
    ServedModel,
    check_model,
    check_token_ids,
    read_prompt,
)
from ripresa.cluster.observability.metrics import GatewayMetrics, RequestRecord, RequestState
from ripresa.cluster.routing.prompt import Placed, Planned, PromptRequest, Router, RouterEvent
from ripresa.protos import ripresa_pb2 as pb
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.replay import TailVariant
from ripresa.workers.request import Finished, Tokens


@dataclass(frozen=True, slots=True)
class Call:
    """What a server knows of one call beside the message.

    Attributes:
        request_id: the client's, or one that the server made.
        deadline: seconds since the epoch; None for none.
    """

    request_id: str
    deadline: float | None = None


class InferenceService:
    """Validates, routes, streams. Lives on one event loop.

    Args:
        router: runs prompts; nothing invalid reaches it.
        default_tail: tail variant of requests that name none.
        max_running: most requests at once; one more is refused with RESOURCE_EXHAUSTED.
        transfer_backend: what moves state between workers, for the metrics.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        router: Router,
        model: ServedModel,
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        *,
        default_tail: TailVariant = TailVariant.FLOORED,
        max_running: int = 1024,
        transfer_backend: str = "gloo",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._model = model
        self._tokenizer = tokenizer
        self.metrics = metrics
        self._default_tail = default_tail
        self._max_running = max_running
        self._transfer_backend = transfer_backend
        self._clock = clock
        self._running: set[str] = set()
        self._draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def ready(self) -> bool:
        """Whether new requests should come here."""
        return not self._draining and await self._router.ready()

    def start_draining(self) -> None:
        """From now on say "not ready"; requests that still arrive are served."""
        self._draining = True

    async def generate(
        self, request: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream one answer. However the stream ends, the router's generator is closed.

        Raises:
            RipresaError: the request is refused or failed; nothing follows.
        """
        received = self._clock()
        try:
            # In a thread: a long text keeps the tokenizer busy longer than a token takes.
            prompt = await asyncio.to_thread(
                read_prompt,
                request,
                self._model,
                self._tokenizer,
                request_id=call.request_id,
                deadline=call.deadline,
                default_tail=self._default_tail,
            )
            self._admit(prompt.request_id)
        except RipresaError as error:
            self.metrics.request_rejected(error.code)
            raise
        responses = Responses(
            prompt,
            self._model,
            self._tokenizer,
            return_token_ids=request.return_token_ids,
            clock=self._clock,
            received=received,
        )
        record = self.metrics.request_started(len(prompt.token_ids))
        try:
            async with (
                aclosing(self._router.generate(prompt)) as events,
                aclosing(self._stream(events, responses, record)) as stream,
            ):
                async for response in stream:
                    yield response
        except BaseException as error:
            if record.state is not RequestState.ENDED:
                record.failed(_outcome(error, prompt))
            raise
        finally:
            self._running.discard(prompt.request_id)

    async def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id", "name the request to end")
        return pb.AbortResponse(found=await self._router.abort(request.request_id))

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        check_model(request.model, self._model, "model")
        match request.WhichOneof("input"):
            case None:
                raise InvalidArgument("input", "give `text`")
            case "conversation":
                raise InvalidArgument("conversation", "`conversation` is not supported yet")
        token_ids = await asyncio.to_thread(self._tokenizer.encode, request.text)
        return pb.TokenizeResponse(
            token_ids=token_ids, prompt=request.text, max_model_len=self._model.max_model_len
        )

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        check_model(request.model, self._model, "model")
        token_ids = tuple(request.token_ids)
        check_token_ids(token_ids, self._model, "token_ids")
        return pb.DetokenizeResponse(text=self._tokenizer.decode(token_ids))

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        model = pb.Model(
            id=self._model.name,
            max_model_len=self._model.max_model_len,
            vocab_size=self._model.vocab_size,
            capabilities=["generate"],
            build=build(self._model, self._tokenizer),
        )
        if self._model.eos_token_id is not None:
            model.eos_token_id = self._model.eos_token_id
        return pb.ListModelsResponse(models=[model])

    def _admit(self, request_id: str) -> None:
        if request_id in self._running:
            raise RequestError(
                ErrorCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                "a request with this id is running; use another id or none",
                field="options.request_id",
            )
        if len(self._running) >= self._max_running:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"{self._max_running} requests are running (gateway.max_running); try again",
                retry_after_s=1.0,
            )
        self._running.add(request_id)

    async def _stream(
        self,
        events: AsyncGenerator[RouterEvent],
        responses: Responses,
        record: RequestRecord,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        backend: str | None = None
        async for event in events:
            match event:
                case Placed():
                    record.running()
                    backend = self._transfer_backend if event.encoder_id is not None else None
                    responses.placed(event)
                    if event.recipe is not None:
                        record.planned(event.recipe)
                        yield responses.started(event.recipe)
                case Planned():
                    record.planned(event.recipe)
                    yield responses.started(event.recipe)
                case Tokens():
                    record.delta(len(event.token_ids))
                    delta = responses.delta(event)
                    if delta is not None:
                        yield delta
                case Finished():
                    last = responses.finished(event)
                    record.finished(event.reason, event.counters, backend=backend)
                    for response in last:
                        yield response
                    return
        raise RipresaError(ErrorCode.INTERNAL, "the router's stream ended without a finish")


def _outcome(error: BaseException, prompt: PromptRequest) -> ErrorCode:
    """The code to count a failed stream under."""
    if isinstance(error, RipresaError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        late = prompt.deadline is not None and time.time() >= prompt.deadline
        return ErrorCode.DEADLINE_EXCEEDED if late else ErrorCode.CANCELLED
    return ErrorCode.INTERNAL
