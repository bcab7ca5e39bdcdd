"""Which NUMA node does this process run on, and how does memory come from it? Linux's own calls."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
from pathlib import Path

from ripresa.workers.errors import ConfigError

logger = logging.getLogger(__name__)

MPOL_BIND = 2
_SETTING = "model.engram_placement"
_MBIND = {"x86_64": 237, "aarch64": 235}
_MASK_WORDS = 16
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_to_local_node(memory: mmap.mmap, root: Path = Path("/")) -> int | None:
    """Let an anonymous mapping's pages come from this process's node when they are first touched.

    Returns:
        the node; None on a machine with one node, or whose kernel names none: there every page is
        local, and nothing is bound.

    Args:
        root: where /sys is (tests).

    Raises:
        ConfigError: the process may run on CPUs of several nodes, or the kernel refuses.
    """
    nodes = numa_nodes(root)
    if len(nodes) < 2:
        logger.info("one NUMA node: memory is local without a policy")
        return None
    allowed = os.sched_getaffinity(0)
    local = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    if len(local) != 1:
        raise ConfigError(
            _SETTING,
            f"host_numa needs a worker on one NUMA node, and this one may run on {local}: pin it "
            "(numactl --cpunodebind=N, or a CPU manager policy), or use host_shared",
        )
    bind(memory, local[0])
    return local[0]


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """The CPUs of every node that has some; empty where the kernel names no nodes."""
    found = {}
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist")):
        cpus = _cpus(path.read_text(encoding="ascii"))
        if cpus:
            found[int(path.parent.name.removeprefix("node"))] = cpus
    return found


def bind(memory: mmap.mmap, node: int) -> None:
    """Take a mapping's pages from one node and no other (`MPOL_BIND`).

    Raises:
        ConfigError: the kernel refuses, or its call is not known for this machine.
    """
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    first = ctypes.c_char.from_buffer(memory)
    number = _MBIND.get(platform.machine())
    reason = errno.ENOSYS
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(ctypes.addressof(first)),
            ctypes.c_ulong(len(memory)),
            ctypes.c_long(MPOL_BIND),
            mask,
            ctypes.c_ulong(_MASK_WORDS * _WORD_BITS),
            ctypes.c_ulong(0),
        )
        reason = ctypes.get_errno() if failed else 0
    if reason:
        raise ConfigError(
            _SETTING,
            f"host_numa cannot bind memory to NUMA node {node}: {os.strerror(reason)}; allow the "
            "call mbind (a container may need CAP_SYS_NICE), or use host_shared",
        )


def _cpus(text: str) -> frozenset[int]:
    """The numbers of a list as `0-3,8,10-11`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
