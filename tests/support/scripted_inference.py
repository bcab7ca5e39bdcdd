"""A gateway that breaks when it is told to: real gRPC servers over streams that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ripresa.protos import ripresa_pb2 as pb
from ripresa.protos import ripresa_pb2_grpc


@dataclass
class Script:
    """What the gateways do, and what they were asked.

    Attributes:
        responses: of the one stream that there is.
        breaks: after how many messages of its own each call breaks, first to last; later calls
            run to the end. A call that breaks does so without a word of the server.
        ends_early: a call that breaks ends with status OK instead.
        refusal: what a resume is answered with.
        asked: requests in order.
        metadata: of every call.
        ended: requests whose calls are over at the gateway.
        kill_after: the gateway that serves dies after so many messages of its first call.
    """

    responses: Sequence[Any]
    breaks: list[int] = field(default_factory=list)
    ends_early: bool = False
    refusal: tuple[grpc.StatusCode, str] | None = None
    asked: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    ended: Queue[Any] = field(default_factory=Queue)
    kill_after: int | None = None


def chat_script(stream_id: str = "stream-1") -> list[pb.ChatResponse]:
    """An answer with reasoning, content and a call."""
    call = pb.ToolCall(id="c1", name="get_weather", arguments_json='{"city": "Oslo"}')
    message = pb.Message(
        role=pb.ROLE_ASSISTANT,
        content="One moment.",
        reasoning_content="Look.",
        tool_calls=[call],
    )
    deltas = [
        pb.ChatDelta(reasoning="Look."),
        pb.ChatDelta(content="One "),
        pb.ChatDelta(content="moment."),
        pb.ChatDelta(tool_call=pb.ToolCallDelta(id="c1", name="get_weather")),
        pb.ChatDelta(tool_call=pb.ToolCallDelta(arguments_delta='{"city": ')),
        pb.ChatDelta(tool_call=pb.ToolCallDelta(arguments_delta='"Oslo"}', done=True)),
    ]
    started = pb.Started(request_id="r", stream_id=stream_id, prompt_tokens=9)
    finished = pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, message=message, turn_id="t1")
    completed = pb.Completed(usage=pb.Usage(prompt_tokens=9, completion_tokens=6))
    events = [
        pb.ChatResponse(started=started),
        *(pb.ChatResponse(delta=delta) for delta in deltas),
        pb.ChatResponse(finished=finished),
        pb.ChatResponse(completed=completed),
    ]
    for sequence, event in enumerate(events):
        event.sequence = sequence
    return events


class ScriptedInference(ripresa_pb2_grpc.InferenceServicer):
    """Streams a script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.is_to_die = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[Any]:
        return self._run(request, context, 0)

    def Chat(self, request: pb.ChatRequest, context: Any) -> Iterator[Any]:
        return self._run(request, context, 0)

    def Resume(self, request: pb.ResumeRequest, context: Any) -> Iterator[Any]:
        script = self._script
        if script.refusal is not None:
            script.asked.append(request)
            code, text = script.refusal
            status = status_pb2.Status(code=code.value[0], message=text)
            info = error_details_pb2.ErrorInfo(reason="STREAM_NOT_FOUND", domain="ripresa")
            status.details.add().Pack(info)
            context.abort_with_status(rpc_status.to_status(status))
        for response in self._run(request, context, request.next_sequence):
            is_chat = isinstance(response, pb.ChatResponse)
            yield (
                pb.ResumeResponse(chat=response)
                if is_chat
                else pb.ResumeResponse(generate=response)
            )

    def _run(self, request: Any, context: Any, start: int) -> Iterator[Any]:
        script = self._script
        script.asked.append(request)
        if not context.add_callback(lambda: script.ended.put(request)):
            script.ended.put(request)
        script.metadata.append(dict(context.invocation_metadata()))
        limit = script.breaks.pop(0) if script.breaks else None
        for count, response in enumerate(script.responses[start:]):
            if count == limit:
                if script.ends_early:
                    return
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if script.kill_after == count:
                script.kill_after = None
                self.is_to_die.set()
                done = threading.Event()
                context.add_callback(done.set)
                done.wait(30)
                return
            yield response


class ScriptedSessions(ripresa_pb2_grpc.SessionsServicer):
    """Opens, finds and closes whatever session it is asked for; its newest turn is `t7`."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.Session:
        self._script.asked.append(request)
        return pb.Session(session_id=request.session_id or "made-here")

    def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.Session:
        self._script.asked.append(request)
        return pb.Session(session_id=request.session_id, head_turn_id="t7")

    def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        self._script.asked.append(request)
        return pb.CloseSessionResponse()


@contextmanager
def scripted_gateways(script: Script, count: int = 1) -> Iterator[list[str]]:
    """Serve on so many ports while the body runs; gives their addresses."""
    with ExitStack() as stack:
        addresses = []
        for _ in range(count):
            servicer = ScriptedInference(script)
            server = grpc.server(ThreadPoolExecutor(4))
            ripresa_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
            ripresa_pb2_grpc.add_SessionsServicer_to_server(ScriptedSessions(script), server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            killer = threading.Thread(target=_stop_when_told, args=(server, servicer))
            killer.start()
            stack.callback(killer.join)
            stack.callback(servicer.is_to_die.set)
        yield addresses


def _stop_when_told(server: grpc.Server, servicer: ScriptedInference) -> None:
    servicer.is_to_die.wait()
    server.stop(0).wait()
