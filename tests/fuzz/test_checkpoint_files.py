"""Can a damaged or hostile checkpoint crash a loader, lead it astray, or be loaded as another one?

A flipped bit in a header or the index is an error or changes nothing. One among the weights is a
valid weight, and only a hash of the file finds it; it never does more than change numbers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from edit_shard import edit_index, read_shard, write_shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import tiny_checkpoint

from ripresa.workers.checkpoint_files import CheckpointFiles
from ripresa.workers.errors import CheckpointError, RipresaError
from ripresa.workers.models.checkpoint import Checkpoint
from ripresa.workers.models.checkpoint_index import INDEX_FILE
from ripresa.workers.models.deepseek_v41.config import ModelConfig
from ripresa.workers.models.deepseek_v41.inventory import take_inventory
from ripresa.workers.models.deepseek_v41.tensor_specs import Half
from ripresa.workers.models.deepseek_v41.weights import load_weights
from ripresa.workers.models.shard import TensorEntry

Bytes = dict[str, bytes]

_opened: list[str] | None = None
_strangers: frozenset[int] = frozenset()
"""Threads that open files of their own: those of other tests."""


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or _opened is None or threading.get_ident() in _strangers:
        return
    if isinstance(arguments[0], str | bytes | Path):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_open)


@contextmanager
def only_within(folder: Path) -> Iterator[None]:
    """Fail if the body opens a file outside `folder`."""
    global _opened, _strangers
    running = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
    _strangers = frozenset(running - {threading.get_ident()})
    _opened = []
    try:
        yield
        outside = [path for path in _opened if not _is_within(path, folder)]
        assert outside == []
    finally:
        _opened = None


def _is_within(path: str, folder: Path) -> bool:
    real = Path(os.path.realpath(path))
    installed = Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]
    return any(real.is_relative_to(place) for place in (folder.resolve(), *installed))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    tiny_checkpoint(folder, n_routed_experts=2)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil again and again."""
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


def entries_of(folder: Path) -> dict[str, TensorEntry]:
    """What a worker knows before it reads a tensor; raises what a worker would."""
    config = ModelConfig.from_file(folder / "config.json")
    with only_within(folder), Checkpoint(folder) as checkpoint:
        take_inventory(checkpoint.entries, config)
        return dict(checkpoint.entries)


def load(folder: Path) -> torch.Tensor:
    """Every number of the loaded model in one tensor."""
    config = ModelConfig.from_file(folder / "config.json")
    with only_within(folder), Checkpoint(folder) as checkpoint:
        weights = load_weights(checkpoint, config, Half.ALL)
    tables = [
        engram.table.rows(torch.arange(engram.table.num_rows)).flatten()
        for engram in weights.engram.values()
    ]
    return torch.cat([weights.embed.flatten(), weights.layers[3].w13.flatten(), *tables])


def outcome(folder: Path) -> dict[str, TensorEntry] | None:
    """Entries, or None where they are refused; any other error is a crash."""
    try:
        return entries_of(folder)
    except RipresaError:
        return None


def spoil(path: Path, change: Callable[[bytearray], object], check: Callable[[], object]) -> None:
    """Change a file, check, and put it back."""
    content = path.read_bytes()
    changed = bytearray(content)
    change(changed)
    path.write_bytes(changed)
    try:
        check()
    finally:
        path.write_bytes(content)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def flip_bits(folder: Path, seed: int, trials: int) -> tuple[int, int]:
    """Single flips in headers and index; how many were refused and how many changed nothing."""
    draw = random.Random(seed)
    expected = entries_of(folder)
    places = [(folder / INDEX_FILE, (folder / INDEX_FILE).stat().st_size)]
    places += [(path, header_bytes(path)) for path in sorted(folder.glob("*.safetensors"))]
    results = []

    def check() -> None:
        entries = outcome(folder)
        assert entries is None or entries == expected
        results.append(entries is None)

    for _ in range(trials):
        path, size = draw.choice(places)
        position, bit = draw.randrange(size), draw.randrange(8)

        def flip(content: bytearray, position: int = position, bit: int = bit) -> None:
            content[position] ^= 1 << bit

        spoil(path, flip, check)
    return sum(results), trials - sum(results)


