"""How much memory may this process still take? The container's limit, and the machine's free pages.

A file's pages in the page cache count as free: the kernel drops them when they are in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that can be taken, and what says so."""

    num_bytes: int
    source: str


def available_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """The tightest of all limits; None where the system names none.

    Args:
        root: where /proc and /sys are (tests).
    """
    found = [*_machine(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return min(found, key=lambda memory: memory.num_bytes, default=None)


def _machine(root: Path) -> Iterator[AvailableMemory]:
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield AvailableMemory(available * 1024, "MemAvailable of the machine")


def _cgroup_v2(root: Path) -> Iterator[AvailableMemory]:
    mount = root / "sys/fs/cgroup"
    for folder in _ancestry(mount, _own_cgroup(root, "")):
        yield from _limit(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))


def _cgroup_v1(root: Path) -> Iterator[AvailableMemory]:
    mount = root / "sys/fs/cgroup/memory"
    cached = ("total_inactive_file", "total_active_file")
    for folder in _ancestry(mount, _own_cgroup(root, "memory")):
        yield from _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", cached)


def _own_cgroup(root: Path, controller: str) -> str:
    """This process's group in a hierarchy; "/" if it is not named or lies out of sight."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _ancestry(mount: Path, group: str) -> list[Path]:
    """The folders of a group and of all groups around it; in a container only some are there."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _limit(
    folder: Path, limit_file: str, usage_file: str, cached: tuple[str, ...]
) -> Iterator[AvailableMemory]:
    limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():  # "max", or no such group
        return
    statistics = _numbers(folder / "memory.stat")
    droppable = sum(statistics.get(name, 0) for name in cached)
    left = int(limit) - max(0, int(usage) - droppable)
    yield AvailableMemory(max(0, left), f"the limit of {int(limit)} bytes in {folder / limit_file}")


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """A file of the kernel's; empty where there is none for us."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
