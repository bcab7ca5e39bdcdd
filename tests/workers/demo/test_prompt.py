"""Does the real agent prompt kept for tests fit the demo model, with room for an answer?"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.demo.checkpoint import DEMO_MODEL

CALL = Path(__file__).parents[2] / "data" / "miniswe_call.json"


def test_the_prompt_fits_and_survives_the_tokenizer() -> None:
    call = json.loads(CALL.read_text(encoding="utf-8"))
    config = json.loads((DEMO_MODEL / "config.json").read_text())["text_config"]
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = tokenizer.encode(call["input"]).ids
    assert len(ids) == 2989
    assert len(ids) > 2 * config["sliding_window"]
    assert len(ids) + 1024 <= config["max_position_embeddings"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == call["input"]
