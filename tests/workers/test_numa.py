"""Is memory bound to the node that a worker runs on, and is what cannot be said so?"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest

from ripresa.workers import numa
from ripresa.workers.errors import ConfigError

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_F_ADDR = 2


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 1 << 20)


def machine(root: Path, **cpus: str) -> Path:
    """A /sys with the given nodes."""
    for node, text in cpus.items():
        folder = root / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    return root


def policy_of(memory: mmap.mmap) -> int:
    """The kernel's policy for the mapping's first page."""
    mode = ctypes.c_int(-1)
    first = ctypes.c_char.from_buffer(memory)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(GET_MEMPOLICY[platform.machine()]),
        ctypes.byref(mode),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(ctypes.addressof(first)),
        ctypes.c_ulong(MPOL_F_ADDR),
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return mode.value


def test_the_cpus_of_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, node0="0-2,8", node1="3-7,9-10", node2="")
    assert numa.numa_nodes(root) == {0: {0, 1, 2, 8}, 1: {3, 4, 5, 6, 7, 9, 10}}
    assert numa.numa_nodes(tmp_path / "nothing") == {}


def test_memory_comes_from_a_node_or_the_kernel_s_refusal_is_told(memory: mmap.mmap) -> None:
    refused: ConfigError | None = None
    try:
        numa.bind(memory, min(numa.numa_nodes(), default=0))
    except ConfigError as error:  # a container's profile may forbid the call
        refused = error
    if refused is None:
        assert policy_of(memory) == numa.MPOL_BIND
    else:
        assert "allow the call mbind" in refused.message
    memory[:1] = b"x"


def test_a_node_that_does_not_exist_is_refused(memory: mmap.mmap) -> None:
    with pytest.raises(ConfigError, match="cannot bind memory to NUMA node 1000") as caught:
        numa.bind(memory, 1000)
    assert caught.value.field == "model.engram_placement"


def test_one_node_needs_no_policy_and_says_so(
    memory: mmap.mmap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="ripresa.workers.numa"):
        assert numa.bind_to_local_node(memory, machine(tmp_path, node0="0-4095")) is None
        assert numa.bind_to_local_node(memory, tmp_path / "nothing") is None
    assert caplog.text.count("one NUMA node") == 2


def test_a_worker_on_one_of_two_nodes_is_bound_to_it(
    memory: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(numa, "bind", lambda memory, node: bound.append(node))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 6})
    root = machine(tmp_path, node0="0-3", node1="4-7")
    assert numa.bind_to_local_node(memory, root) == 1
    assert bound == [1]


def test_a_worker_on_two_nodes_is_refused(
    memory: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4})
    root = machine(tmp_path, node0="0-3", node1="4-7")
    with pytest.raises(ConfigError, match=r"may run on \[0, 1\]: pin it"):
        numa.bind_to_local_node(memory, root)
