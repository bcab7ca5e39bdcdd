"""How does a gateway in a test meet a real model? A router of one decode engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ripresa.cluster.routing.prompt import Placed, PromptRequest, RouterEvent
from ripresa.workers.decode_engine import DecodeEngine
from ripresa.workers.errors import ErrorCode, RipresaError
from ripresa.workers.request import (
    Failed,
    Finished,
    GenerationRequest,
    PrefillDone,
    Reserved,
    Tokens,
)


class EngineRouter:
    """Every prompt runs on one engine that prefills by itself."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine

    async def generate(self, prompt: PromptRequest) -> AsyncGenerator[RouterEvent]:
        request = GenerationRequest(
            request_id=prompt.request_id,
            generation=0,
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            recipe=None,
            sampling=prompt.sampling,
            deadline=prompt.deadline,
            tail=prompt.tail,
            cache=prompt.cache,
            tenant_salt=prompt.tenant_salt,
            session_id=prompt.session_id,
            expect_next_within_s=prompt.expect_next_within_s,
        )
        async with aclosing(self._engine.generate(request, local=True)) as events:
            async for event in events:
                match event:
                    case Reserved():
                        reason = "the only one"
                        yield Placed(event.worker_id, None, event.recipe, reason, event.prefix)
                    case Tokens() | Finished():
                        yield event
                    case Failed():
                        raise event.error
                    case PrefillDone():
                        pass

    async def abort(self, request_id: str) -> bool:
        return self._engine.abort(request_id)

    def called(self, request_id: str, tools: Sequence[str]) -> None:
        self._engine.lease(request_id, tools)

    async def end_session(self, tenant_salt: bytes, session_id: str) -> None:
        self._engine.end_session(tenant_salt, session_id)

    def explain(self, request_id: str) -> list[str]:
        raise RipresaError(ErrorCode.NOT_FOUND, "not remembered", field="request_id")

    async def num_held_tokens(self, token_ids: Sequence[int], tenant_salt: bytes) -> int:
        return 0

    async def why_not_ready(self) -> None:
        return None
