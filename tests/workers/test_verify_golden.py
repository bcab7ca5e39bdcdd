"""Does `verify golden` pass on good cases and fail on any tampered one?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ripresa.workers.verify_golden import verify_golden

CASES = Path(__file__).resolve().parents[1] / "data" / "golden"


def verify(*folders: Path, quick: bool = True) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return verify_golden(list(folders), lines.append, quick=quick), lines


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """A case of our own to tamper with."""
    shutil.copytree(CASES / "case_a_plain_float", tmp_path / "case")
    return tmp_path / "case"


def rewrite(case: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(case / "golden.safetensors")
    for name, tensor in changed.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, case / "golden.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["case_a_plain_float", "case_g_plain_replay"])
def test_bundled_cases_agree_in_every_way(name: str) -> None:
    good, lines = verify(CASES / name, quick=False)
    assert good, "\n".join(lines)


def test_a_bundled_case_agrees() -> None:
    good, lines = verify(CASES / "case_a_plain_float")
    assert good, "\n".join(lines)
    assert any("official.logits" in line and "ok" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["case_b_grids_engram_replay", "case_c_quantised_dspark", "case_g_plain_replay"]
)
def test_shared_cases_agree_in_every_way(shared: Path, name: str) -> None:
    good, lines = verify(shared / "golden" / name, quick=False)
    assert good, "\n".join(lines)


@pytest.mark.parametrize("name", ["case_b_grids_engram_replay", "case_c_quantised_dspark"])
def test_shared_cases_agree(shared: Path, name: str) -> None:
    good, lines = verify(shared / "golden" / name)
    assert good, "\n".join(lines)


@pytest.mark.parametrize(
    "name",
    [
        "official.logits",
        "official.hidden",
        "official.pre_mix",
        "official.decode_logits",
        "official.state.main.3",
        "official.state.swa.2.rows",
        "official.state.open.1",
    ],
)
def test_a_changed_value_is_found(case: Path, name: str) -> None:
    tensor = load_file(case / "golden.safetensors")[name].clone()
    tensor.view(-1)[-1] += 2e-3
    rewrite(case, **{name: tensor})
    good, lines = verify(case)
    assert not good
    assert any(name in line and "DIFFERS" in line for line in lines)


def test_a_nan_is_no_agreement(case: Path) -> None:
    tensor = load_file(case / "golden.safetensors")["official.logits"].clone()
    tensor[3, 5] = float("nan")
    rewrite(case, **{"official.logits": tensor})
    assert not verify(case)[0]


def test_a_changed_selection_is_found(case: Path) -> None:
    chosen = load_file(case / "golden.safetensors")["official.selected.3"].clone()
    chosen[-1, 0] += 1
    rewrite(case, **{"official.selected.3": chosen})
    assert not verify(case)[0]


def test_the_order_of_a_selection_means_nothing(case: Path) -> None:
    golden = load_file(case / "golden.safetensors")
    selected = golden["official.selected.3"]
    assert not torch.equal(selected, selected.flip(-1))
    rewrite(case, **{"official.selected.3": selected.flip(-1).contiguous()})
    good, lines = verify(case)
    assert good, lines


def test_the_width_of_a_selection_means_nothing(case: Path) -> None:
    selected = load_file(case / "golden.safetensors")["official.selected.3"]
    none = torch.full((len(selected), 2), -1, dtype=selected.dtype)
    rewrite(case, **{"official.selected.3": torch.cat((none, selected), dim=1)})
    good, lines = verify(case)
    assert good, lines


def test_a_selection_without_one_of_its_entries_is_found(case: Path) -> None:
    selected = load_file(case / "golden.safetensors")["official.selected.3"]
    rewrite(case, **{"official.selected.3": selected[:, 1:].contiguous()})
    assert not verify(case)[0]


def test_changed_tokens_are_found(case: Path) -> None:
    tokens = load_file(case / "golden.safetensors")["token_ids"].clone()
    tokens[0] = (tokens[0] + 1) % 192
    rewrite(case, token_ids=tokens)
    assert not verify(case)[0]


def test_a_changed_weight_is_found(case: Path) -> None:
    path = case / "checkpoint" / "model.safetensors"
    weights = load_file(path)
    weights["layers.4.attn.wo_b.weight"][0, 0] += 1
    save_file(weights, path)
    assert not verify(case)[0]


@pytest.mark.parametrize("name", ["official.logits", "token_ids", "prefill_length"])
def test_a_missing_tensor_is_named(case: Path, name: str) -> None:
    rewrite(case, **{name: None})
    good, lines = verify(case)
    assert not good
    assert any(name in line for line in lines)


def test_an_unknown_tensor_is_named(case: Path) -> None:
    report = json.loads((case / "report.json").read_text())
    report["tensors"]["official.something_new"] = ["float32", [1]]
    (case / "report.json").write_text(json.dumps(report))
    rewrite(case, **{"official.something_new": torch.zeros(1)})
    good, lines = verify(case)
    assert not good
    assert any("official.something_new" in line and "UNKNOWN" in line for line in lines)


def test_draft_tensors_are_skipped_by_name(shared: Path) -> None:
    _, lines = verify(shared / "golden" / "case_c_quantised_dspark")
    assert any("official.dspark.draft_tokens" in line and "skipped" in line for line in lines)


@pytest.mark.parametrize("damage", ["no folder", "cut golden", "cut weights", "bad config"])
def test_a_damaged_case_is_reported_and_the_next_one_still_checked(
    case: Path, tmp_path: Path, damage: str
) -> None:
    bad = tmp_path / "missing"
    if damage != "no folder":
        shutil.copytree(case, bad)
    target = {
        "cut golden": bad / "golden.safetensors",
        "cut weights": bad / "checkpoint" / "model.safetensors",
        "bad config": bad / "checkpoint" / "config.json",
    }.get(damage)
    if target is not None:
        target.write_bytes(target.read_bytes()[:-100])
    good, lines = verify(bad, case)
    assert not good
    assert any("cannot be verified" in line for line in lines)
    assert lines[-1].strip() == "agrees"
