"""Does the planner agree with a file of worked cases? The verb `ripresa verify replay`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ripresa.cluster.progress import progress
from ripresa.workers.cache.block_hash import BlockIdentity
from ripresa.workers.errors import ErrorCode, InvalidArgument, RipresaError
from ripresa.workers.replay_plan import PrefillPlan
from ripresa.workers.replay_planner import plan_prefill
from ripresa.workers.replay_query import ParkedImage, PrefillQuery, ReplayGeometry

Echo = Callable[[str], None]
Check = Callable[[Any], bool]
Fields = Mapping[str, Any]

DIFFERS = 1
"""Exit code: a planned number is not the expected one."""


@click.command("replay")
@click.argument("cases", metavar="CASES.json", type=click.Path(dir_okay=False, path_type=Path))
@click.pass_context
def verify_replay(ctx: click.Context, cases: Path) -> None:
    """Plan the worked cases of a file; a line a case, with every number that differs.

    A case gives a prompt's length and what is cached of it, and all numbers of the plan that must
    come out. Exits 1 if any number differs, 2 if the file has another layout.

    \b
    Example:
      ripresa verify replay cases/replay_cases.json
    """
    with progress("verifying"):
        num_different, num_cases = verify_cases(cases, click.echo)
    if num_different:
        click.echo(f"{num_different} of {num_cases} cases DIFFER")
        ctx.exit(DIFFERS)
    click.echo(f"{num_cases} cases agree")


def verify_cases(path: Path, echo: Echo) -> tuple[int, int]:
    """Plan every case of the file; how many differ, and how many there are.

    Raises:
        RipresaError: NOT_FOUND; the file cannot be read.
        InvalidArgument: it is no JSON, or of another layout; the field says where.
    """
    file = _load(path)
    _check_fields(file, _FILE, "")
    if file["block"] != file["window"]:
        raise InvalidArgument(
            "block", f"must be the window {file['window']}, got {file['block']}; see the hit rule"
        )
    # Mode bounded with tail floored, which the cases are about, does not depend on the layers.
    geometry = ReplayGeometry(file["window"], file["rewind"], 1, 1)
    if not file["cases"]:
        raise InvalidArgument("cases", "the file has no case")
    queries = [
        _query(case, geometry, f"cases[{number}]") for number, case in enumerate(file["cases"])
    ]
    num_different = 0
    for case, query in zip(file["cases"], queries, strict=True):
        different = list(_differences(case["expected"], planned_numbers(plan_prefill(query))))
        echo(f"{case['name']}: {'; '.join(different) if different else 'agrees'}")
        num_different += bool(different)
    return num_different, len(queries)


def planned_numbers(plan: PrefillPlan) -> dict[str, Any]:
    """A plan in the words of a case file."""
    return {
        "kind": plan.recipe.kind.value,
        "hit_tokens": plan.num_skipped,
        "block_kv_reused_tokens": plan.write_floor,
        "replay": None if plan.replay is None else list(plan.replay),
        "encoder_rows": list(plan.encoder_rows),
        "swa_read_floor": plan.recipe.swa_floor,
        "block_kv_write_floor": plan.recipe.write_floor,
        "decoder_rows": list(plan.decoder_rows),
        "decoder_read_floor": plan.recipe.decoder_start,
        "ratio1_entries_written": list(plan.entries_written(1)),
        "ratio2_entries_written": list(plan.entries_written(2)),
        "open_pair_token": plan.open_pair_position,
        "blocks_completed": list(plan.blocks_completed),
        "encoder_state_exact": plan.is_encoder_exact,
    }


def _differences(expected: Fields, planned: Fields) -> Iterator[str]:
    for name, number in planned.items():
        if number != expected[name]:
            yield (
                f"{name} is {json.dumps(number)} and DIFFERS from "
                f"the expected {json.dumps(expected[name])}"
            )


def _query(case: Any, geometry: ReplayGeometry, where: str) -> PrefillQuery:
    _check_fields(case, _CASE, where, optional=("note",))
    _check_fields(case["expected"], _EXPECTED, f"{where}.expected")
    parked = case["parked_image"]
    if parked is not None:
        _check_fields(parked, _IMAGE, f"{where}.parked_image")
    window = geometry.window
    for boundary in case["swa_windows_at"]:
        if boundary == 0 or boundary % window:
            raise InvalidArgument(
                f"{where}.swa_windows_at", f"{boundary} is no boundary of blocks of {window}"
            )
    num_tokens = case["num_tokens"]
    return PrefillQuery(
        geometry,
        num_tokens,
        [_block(number) for number in range(min(case["cached_blocks"], num_tokens // window))],
        {_block(boundary // window - 1) for boundary in case["swa_windows_at"]},
        None if parked is None else ParkedImage(**parked),
    )


def _block(number: int) -> BlockIdentity:
    """All blocks of a case are of one prompt and of exact lineage: their numbers name them."""
    return BlockIdentity(number.to_bytes(8, "big"), ())


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RipresaError(ErrorCode.NOT_FOUND, f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(str(path), f"is not UTF-8: {error}") from error
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(str(path), f"is no JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgument(twice[0], "is given twice in one object")
    return fields


def _check_fields(
    value: Any, layout: Mapping[str, Check], where: str, optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(value, dict):
        raise InvalidArgument(where or "file", "must be an object")
    prefix = f"{where}." if where else ""
    for name in value.keys() - layout.keys():
        raise InvalidArgument(f"{prefix}{name}", f"is no field; known are {', '.join(layout)}")
    for name, is_valid in layout.items():
        if name not in value:
            if name not in optional:
                raise InvalidArgument(f"{prefix}{name}", "is missing")
        elif not is_valid(value[name]):
            raise InvalidArgument(f"{prefix}{name}", f"cannot be {json.dumps(value[name])}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _is_range(value: Any) -> bool:
    return _is_counts(value) and len(value) == 2


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


_FILE: Mapping[str, Check] = {
    "window": _is_positive,
    "block": _is_positive,
    "rewind": _is_count,
    "cases": lambda value: isinstance(value, list),
}
_CASE: Mapping[str, Check] = {
    "name": _is_text,
    "note": _is_text,
    "num_tokens": _is_positive,
    "cached_blocks": _is_count,
    "swa_windows_at": _is_counts,
    "parked_image": _or_null(lambda value: isinstance(value, dict)),
    "expected": lambda value: isinstance(value, dict),
}
_IMAGE: Mapping[str, Check] = {
    "num_tokens": _is_positive,
    "swa_floor": _is_count,
    "decoder_start": _is_count,
}
_EXPECTED: Mapping[str, Check] = {
    "kind": _is_text,
    "hit_tokens": _is_count,
    "block_kv_reused_tokens": _is_count,
    "replay": _or_null(_is_range),
    "encoder_rows": _is_range,
    "swa_read_floor": _is_count,
    "block_kv_write_floor": _is_count,
    "decoder_rows": _is_range,
    "decoder_read_floor": _is_count,
    "ratio1_entries_written": _is_range,
    "ratio2_entries_written": _is_range,
    "open_pair_token": _or_null(_is_count),
    "blocks_completed": _is_counts,
    "encoder_state_exact": _is_flag,
}
