"""Is the tightest memory limit found, in every kind of container?"""

from __future__ import annotations

from pathlib import Path

import pytest

from ripresa.workers.host_memory import available_memory

MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, content in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def v2(folder: str, limit: str, usage: int, cached: int) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{folder}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{folder}/memory.current": f"{usage}\n",
        f"sys/fs/cgroup{folder}/memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 1\n",
    }


def v1(folder: str, limit: int, usage: int, cached: int) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory{folder}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": f"cache 9\ntotal_inactive_file {cached}\n",
    }


CASES = {
    "no container": ({}, 1_024_000),
    "v2, its own root": (v2("", "500000", 300_000, 100_000), 300_001),
    "v2, nested": (
        {"proc/self/cgroup": "0::/pod/box\n"}
        | v2("/pod/box", "max", 100, 0)
        | v2("/pod", "400000", 150_000, 49_999),
        300_000,
    ),
    "v2, unlimited": (v2("", "max", 300_000, 0), 1_024_000),
    "v2, used up": (v2("", "500000", 600_000, 0), 0),
    "v1, its own root": (
        {"proc/self/cgroup": "4:cpu,memory:/hidden\n0::/\n"} | v1("", 200_000, 150_000, 50_000),
        100_000,
    ),
    "v1, nested": (
        {"proc/self/cgroup": "4:memory:/box\n"}
        | v1("", 2**63 - 4096, 10, 0)
        | v1("/box", 250_000, 50_000, 0),
        200_000,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_limit_counts(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    memory = available_memory(system(tmp_path, files))
    assert memory is not None
    assert memory.num_bytes == expected


def test_the_source_is_named(tmp_path: Path) -> None:
    memory = available_memory(system(tmp_path, v2("", "500000", 1, 0)))
    assert memory is not None
    assert memory.source.startswith("the limit of 500000 bytes in ")
    assert memory.source.endswith("sys/fs/cgroup/memory.max")


def test_a_system_that_names_no_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_this_machine_has_memory() -> None:
    memory = available_memory()
    assert memory is None or memory.num_bytes > 1 << 20
