"""A gateway that chats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_thread import GatewayThread, gateway_thread

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer


@pytest.fixture
def chatting(
    chat_model: ServedModel, demo: Tokenizer, encoding: ChatEncoding
) -> Iterator[GatewayThread]:
    with gateway_thread(chat_model, demo, encoding=encoding) as running:
        yield running