def test_a_flipped_bit_in_a_header_or_the_index_is_refused_or_changes_nothing(folder: Path) -> None:
    refused, harmless = flip_bits(folder, seed=1, trials=150)
    assert refused > 5 * harmless


@pytest.mark.slow
def test_many_flipped_bits(folder: Path) -> None:
    refused, harmless = flip_bits(folder, seed=2, trials=6000)
    assert refused > 5 * harmless


def test_several_bits_at_once_never_crash(folder: Path) -> None:
    draw = random.Random(3)
    for path in [folder / INDEX_FILE, *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size if path.suffix == ".json" else header_bytes(path)
        for _ in range(15):

            def scramble(content: bytearray, size: int = size) -> None:
                for _ in range(draw.randrange(2, 40)):
                    content[draw.randrange(size)] = draw.randrange(256)

            spoil(path, scramble, lambda: outcome(folder))


def test_a_flipped_bit_among_the_weights_changes_numbers_at_most_and_its_hash_tells(
    folder: Path,
) -> None:
    draw = random.Random(4)
    CheckpointFiles(folder).check(lambda line: None, record=True)
    whole = load(folder)

    def check() -> None:
        try:
            shape = load(folder).shape
        except CheckpointError:  # the flip made a scale NaN
            shape = whole.shape
        assert shape == whole.shape
        assert not CheckpointFiles(folder).check(lambda line: None)

    shards = sorted(folder.glob("*.safetensors"))
    for _ in range(15):
        path = draw.choice(shards)
        position = draw.randrange(header_bytes(path), path.stat().st_size)
        bit = draw.randrange(8)

        def flip(content: bytearray, position: int = position, bit: int = bit) -> None:
            content[position] ^= 1 << bit

        spoil(path, flip, check)
    assert CheckpointFiles(folder).check(lambda line: None)


@pytest.mark.parametrize("longer", [False, True], ids=["cut", "grown"])
def test_files_of_another_length_are_refused(folder: Path, longer: bool) -> None:
    draw = random.Random(5)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        lengths = [0, 7, 8, 9, header_bytes(path) - 1, header_bytes(path), size - 1]
        lengths += [draw.randrange(size) for _ in range(10)]
        for length in lengths:

            def resize(content: bytearray, length: int = length) -> None:
                if longer:
                    content += content[: max(1, length)]
                else:
                    del content[length:]

            def check() -> None:
                assert outcome(folder) is None

            spoil(path, resize, check)


def test_a_cut_index_is_refused(folder: Path) -> None:
    size = (folder / INDEX_FILE).stat().st_size
    draw = random.Random(6)
    for length in [0, 1, size - 3, *(draw.randrange(size - 3) for _ in range(30))]:

        def cut(content: bytearray, length: int = length) -> None:
            del content[length:]

        def check() -> None:
            assert outcome(folder) is None

        spoil(folder / INDEX_FILE, cut, check)


def test_shards_that_changed_places_are_refused_and_renamed_ones_are_not(folder: Path) -> None:
    whole = load(folder)
    shards = sorted(folder.glob("*.safetensors"))
    for first, second in zip(shards, [*shards[1:], shards[0]], strict=True):
        first.rename(folder / "other")
        second.rename(first)
        (folder / "other").rename(second)
        assert outcome(folder) is None
        first.rename(folder / "other")
        second.rename(first)
        (folder / "other").rename(second)
    names = [path.name for path in shards]
    renamed = dict(zip(names, ["z.safetensors", "b.safetensors", "a.safetensors"], strict=True))
    for old, new in renamed.items():
        (folder / old).rename(folder / new)
    edit_index(
        folder,
        lambda document: document.update(
            weight_map={name: renamed[file] for name, file in document["weight_map"].items()}
        ),
    )
    assert torch.equal(load(folder), whole)


def test_tensors_in_another_order_are_the_same_model(folder: Path) -> None:
    whole = load(folder)
    draw = random.Random(7)
    for path in folder.glob("*.safetensors"):
        header, data = read_shard(path)
        names = [name for name in header if name != "__metadata__"]
        draw.shuffle(names)
        moved = b""
        for name in names:
            start, stop = header[name]["data_offsets"]
            header[name]["data_offsets"] = [len(moved), len(moved) + stop - start]
            moved += data[start:stop]
        write_shard(path, header, moved)
    assert torch.equal(load(folder), whole)


FEW = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
MANY = settings(FEW, max_examples=1500)

HOSTILE_NAMES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            *("/etc/passwd", "../model-00001-of-00003.safetensors", "..", ".", "/", "a/../../b"),
            *("\0", "\ud800", "x" * 300, "a" * 5000),
        ]
    ),
    st.builds("../{}".format, st.text(max_size=10)),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "weight_map", "x"]), inner
        )
    ),
    max_leaves=8,
)


