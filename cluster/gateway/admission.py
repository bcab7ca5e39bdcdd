"""Which requests may run in this gateway? As many as it has room for, and their tenants may."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ripresa.cluster.gateway.call import Call
from ripresa.cluster.gateway.quotas import Meter, Quotas
from ripresa.cluster.gateway.status import RequestError
from ripresa.cluster.routing.prompt import PromptRequest
from ripresa.workers.errors import ErrorCode, InvalidArgument

QUEUE_FULL = "QUEUE_FULL"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that counts as running until `close`.

    Attributes:
        meter: what its tenant is charged with; None where there are no tenants.
    """

    meter: Meter | None
    leave: Callable[[], object]

    def close(self) -> None:
        self.leave()
        if self.meter is not None:
            self.meter.close()


class Admission:
    """The running requests of one gateway.

    Args:
        model: what is served.
        max_running: most choices at once.
        quotas: what tenants may have; None where there are none.
    """

    def __init__(self, model: str, max_running: int, quotas: Quotas | None) -> None:
        self._model = model
        self._max_running = max_running
        self._quotas = quotas
        self._running: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        """Choices of running requests."""
        return sum(self._running.values())

    def admit(self, prompts: Sequence[PromptRequest], call: Call) -> Admitted:
        """Let a new request run.

        Args:
            prompts: one for each choice.

        Raises:
            RequestError: ALREADY_EXISTS, RESOURCE_EXHAUSTED, or PERMISSION_DENIED.
            InvalidArgument: more choices than may ever run at once.
        """
        first, num_choices = prompts[0], len(prompts)
        if first.request_id in self._running:
            raise RequestError(
                ErrorCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                "a request with this id is running; use another id or none",
                field=call.id_field,
            )
        self._check_room(num_choices, call.choices_field)
        meter = None
        if self._quotas is not None:
            num_tokens = len(first.token_ids)
            meter = self._quotas.admit(
                call.tenant, self._model, num_choices, num_tokens, call.choices_field
            )
        return self._enter(first.request_id, num_choices, meter)

    def resume(self, num_choices: int, tenant: str) -> Admitted:
        """Let a request go on that was admitted elsewhere.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, or PERMISSION_DENIED.
        """
        name = f"resumed {uuid.uuid4().hex}"
        self._check_room(num_choices, "stream_id")
        meter = None if self._quotas is None else self._quotas.resume(tenant, num_choices)
        return self._enter(name, num_choices, meter)

    def _enter(self, name: str, num_choices: int, meter: Meter | None) -> Admitted:
        self._running[name] = num_choices
        return Admitted(meter, lambda: self._running.pop(name))

    def _check_room(self, num_choices: int, field: str) -> None:
        if num_choices > self._max_running:
            raise InvalidArgument(
                field,
                f"asks for {num_choices} choices, and at most {self._max_running} may run at once "
                "(gateway.max_running); ask for fewer",
            )
        if self.num_running + num_choices > self._max_running:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                QUEUE_FULL,
                f"{self.num_running} requests are running and {self._max_running} may "
                "(gateway.max_running; each choice counts); try again",
                retry_after_s=1.0,
                quota_subject="gateway.max_running",
            )
