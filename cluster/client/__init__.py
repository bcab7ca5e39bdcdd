"""The gRPC client for Python programs, blocking and asynchronous.

from ripresa.cluster.client import Client, tool, tool_result, user

with Client("127.0.0.1:9000") as client:
    answer = client.chat([user("Hello")], max_tokens=40).answer()
    print(answer.content, answer.usage)
"""

from ripresa.cluster.client.aio import AsyncClient, AsyncSession
from ripresa.cluster.client.client import Client, Session
from ripresa.cluster.client.errors import (
    CallError,
    CancelledError,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    NotAuthenticatedError,
    NotFoundError,
    NotPermittedError,
    OverloadedError,
    PreconditionError,
    ServerError,
    UnavailableError,
)
from ripresa.cluster.client.events import (
    Answer,
    Choice,
    Completed,
    Content,
    Event,
    Finished,
    Reasoning,
    Started,
    Text,
    Timings,
    Tokens,
    ToolCall,
    ToolCallPart,
    ToolCallReady,
    Usage,
)
from ripresa.cluster.client.requests import (
    Effort,
    Message,
    Options,
    Sampling,
    ToolDefinition,
    system,
    tool,
    tool_result,
    user,
)
from ripresa.cluster.client.streams import AsyncStream, Stream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "CallError",
    "CancelledError",
    "Choice",
    "Client",
    "Completed",
    "ConflictError",
    "Content",
    "DeadlineError",
    "Effort",
    "Event",
    "Finished",
    "InvalidRequestError",
    "Message",
    "NotAuthenticatedError",
    "NotFoundError",
    "NotPermittedError",
    "Options",
    "OverloadedError",
    "PreconditionError",
    "Reasoning",
    "Sampling",
    "ServerError",
    "Session",
    "Started",
    "Stream",
    "Text",
    "Timings",
    "Tokens",
    "ToolCall",
    "ToolCallPart",
    "ToolCallReady",
    "ToolDefinition",
    "UnavailableError",
    "Usage",
    "system",
    "tool",
    "tool_result",
    "user",
]
