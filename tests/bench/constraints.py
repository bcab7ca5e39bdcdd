"""What does it cost to keep answers to grammars: compiling one, and a mask a token?

    python tests/bench/constraints.py [--tokenizer DIR]

Every answer is drawn evenly from what is allowed. Beside the demo model's vocabulary stands one of
the released model's size: a folder's `tokenizer.json`, or the demo's tokens and their pairs.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from machine import print_header
from measurement import verdict

from ripresa.cluster.gateway.call_grammar import Tool, calls_rules
from ripresa.cluster.gateway.output_format import json_rule, regex_rule
from ripresa.workers.demo.checkpoint import DEMO_MODEL
from ripresa.workers.grammar import Grammars
from ripresa.workers.models.vocabulary import Vocabulary, read_vocabulary
from ripresa.workers.request import OutputConstraint

RELEASED_SIZE = 129_280
NUM_ANSWERS = 8
NUM_TOKENS = 60
FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "filters": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "field": {"enum": ["name", "date", "size"]},
                    "value": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                },
                "required": ["field", "value"],
                "additionalProperties": False,
            },
        },
        "page": FLAT,
    },
    "required": ["query", "filters", "page"],
    "additionalProperties": False,
}


def grammars(mark: int) -> dict[str, str]:
    """What is asked for, by name; `mark` is the token id of `｜DSML｜`."""
    tools = [Tool(f"tool_{n}", NESTED, True, "tools") for n in range(16)]
    dates = r"[A-Z][a-z]+( [A-Z][a-z]+){0,5}, (19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
    return {
        "flat schema": f"start: {json_rule(FLAT, '', is_strict=True)}\n",
        "nested schema": f"start: {json_rule(NESTED, '', is_strict=True)}\n",
        "regex": f"start: {regex_rule(dates, '')}\n",
        "16 nested tools": f"start: calls\n{calls_rules(tools, mark, is_single=False)}",
    }


def of_released_size(demo: Vocabulary) -> Vocabulary:
    """The demo's tokens, and pairs of them, as many as the released model has."""
    plain = [b for n, b in enumerate(demo.bytes_of) if b and n not in demo.special_ids]
    pairs = (one + other for one, other in itertools.product(plain, plain))
    more = itertools.islice(pairs, RELEASED_SIZE - len(demo.bytes_of))
    return Vocabulary((*demo.bytes_of, *more), demo.special_ids, demo.eos_token_id)


def measure(vocabulary: Vocabulary) -> float:
    """Print the costs for one vocabulary; the mean microseconds of a mask."""
    mark = vocabulary.bytes_of.index("｜DSML｜".encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compiler = Grammars(lambda: vocabulary)
    began = time.perf_counter()
    compiler.matcher(OutputConstraint('start: "a"', ""))
    print(f"{len(vocabulary.bytes_of):,} tokens: {time.perf_counter() - began:.3f} s to prepare")
    rng = np.random.default_rng(0)
    everything: list[float] = []
    for name, text in grammars(mark).items():
        constraint = OutputConstraint(text, "")
        began = time.perf_counter()
        compiler.matcher(constraint)
        compile_s = time.perf_counter() - began
        began = time.perf_counter()
        compiler.matcher(constraint)
        again_s = time.perf_counter() - began
        masks = [s for _ in range(NUM_ANSWERS) for s in answer(compiler, constraint, rng)]
        everything += masks
        mean, slow = 1e6 * np.mean(masks), 1e6 * np.percentile(masks, 99)
        print(
            f"  {name:<16} compiled in {1e3 * compile_s:.1f} ms, kept {1e3 * again_s:.2f} ms; "
            f"mask {mean:.0f} us, one of a hundred {slow:.0f} us"
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"  memory grew by {grown / 1024:.0f} MB at most", flush=True)
    return float(1e6 * np.mean(everything))


def answer(
    compiler: Grammars, constraint: OutputConstraint, rng: np.random.Generator
) -> list[float]:
    """Seconds that each mask of one answer took, the token before it taken in."""
    matcher = compiler.matcher(constraint)
    seconds = []
    said: list[int] = []
    for _ in range(NUM_TOKENS):
        began = time.perf_counter()
        matcher.follow(said)
        mask = matcher.mask()
        seconds.append(time.perf_counter() - began)
        token_id = int(rng.choice(np.flatnonzero(mask)))
        if token_id == 1:
            break
        said = [token_id]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="A folder with the released tokenizer.json.")
    options = parser.parse_args()
    print_header(__file__)
    demo = read_vocabulary(DEMO_MODEL, 4096, 1)
    small = measure(demo)
    if options.tokenizer is not None:
        large = measure(read_vocabulary(options.tokenizer, RELEASED_SIZE, 1))
    else:
        large = measure(of_released_size(demo))
    return verdict("large / small vocabulary", large / small, 20.0, at_most=True)


if __name__ == "__main__":
    sys.exit(main())
