"""When has an HTTP client gone? When ASGI says so, or when what carries its messages here fails.

Serve's proxy hands a request's messages on by a Ray call, which it gives up with its client: then
that call may fail before it can say that the client has gone.
"""

from __future__ import annotations

import logging

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

GONE: Message = {"type": "http.disconnect"}


class Disconnects:
    """Tells a request whose messages cannot come any more that its client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_gone = False

        async def until_gone() -> Message:
            nonlocal is_gone
            # Whoever has failed once may never answer again.
            if is_gone:
                return GONE
            try:
                return await receive()
            except RayError as error:
                log.debug("a client has gone: %s", error)
                is_gone = True
                return GONE

        await self._app(scope, until_gone, send)
