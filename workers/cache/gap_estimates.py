"""How long will a tool take to answer? What its newest answers took, by tenant."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection

QUANTILE = 0.9
FIRST_S = 30.0
FIRST_MEDIAN_S = 8.0
"""The estimates for a tool of which too little is known."""
MIN_GAPS = 10
"""Fewer say nothing about the slowest tenth."""
MAX_GAPS = 100
"""Newest gaps of a tool that count."""
MAX_TOOLS = 4096
"""Tools of all tenants; the least recently seen are forgotten."""


class GapEstimates:
    """The newest gaps of each tenant's tools, in seconds."""

    def __init__(self) -> None:
        self._gaps: OrderedDict[tuple[bytes, str], deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._gaps)

    def observe(self, tenant_salt: bytes, tools: Collection[str], gap_s: float) -> None:
        """A turn that called `tools` was answered after `gap_s` seconds.

        Of several tools the one that is expected to be slowest made the turn wait.
        """
        if not tools:
            return
        key = (tenant_salt, max(tools, key=lambda tool: self._nine_of_ten(tenant_salt, tool)))
        self._gaps.setdefault(key, deque(maxlen=MAX_GAPS)).append(gap_s)
        self._gaps.move_to_end(key)
        if len(self._gaps) > MAX_TOOLS:
            self._gaps.popitem(last=False)

    def expected(self, tenant_salt: bytes, tools: Collection[str]) -> float:
        """Seconds within which a turn that called `tools` is answered nine times of ten.

        They run side by side, so the slowest counts.
        """
        return max((self._nine_of_ten(tenant_salt, tool) for tool in tools), default=FIRST_S)

    def median(self, tenant_salt: bytes, tools: Collection[str]) -> float:
        """Seconds within which it is answered every second time."""
        medians = (self._quantile(tenant_salt, tool, 0.5, FIRST_MEDIAN_S) for tool in tools)
        return max(medians, default=FIRST_MEDIAN_S)

    def _nine_of_ten(self, tenant_salt: bytes, tool: str) -> float:
        return self._quantile(tenant_salt, tool, QUANTILE, FIRST_S)

    def _quantile(self, tenant_salt: bytes, tool: str, quantile: float, first_s: float) -> float:
        gaps = self._gaps.get((tenant_salt, tool), ())
        if len(gaps) < MIN_GAPS:
            return first_s
        return sorted(gaps)[math.ceil(quantile * len(gaps)) - 1]
