"""How much have all workers done that this gateway ever heard of? Sums of their reports.

A worker that restarts begins at zero under another id; what the old one did stays in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from ripresa.workers.cache.block_store import StoreStats
from ripresa.workers.cache.expected_turns import PrefetchOutcome
from ripresa.workers.cache.session_leases import LeaseOutcome
from ripresa.workers.prefix_sources import PullEnd
from ripresa.workers.report import WorkerReport
from ripresa.workers.request import LeaseCounters, MoveCounters, PullCounters
from ripresa.workers.shadow_counters import (
    Divergence,
    ShadowCounters,
    ShadowOutcome,
    ShadowReference,
)

Counts = tuple[tuple[str, int], ...]


class DiskTotals:
    """The workers' disk tiers, summed."""

    def __init__(self) -> None:
        self._newest: dict[str, StoreStats] = {}

    def take(self, reports: Iterable[WorkerReport]) -> dict[str, int]:
        """What was added since the last call, by field of `StoreStats`; all but `num_bytes`."""
        added = dict.fromkeys(StoreStats.__dataclass_fields__, 0)
        del added["num_bytes"]
        for report in reports:
            now = report.stats.disk
            if now is None:
                continue
            before = self._newest.get(report.worker_id, StoreStats())
            self._newest[report.worker_id] = now
            for name in added:
                added[name] += max(0, getattr(now, name) - getattr(before, name))
        return added


class PullTotals:
    """What the workers pulled from each other, summed."""

    def __init__(self) -> None:
        self._newest: dict[str, PullCounters] = {}

    def take(self, reports: Iterable[WorkerReport]) -> tuple[dict[str, int], int]:
        """Pulls by how they ended, and bytes received, that were added since the last call."""
        ends = dict.fromkeys(map(str, PullEnd), 0)
        num_bytes = 0
        for report in reports:
            now = report.stats.pulls
            before = self._newest.get(report.worker_id, PullCounters())
            self._newest[report.worker_id] = now
            num_bytes += max(0, now.received_bytes - before.received_bytes)
            _add(ends, before.ends, now.ends)
        return ends, num_bytes


class LeaseTotals:
    """What became of the workers' leases, summed."""

    def __init__(self) -> None:
        self._newest: dict[str, LeaseCounters] = {}

    def take(self, reports: Iterable[WorkerReport]) -> tuple[dict[str, int], dict[str, int]]:
        """Leases, and blocks read back ahead, by outcome, that were added since the last call."""
        leases = dict.fromkeys(map(str, LeaseOutcome), 0)
        prefetched = dict.fromkeys(map(str, PrefetchOutcome), 0)
        for report in reports:
            now = report.stats.leases
            before = self._newest.get(report.worker_id, LeaseCounters())
            self._newest[report.worker_id] = now
            _add(leases, before.outcomes, now.outcomes)
            _add(prefetched, before.prefetched, now.prefetched)
        return leases, prefetched


class MoveTotals:
    """What the workers kept for each other, summed."""

    def __init__(self) -> None:
        self._newest: dict[str, MoveCounters] = {}

    def take(self, reports: Iterable[WorkerReport]) -> dict[str, int]:
        """What was added since the last call, by field of `MoveCounters`."""
        added = dict.fromkeys(MoveCounters.__dataclass_fields__, 0)
        for report in reports:
            now = report.stats.moves
            before = self._newest.get(report.worker_id, MoveCounters())
            self._newest[report.worker_id] = now
            for name in added:
                added[name] += max(0, getattr(now, name) - getattr(before, name))
        return added


class ShadowTotals:
    """What the workers found by scoring served tokens again, summed.

    Attributes:
        divergences: of all tokens, by reference.
    """

    def __init__(self) -> None:
        self.divergences = dict.fromkeys(map(str, ShadowReference), Divergence())
        self._newest: dict[str, ShadowCounters] = {}

    def take(self, reports: Iterable[WorkerReport]) -> tuple[dict[str, int], int]:
        """Tokens by outcome, and rows that they took, that were added since the last call."""
        outcomes = dict.fromkeys(map(str, ShadowOutcome), 0)
        num_rows = 0
        for report in reports:
            now = report.stats.shadow
            before = self._newest.get(report.worker_id, ShadowCounters())
            self._newest[report.worker_id] = now
            num_rows += max(0, now.num_rows - before.num_rows)
            _add(outcomes, before.outcomes, now.outcomes)
            known = dict(before.divergences)
            for reference, divergence in now.divergences:
                added = divergence.since(known.get(reference, Divergence()))
                self.divergences[reference] += added
        return outcomes, num_rows


class CutShortTotals:
    """Tokens that the workers computed of prompts that were never whole, summed."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def take(self, reports: Iterable[WorkerReport]) -> int:
        """What was added since the last call."""
        added = 0
        for report in reports:
            now = report.stats.num_cut_short_tokens
            added += max(0, now - self._newest.get(report.worker_id, 0))
            self._newest[report.worker_id] = now
        return added


def _add(sums: dict[str, int], before: Counts, now: Counts) -> None:
    known = dict(before)
    for name, count in now:
        sums[name] += max(0, count - known.get(name, 0))


def held_bytes(reports: Iterable[WorkerReport]) -> int:
    """Bytes on disk of all machines; the workers of one share a directory."""
    by_node: dict[str, int] = {}
    for report in reports:
        if report.stats.disk is not None:
            held = by_node.get(report.node_id, 0)
            by_node[report.node_id] = max(held, report.stats.disk.num_bytes)
    return sum(by_node.values())
