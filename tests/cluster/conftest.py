"""A tiny tokenizer and the model that a gateway says it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_thread import GatewayThread, gateway_thread
from tokenizers import Tokenizer as TokenizerModel
from tokenizers import decoders, models, pre_tokenizers, trainers

from ripresa.cluster.gateway.chat_encoding import ChatEncoding
from ripresa.cluster.gateway.served_model import ServedModel
from ripresa.cluster.gateway.tokenizer import Tokenizer
from ripresa.workers.demo.checkpoint import DEMO_MODEL

SPECIALS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>")
CORPUS = ("the quick brown fox jumps over the lazy dog", "héllo wörld, 日本語 ok?", "0 1 2 3 4")


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TokenizerModel(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> Tokenizer:
    return Tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The bundled model's tokenizer, which has every special token of the chat encoding."""
    return Tokenizer(DEMO_MODEL / "tokenizer.json")


@pytest.fixture(scope="session")
def encoding(demo: Tokenizer) -> ChatEncoding:
    return ChatEncoding(demo, DEMO_MODEL / "tokenizer.json", "deepseek-demo")


@pytest.fixture(scope="session")
def chat_model(demo: Tokenizer) -> ServedModel:
    return ServedModel("deepseek-demo", 4096, demo.num_ids, eos_token_id=1, weights_digest="ab12")


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny",
        max_model_len=64,
        vocab_size=tokenizer.num_ids,
        eos_token_id=1,
        weights_digest="ab12",
    )


@pytest.fixture
def gateway(model: ServedModel, tokenizer: Tokenizer) -> Iterator[GatewayThread]:
    with gateway_thread(model, tokenizer) as running:
        yield running
