"""How the demo model's tokenizer.json is made: `python -m ripresa.workers.demo.build_tokenizer`.

A byte-level BPE of exactly 4,096 entries with the special-token spellings of DeepSeek-V4.1, digits
one by one. Its input is `corpus.txt.xz` (see CORPUS_LICENSE.txt) and the tool-loop text that
`tool_loops` writes, so the same file comes out on every machine.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from ripresa.workers.demo.checkpoint import DEMO_MODEL

VOCAB_SIZE = 4096
CORPUS = DEMO_MODEL / "corpus.txt.xz"
TOKENIZER = DEMO_MODEL / "tokenizer.json"
NUM_TOOL_LOOPS = 400
MAX_TOKEN_BYTES = 16  # keeps rules of dashes and table borders out of the vocabulary

CONTROL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
"""Ids 0, 1 and 2: never part of a text, left out by a decoder that skips special tokens."""

TEMPLATE_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜image｜>",
    "<｜deepseek_image｜>",
)
"""Ids from 3: the chat template's tokens. A decoder keeps them, as with the released tokenizer."""

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "zo")
FIELDS = ("code", "owner", "place", "color", "status", "path", "size")
TOOLS = ("get_record", "search_files", "read_file", "run_command", "list_entries", "calculate")


def corpus() -> str:
    """The committed prose and code that the merges are learnt from."""
    return lzma.decompress(CORPUS.read_bytes()).decode()


def tool_loops() -> Iterator[str]:
    """Assistant turns, tool calls and tool results around coined names, without special tokens.

    `random.Random.random` is the one method whose sequence Python keeps across versions.
    """
    rng = random.Random(41)

    def pick(options: tuple[str, ...]) -> str:
        return options[int(rng.random() * len(options))]

    for _ in range(NUM_TOOL_LOOPS):
        name = pick(SYLLABLES) + pick(SYLLABLES) + pick(("b", "k", "n", "r", "s"))
        tool, field, value = pick(TOOLS), pick(FIELDS), int(rng.random() * 1000)
        schema = {
            "name": tool,
            "description": f"Return the {field} of a record.",
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string"}, "limit": {"type": "integer"}},
                "required": [field],
            },
        }
        yield f'What is the {field} of "{name}"?'
        yield f"### Available Tool Schemas\n\n{json.dumps(schema)}\n"
        yield f'I need to call {tool} to find the {field} of "{name}".'
        yield "\n\n<"
        yield " calls>\n<"
        yield f' invoke name="{tool}">\n<'
        yield f' parameter name="{field}" string="true">{name}</'
        yield f' parameter name="limit" string="false">{value}</'
        yield " parameter>\n</"
        yield " invoke>\n</"
        yield " calls>"
        yield f"<tool_result>{json.dumps({'name': name, field: value, 'ok': True})}</tool_result>"
        yield f'The {field} of "{name}" is {value}.'


def build() -> str:
    """tokenizer.json, as text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, normalized=False) for text in CONTROL_TOKENS + TEMPLATE_TOKENS]
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus(), *tool_loops()], trainer)
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS  # the trainer marks all of them
    return json.dumps(description, ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo model's tokenizer.json.")
    parser.add_argument("--output", type=Path, default=TOKENIZER, help="file to write")
    output: Path = parser.parse_args().output
    output.write_text(build(), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
