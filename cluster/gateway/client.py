"""How does a client call the gateway, so that a gateway's restart does not show?

Plain values in and out; gRPC and its messages stay behind this file. Statuses come back as the
`RipresaError`s that the server raised.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from ripresa.cluster.gateway.recorder import Recorder
from ripresa.cluster.gateway.status import STATUS
from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError, Unavailable
from ripresa.workers.replay import TailVariant

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "ripresa.v1.Inference"}],
            "waitForReady": True,
            # Before the first message of an answer only: a started stream is never repeated.
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
"""The client policy: wait for a connection, and retry what a restarting gateway answers."""

_CODE_OF = {wire.grpc: code for code, wire in STATUS.items()}


@dataclass(frozen=True, slots=True)
class Began:
    """The prompt is placed. `cached_tokens` of its `prompt_tokens` were not computed again."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    worker_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of the answer."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete. `reason` is `stop` or `length`; times are the gateway's, in s."""

    reason: str
    completion_tokens: int
    time_to_first_token_s: float
    decode_s: float


Answer = Began | Piece | Ended


class Client:
    """A connection to a gateway; use it in a `with` block.

    Args:
        address: `host:port` of a gateway.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = open_channel(address)
        self._stub = ripresa_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def wait_until_connected(self, timeout_s: float) -> None:
        """Return once a gateway answers at the address.

        Raises:
            Unavailable: none did in time.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout_s)
        except grpc.FutureTimeoutError as error:
            raise Unavailable(
                f"no gateway answers at {self._address}; start one with `ripresa serve`, "
                "or name another with --address"
            ) from error

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, object],
        tail: TailVariant | None = None,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        recorder: Recorder | None = None,
    ) -> Generator[Answer]:
        """Stream an answer: `Began`, pieces, `Ended`. Closing the iterator cancels the request.

        Args:
            prompt: plain text, or token ids.
            sampling: fields of the wire's `SamplingParams`; absent ones get the server's default.
            timeout_s: deadline of the whole call.
            recorder: hears the whole call.

        Raises:
            RipresaError: the server refused or failed the request.
        """
        request = _request(prompt, sampling, tail, model, request_id)
        call = self._stub.Generate(request, timeout=timeout_s)
        responses: Iterable[pb.GenerateResponse] = call
        if recorder is not None:
            recorder.sent(request)
            responses = _heard(call, recorder)
        try:
            yield from _answers(responses)
        except grpc.RpcError as error:
            raise to_ripresa_error(error) from error
        finally:
            call.cancel()

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids that the server makes of a plain text.

        Raises:
            RipresaError: the server refused it.
        """
        try:
            return tuple(self._stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)
        except grpc.RpcError as error:
            raise to_ripresa_error(error) from error


def open_channel(address: str) -> grpc.Channel:
    """A channel with the client policy."""
    return grpc.insecure_channel(
        address,
        options=[("grpc.service_config", json.dumps(SERVICE_CONFIG)), ("grpc.enable_retries", 1)],
    )


def to_ripresa_error(error: grpc.RpcError) -> RipresaError:
    """The error that the server meant, its field and retry hint included."""
    if not isinstance(error, grpc.Call):
        return RipresaError(ErrorCode.INTERNAL, f"the call failed without a status: {error}")
    code = _CODE_OF.get(error.code(), ErrorCode.INTERNAL)
    message, field, retry_after_s = error.details() or error.code().name, None, None
    status = rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
            message = bad.field_violations[0].description
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return RipresaError(code, message, field=field, retry_after_s=retry_after_s)


def _request(
    prompt: str | Sequence[int],
    sampling: Mapping[str, object],
    tail: TailVariant | None,
    model: str,
    request_id: str,
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(return_token_ids=True)
    request.options.model = model
    request.options.request_id = request_id
    if tail is not None:
        request.options.cache_policy.tail = pb.TailVariant.Value(f"TAIL_VARIANT_{tail.name}")
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    except (ValueError, TypeError) as error:
        raise InvalidArgument("prompt", f"cannot be sent: {error}") from error
    try:
        request.sampling.MergeFrom(pb.SamplingParams(**sampling))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise InvalidArgument("sampling", f"cannot be sent: {error}") from error
    return request


def _heard(
    responses: Iterable[pb.GenerateResponse], recorder: Recorder
) -> Iterator[pb.GenerateResponse]:
    for response in responses:
        recorder.received(response)
        yield response


def _answers(responses: Iterable[pb.GenerateResponse]) -> Iterator[Answer]:
    reason = pb.FINISH_REASON_UNSPECIFIED
    for response in responses:
        match response.WhichOneof("event"):
            case "started":
                started = response.started
                yield Began(
                    started.request_id,
                    started.prompt_tokens,
                    started.cached_tokens,
                    started.worker_id,
                    started.seed,
                )
            case "delta":
                yield Piece(response.delta.text, tuple(response.delta.token_ids))
            case "finished":
                reason = response.finished.reason
            case "completed":
                timings = response.completed.timings
                yield Ended(
                    pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower(),
                    response.completed.usage.completion_tokens,
                    timings.time_to_first_token.ToTimedelta().total_seconds(),
                    timings.decode.ToTimedelta().total_seconds(),
                )
                return
    raise Unavailable("the stream ended before the answer was complete")
