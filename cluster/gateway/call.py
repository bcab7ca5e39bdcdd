"""What does a server know of one call beside its message?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ripresa.cluster.gateway.validation import scoped_id
from ripresa.cluster.routing.prompt import Hold


@dataclass(frozen=True, slots=True)
class Call:
    """What a server knows of one call beside the message.

    Attributes:
        request_id: the client's, or one that the server made.
        deadline: seconds since the epoch; None for none.
        tenant: whose it is; empty where there are no tenants.
        id_field, choices_field: where in the call a client names it, and asks for several choices;
            for refusals.
        hold: what the end of its stream means.
    """

    request_id: str
    deadline: float | None = None
    tenant: str = ""
    id_field: str = "options.request_id"
    choices_field: str = "sampling.n"
    hold: Hold = field(default_factory=Hold, compare=False)

    @property
    def scoped_id(self) -> str:
        """Its id behind the gateway."""
        return scoped_id(self.tenant, self.request_id)
