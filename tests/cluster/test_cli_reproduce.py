"""Does the verb say whether an answer came out again, and refuse what it cannot compare?"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gateway_thread import GatewayThread

from ripresa.cluster.cli import FAILED, MISUSED, cli
from ripresa.workers.config import Numerics
from ripresa.workers.model_runner import load_runner, model_digest
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.weights import Half
from ripresa.workers.recording import Recording, read_recording
from ripresa.workers.replay import ReplayMode, TailVariant, cold_recipe
from ripresa.workers.reproduce import reproduce
from ripresa.workers.request import FinishReason, SamplingParams

FOLDER = (
    Path(__file__).resolve().parents[1] / "data" / "golden" / "case_g_plain_replay" / "checkpoint"
)


def ripresa(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """An answer of the golden checkpoint."""
    config = ModelConfig.from_file(FOLDER / "config.json")
    tokens = tuple(range(2, 42))
    asked = Recording(
        weights_digest=model_digest(FOLDER, config),
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        mode=ReplayMode.BOUNDED,
        recipe=cold_recipe(len(tokens), config.sliding_window, TailVariant.FLOORED, 0),
        output_ids=(),
        reason=FinishReason.LENGTH,
    )
    runner = load_runner(
        FOLDER, Half.ALL, num_blocks=16, num_slots=1, numerics=Numerics.DETERMINISTIC
    )
    return replace(asked, output_ids=asyncio.run(reproduce(asked, runner)).output_ids)


def test_help_teaches() -> None:
    result = ripresa("reproduce", "--help")
    assert result.exit_code == 0
    assert "  ripresa reproduce " in result.output


def test_an_equal_answer(recording: Recording, tmp_path: Path) -> None:
    recording.write(tmp_path / "answer.json")
    result = ripresa("reproduce", str(tmp_path / "answer.json"), "--model", str(FOLDER))
    assert result.exit_code == 0, result.output
    assert "prompt 40 tokens, plan cold from 0, 0 restarts, tail floored, seed 0" in result.stdout
    assert "equal: all 5 tokens, and the end" in result.stdout


def test_another_answer(recording: Recording, tmp_path: Path) -> None:
    output = (*recording.output_ids[:2], recording.output_ids[2] ^ 1, *recording.output_ids[3:])
    replace(recording, output_ids=output).write(tmp_path / "answer.json")
    result = ripresa("reproduce", str(tmp_path / "answer.json"), "--model", str(FOLDER))
    assert result.exit_code == FAILED
    assert f"DIFFERENT: token 2 was {output[2]} (logit " in result.stdout
    assert f"and is now {recording.output_ids[2]} (logit " in result.stdout


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"weights_digest": "0"}, FAILED, "name the checkpoint that was served"),
        ({"token_ids": ()}, MISUSED, "the prompt is empty"),
        (
            {"recipe": replace(cold_recipe(40, 8, TailVariant.FLOORED, 0), restarts=(8,))},
            MISUSED,
            "use the file as `ripresa generate --record` wrote it, or record again",
        ),
    ],
)
def test_refusals(
    recording: Recording, tmp_path: Path, change: dict[str, object], code: int, words: str
) -> None:
    replace(recording, **change).write(tmp_path / "answer.json")  # type: ignore[arg-type]
    result = ripresa("reproduce", str(tmp_path / "answer.json"), "--model", str(FOLDER))
    assert result.exit_code == code
    assert words in result.stderr


def test_no_recording(tmp_path: Path) -> None:
    result = ripresa("reproduce", str(tmp_path / "nothing.json"))
    assert result.exit_code == MISUSED
    assert "cannot be read" in result.stderr


def test_generate_records(gateway: GatewayThread, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    result = ripresa(
        *("generate", "--address", gateway.address, "--prompt", "hi", "--max-tokens", "2"),
        *("--record", str(path)),
    )
    assert result.exit_code == 0, result.output
    recording = read_recording(path)
    (seen,) = gateway.router.seen
    assert recording.token_ids == seen.token_ids
    assert len(recording.output_ids) == recording.sampling.max_tokens == 2
