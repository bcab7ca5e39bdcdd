"""Does every endpoint do what `/openapi.json` says of it? Schemathesis asks, in and out of bounds.

Only refusals are checked against the requests' schemas: what messages and tools hold follows rules
of the conversation, which answer 400 to requests of the right shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from chat_gateway import ChatGateway
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from ripresa.cluster.gateway.http_server import http_app
from ripresa.cluster.gateway.service import InferenceService

NUM_EXAMPLES, NUM_LONG_EXAMPLES = 20, 400


def _none_yet() -> InferenceService:
    raise AssertionError("the document alone needs no service")


@pytest.fixture(scope="module")
def gateway() -> Iterator[ChatGateway]:
    gateway = ChatGateway()
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def document(gateway: ChatGateway) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", gateway.app)


PATHS = [
    (path, method)
    for path, methods in http_app(_none_yet).openapi()["paths"].items()
    for method in methods
]


def check(gateway: ChatGateway, case: schemathesis.Case) -> None:
    """Status, content type, headers and body are documented; what breaks the schema is refused."""
    response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
    assert response.headers["x-request-id"]
    assert b'"server_error"' not in response.content
    assert gateway.service.num_running == 0
    assert not gateway.router.open


def send(document: Any, gateway: ChatGateway, path: str, method: str, count: int) -> None:
    """Requests that fit the document, and such that do not where there is anything to break."""
    operation = document[path][method]
    for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):

        @settings(max_examples=count, deadline=None, suppress_health_check=[*HealthCheck])
        @given(operation.as_strategy(generation_mode=mode))
        def one(case: schemathesis.Case) -> None:
            check(gateway, case)

        one()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), PATHS)
def test_endpoints_do_what_they_say(
    document: Any, gateway: ChatGateway, path: str, method: str
) -> None:
    send(document, gateway, path, method, NUM_EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(("path", "method"), PATHS)
def test_endpoints_do_what_they_say_at_length(
    document: Any, gateway: ChatGateway, path: str, method: str
) -> None:
    send(document, gateway, path, method, NUM_LONG_EXAMPLES)