def check_hostile_name(folder: Path, name: str) -> None:
    original = (folder / INDEX_FILE).read_bytes()
    edit_index(folder, lambda document: document["weight_map"].update({"norm.weight": name}))
    try:
        assert outcome(folder) is None
    finally:
        (folder / INDEX_FILE).write_bytes(original)


def check_header_entry(folder: Path, value: object) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    original = path.read_bytes()
    header, data = read_shard(path)
    name = next(name for name in header if name != "__metadata__")
    header[name] = value
    write_shard(path, header, data)
    try:
        assert outcome(folder) is None
    finally:
        path.write_bytes(original)


def check_whole_document(folder: Path, document: object, which: str) -> None:
    path = folder / INDEX_FILE if which == "index" else sorted(folder.glob("*.safetensors"))[0]
    original = path.read_bytes()
    text = json.dumps(document).encode()
    path.write_bytes(text if which == "index" else len(text).to_bytes(8, "little") + text)
    try:
        assert outcome(folder) is None
    finally:
        path.write_bytes(original)


def check_any_bytes(folder: Path, content: bytes, which: str) -> None:
    path = folder / INDEX_FILE if which == "index" else sorted(folder.glob("*.safetensors"))[0]
    original = path.read_bytes()
    path.write_bytes(content)
    try:
        assert outcome(folder) is None
    finally:
        path.write_bytes(original)


WHICH = st.sampled_from(["index", "shard"])


@FEW
@given(name=HOSTILE_NAMES)
def test_hostile_file_names(folder: Path, name: str) -> None:
    check_hostile_name(folder, name)


@FEW
@given(value=JSON)
def test_hostile_header_entries(folder: Path, value: object) -> None:
    check_header_entry(folder, value)


@FEW
@given(document=JSON, which=WHICH)
def test_hostile_documents(folder: Path, document: object, which: str) -> None:
    check_whole_document(folder, document, which)


@FEW
@given(content=st.binary(max_size=200), which=WHICH)
def test_any_bytes(folder: Path, content: bytes, which: str) -> None:
    check_any_bytes(folder, content, which)


@pytest.mark.slow
@MANY
@given(name=HOSTILE_NAMES, value=JSON, content=st.binary(max_size=400), which=WHICH)
def test_many_hostile_inputs(
    folder: Path, name: str, value: object, content: bytes, which: str
) -> None:
    check_hostile_name(folder, name)
    check_header_entry(folder, value)
    check_whole_document(folder, value, which)
    check_any_bytes(folder, content, which)


def test_the_watch_on_opened_files_works(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    with pytest.raises(AssertionError), only_within(folder):
        (tmp_path / "outside").read_text()
