"""Does `ripresa eval replay` measure, go on after a kill, write its page and refuse bad input?"""

from __future__ import annotations

import json
import lzma
import re
import shutil
import socket
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from tiny_model import tiny_checkpoint

from ripresa.cluster.cli import FAILED, MISUSED, cli
from ripresa.cluster.cli_eval import _command
from ripresa.cluster.evaluation.cases import cases_of, read_conversations
from ripresa.cluster.evaluation.experiments import DEPTHS, Experiment
from ripresa.cluster.evaluation.results_file import FILE as SAMPLES
from ripresa.cluster.evaluation.results_file import ResultsFile
from ripresa.cluster.training.rendering import Renderer
from ripresa.workers.demo.build_tokenizer import TOKENIZER
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.replay_query import ReplayGeometry

SETTINGS = {"model": "m", "limit": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads the demo model's tokens."""
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    tiny_checkpoint(folder, vocab_size=4096, engram_compressed_vocab_size=2964)
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    return folder


def ripresa(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["eval", "replay", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished evaluation, and its page beside it."""
    folder = tmp_path_factory.mktemp("finished")
    result = ripresa(
        *("--checkpoint", checkpoint, "--out", folder / "out", "--report", folder / "page.md"),
        *("--limit", 2, "--stacks", 1),
    )
    assert result.exit_code == 0, result.output
    assert "about" in result.stderr
    assert "min are left" in result.stderr
    return folder


def test_help_teaches() -> None:
    result = ripresa("--help")
    assert result.exit_code == 0
    assert "  ripresa eval replay --self-test" in result.output


def test_results_have_every_experiment(finished: Path) -> None:
    document = json.loads((finished / "out" / "results.json").read_text())
    assert {row["experiment"] for row in document["tokens"]} == {"answer", "hit", "stack"}
    assert {row["experiment"] for row in document["costs"]} == {"answer", "stack", "growth"}
    checks = {row["experiment"]: row for row in document["checks"]}
    assert set(checks) == {"answer", "hit", "stack"}
    for row in checks.values():
        assert row["worst"] == 0
        assert row["num_able"] == row["num_cases"] > 0
    for row in document["tokens"]:
        assert row["num_tokens"] > 0
        for estimate in row["measures"].values():
            assert estimate["low"] is estimate["high"] is None, "of two conversations"
            assert estimate["mean"] == estimate["mean"]
        if row["arm"] == "exact":
            assert row["measures"]["kl"]["mean"] == 0
    stacks = {row["arm"] for row in document["tokens"] if row["experiment"] == "stack"}
    assert stacks == {"exact", *(str(depth) for depth in DEPTHS)}


def test_the_page_says_how_many_conversations_were_used(finished: Path) -> None:
    facts = json.loads((finished / "out" / "results.json").read_text())["about"]["facts"]
    samples = [json.loads(line) for line in (finished / "out" / SAMPLES).open()]
    used = {s["number"] for s in samples if s.get("experiment") in ("answer", "hit")}
    assert len(used) == 1, "the other one is too short for a boundary"
    assert facts["conversations"] == "1 of the 500 in the committed set, seed 0"


def test_the_page_shows_tables_and_charts_that_exist(finished: Path) -> None:
    for page in (finished / "page.md", finished / "out" / "report.md"):
        text = page.read_text()
        charts = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
        assert len(charts) > 8
        for chart in charts:
            ElementTree.parse(page.parent / chart)
        named = ("In brief", "Which tail", "cross", "may be concluded")
        for name in ("`both 8 layer_exact`", "(–)", *named):
            assert name in text
        tables = [line for line in text.splitlines() if line.startswith("|")]
        assert len(tables) > 60
        assert not [line for line in tables if "{" in line]


@pytest.mark.slow
def test_it_goes_on_from_what_a_kill_left(checkpoint: Path, finished: Path, tmp_path: Path) -> None:
    """The same samples come out, but for their times, and what was there is not computed again."""
    whole = (finished / "out" / SAMPLES).read_bytes().splitlines(keepends=True)
    torn = tmp_path / SAMPLES
    torn.write_bytes(b"".join(whole[:3]) + whole[3][:50])
    asked = ("--checkpoint", checkpoint, "--out", tmp_path, "--limit", 2, "--stacks", 1)
    result = ripresa(*asked)
    assert result.exit_code == 0, result.output
    again = torn.read_bytes().splitlines(keepends=True)
    assert again[:3] == whole[:3]
    assert [untimed(line) for line in again] == [untimed(line) for line in whole]
    before = (tmp_path / "results.json").read_text()
    result = ripresa(*asked)
    assert result.exit_code == 0, result.output
    assert "min are left" not in result.stderr
    assert (tmp_path / "results.json").read_text() == before


def untimed(line: bytes) -> object:
    document = json.loads(line)
    for cost in document.get("costs", ()):
        del cost["seconds"]
    return document


def test_the_self_test_passes(checkpoint: Path) -> None:
    result = ripresa("--checkpoint", checkpoint, "--self-test")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("conversation")]
    assert len(lines) == 10
    assert all(line.endswith("ok") for line in lines)
    assert "4 of 4 hits left rows out" in result.output


def test_a_self_test_that_could_not_fail_does_not_pass(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ripresa.cluster.evaluation.evaluate.reach", lambda geometry: 9999)
    result = ripresa("--checkpoint", checkpoint, "--self-test")
    assert result.exit_code == FAILED
    assert "nothing could have failed" in result.output


def test_a_gateway_is_asked_before_anything_is_computed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ripresa.cluster.evaluation.served.CONNECT_TIMEOUT_S", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = ripresa("--checkpoint", checkpoint, "--out", tmp_path, "--address", address)
    assert result.exit_code == FAILED
    assert address in result.output
    assert "rendering" not in result.output


def test_a_folder_is_one_evaluations_at_a_time(checkpoint: Path, tmp_path: Path) -> None:
    with ResultsFile(tmp_path, SETTINGS):
        before = (tmp_path / SAMPLES).read_bytes()
        result = ripresa("--checkpoint", checkpoint, "--out", tmp_path)
        assert result.exit_code == FAILED
        assert "another evaluation is writing" in result.output
        assert (tmp_path / SAMPLES).read_bytes() == before
    with ResultsFile(tmp_path, SETTINGS) as kept:
        assert kept.results == []


def test_a_key_is_not_in_the_page() -> None:
    told = _command(["eval", "replay", "--api-key", "s3cret", "--api-key=s3cret"], "s3cret")
    assert told == "ripresa eval replay --api-key KEY --api-key=KEY"
    assert _command(["eval", "replay"], "") == "ripresa eval replay"


@pytest.mark.slow
def test_a_self_test_that_fails_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ripresa.cluster.evaluation import experiments
    from ripresa.cluster.evaluation.arms import hit_arms

    monkeypatch.setattr(experiments, "hit_arms", lambda geometry: hit_arms(geometry)[1:])
    result = ripresa("--checkpoint", checkpoint, "--self-test")
    assert result.exit_code == FAILED
    assert "DIFFERS" in result.output


@pytest.mark.slow
def test_an_arm_that_should_be_exact_and_is_not_fails_the_evaluation(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ripresa.cluster.evaluation import experiments
    from ripresa.cluster.evaluation.arms import hit_arms

    monkeypatch.setattr(experiments, "hit_arms", lambda geometry: hit_arms(geometry)[1:])
    result = ripresa("--checkpoint", checkpoint, "--out", tmp_path, "--limit", 2, "--stacks", 0)
    assert result.exit_code == FAILED
    assert "nothing of this may be trusted" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), MISUSED, "--out"),
        (("--out", "{out}", "--limit", "0"), MISUSED, "--limit"),
        (("--out", "{out}", "--checkpoint", "{missing}"), MISUSED, "--checkpoint: {missing}/"),
        (("--out", "{out}", "--checkpoint", "{bare}"), MISUSED, "tokenizer.json"),
        (("--out", "{out}", "--checkpoint", "{small}"), MISUSED, "has 4096 tokens, the model "),
        (("--out", "{out}", "--conversations", "{missing}"), MISUSED, "cannot be read"),
        (("--out", "{out}", "--conversations", "{text}"), MISUSED, "no file of conversations"),
        (("--out", "{out}", "--conversations", "{other}"), MISUSED, "no file of conversations"),
        (("--out", "{out}", "--conversations", "{empty}"), MISUSED, "has no conversation"),
        (("--out", "{text}/below"), FAILED, "name another --out"),
        (("--out", "{foreign}"), MISUSED, "holds results of another"),
    ],
)
def test_bad_input_is_refused(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "tokenizer.json").unlink()
    tiny_checkpoint(tmp_path / "small", engram_layer_ids=[], engram_num_embeddings=[])
    shutil.copy(TOKENIZER, tmp_path / "small")
    (tmp_path / "text").write_text("no archive")
    (tmp_path / "other").write_bytes(lzma.compress(b'{"messages": []}\n'))
    (tmp_path / "empty").write_bytes(lzma.compress(b""))
    (tmp_path / "foreign").mkdir()
    head = '{"format": "ripresa replay evaluation", "version": 1, "limit": 7, "seed": 9}\n'
    (tmp_path / "foreign" / SAMPLES).write_text(head)
    names = ("out", "missing", "bare", "small", "text", "other", "empty", "foreign")
    places = {name: str(tmp_path / name) for name in names}
    given = [argument.format(**places) for argument in arguments]
    if "--checkpoint" not in given:
        given += ["--checkpoint", str(checkpoint)]
    result = ripresa(*given)
    assert result.exit_code == code, result.output
    assert said.format(**places) in result.output


def conversation(**changes: object) -> dict[str, Any]:
    """A small one, changed."""
    return {
        "messages": [
            {"role": "user", "content": "Say a."},
            {"role": "assistant", "content": "a"},
        ],
        "expected": [{"message": 1, "task": "T6 repeat", "evidence": 0}],
        **changes,
    }


def written(path: Path, *documents: object) -> Path:
    path.write_bytes(lzma.compress("".join(f"{json.dumps(d)}\n" for d in documents).encode()))
    return path


def expecting(**changes: object) -> dict[str, Any]:
    return conversation(expected=[{"message": 1, "task": "T6 repeat", "evidence": 0, **changes}])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "must be an object"),
        ({"messages": []}, "lacks ['expected']"),
        (conversation(more=1), "unknown ['more']"),
        (conversation(messages=[], expected=[]), "must end with the assistant's"),
        (conversation(messages="a"), "must be lists"),
        (conversation(messages=["a"]), "messages[0] must be an object"),
        (conversation(messages=[{"role": "user", "content": "a"}]), "must end with the assistant"),
        (conversation(expected=[]), "every message of the assistant, in order: [1], not []"),
        (conversation(boundary="8"), "`boundary` must not be '8'"),
        (conversation(boundary=8.0), "`boundary` must not be 8.0"),
        (conversation(placement=8), "`placement` must not be 8"),
        (conversation(declares_tools=1), "`declares_tools` must not be 1"),
        (expecting(message=7), "expected[0].message is 7"),
        (expecting(message=-1), "expected[0].message is -1"),
        (expecting(message=True), "expected[0].message is True"),
        (expecting(evidence=1), "expected[0].evidence is 1"),
        (expecting(evidence="a"), "expected[0].evidence is 'a'"),
        (expecting(task="T99"), "'T99' is not a valid Task"),
        (expecting(task=[]), "[] is not a valid Task"),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(
    tmp_path: Path, document: object, said: str
) -> None:
    file = written(tmp_path / "file", conversation(), document)
    with pytest.raises(InvalidArgument) as refused:
        read_conversations(file)
    assert refused.value.field == "--conversations"
    for part in (str(file), "line 2: ", said):
        assert part in refused.value.message
    assert len(read_conversations(written(file, conversation(), conversation()))) == 2


@pytest.mark.parametrize(
    ("first", "said"), [({"role": "judge", "content": "a"}, "judge"), ({"role": "user"}, "content")]
)
def test_a_conversation_that_is_no_prompt_is_named_by_file_and_line(
    tmp_path: Path, first: object, said: str
) -> None:
    bad = conversation(messages=[first, {"role": "assistant", "content": "a"}])
    file = written(tmp_path / "file", conversation(), bad)
    found = cases_of(
        read_conversations(file),
        [0, 1],
        Renderer(TOKENIZER),
        ReplayGeometry(8, 6, 1, 1),
        64,
        0,
        file,
    )
    assert next(found).number == 0
    with pytest.raises(InvalidArgument, match="line 2: cannot be a prompt") as refused:
        next(found)
    assert str(file) in refused.value.message
    assert said in refused.value.message


def test_results_that_are_none_are_refused_and_kept(tmp_path: Path) -> None:
    samples = tmp_path / SAMPLES
    for content in (b'{"a": 1}\nnonsense\n', b"[]\n", b'{"a": 1}\n{"experiment": "answer"}\n'):
        samples.write_bytes(content)
        with pytest.raises(RipresaError) as refused:
            ResultsFile(tmp_path, SETTINGS)
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        assert samples.read_bytes() == content
    samples.write_bytes(b'{"for')  # a kill while the first line was written
    with ResultsFile(tmp_path, SETTINGS) as kept:
        assert kept.results == []
    with ResultsFile(tmp_path, SETTINGS) as kept:
        assert kept.has(Experiment.HIT, 0) is False


def test_a_full_disk_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ripresa.cluster.evaluation.experiments import Result as Measured

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with ResultsFile(tmp_path, SETTINGS) as kept:
        kept.add(Measured(Experiment.HIT, 1))
        monkeypatch.setattr("ripresa.cluster.evaluation.results_file.os.fsync", full)
        with pytest.raises(RipresaError, match="No space left") as refused:
            kept.add(Measured(Experiment.HIT, 2))
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION
    monkeypatch.undo()
    with ResultsFile(tmp_path, SETTINGS) as kept:
        assert kept.has(Experiment.HIT, 1)


def test_the_committed_set_is_read_by_default() -> None:
    assert len(read_conversations(None)) == 500
