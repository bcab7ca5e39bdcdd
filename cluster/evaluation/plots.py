"""How does a table look as a line chart? SVG, written without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ripresa.cluster.evaluation.bootstrap import Estimate

_WIDTH, _HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 232, 40, 56
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people who see few colours can tell apart."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; a place without a value is left out."""

    name: str
    values: Sequence[Estimate | None]


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    places: Sequence[str],
    lines: Sequence[Line],
    lowest: float | None = None,
) -> str:
    """A chart with an interval at every point that has one.

    Args:
        places: on the x axis, equally far apart.
        lowest: the y axis is logarithmic and ends there, and what lies below is drawn there; None
            for a linear one from 0.

    Raises:
        ValueError: there is no value to draw.
    """
    values = [_ends(v) for line in lines for v in line.values if v is not None]
    if not values:
        raise ValueError("a chart needs a value")
    scale = _Scale(min(low for low, _ in values), max(high for _, high in values), lowest)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, title, size=14),
        *_axes(scale, x_name, y_name, places),
    ]
    for number, line in enumerate(lines):
        # Neighbours are a little apart, so that their intervals can be told apart.
        shift = 4 * (number - (len(lines) - 1) / 2)
        parts += _drawn(line, _COLORS[number % len(_COLORS)], scale, len(places), shift)
        y = _TOP + 10 + 18 * number
        x = _WIDTH - _RIGHT + 16
        color = _COLORS[number % len(_COLORS)]
        parts.append(f'<path d="M{x} {y}h18" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(x + 24, y + 4, line.name))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Values to heights."""

    def __init__(self, low: float, high: float, lowest: float | None) -> None:
        self._lowest = lowest
        if lowest is None:
            low = min(low, 0.0)
            high = max(high, 0.0)
            step = _nice_step((high - low) or 1.0)
            first, last = math.floor(low / step), math.ceil(high / step)
            self.ticks = [step * n for n in range(first, max(last, first + 1) + 1)]
        else:
            last = max(math.ceil(math.log10(max(high, 10 * lowest))), 1 + _exponent(lowest))
            self.ticks = [10.0**n for n in range(_exponent(lowest), last + 1)]
        self._ends = self._at(self.ticks[0]), self._at(self.ticks[-1])

    def y(self, value: float) -> float:
        low, high = self._ends
        share = (self._at(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _at(self, value: float) -> float:
        return value if self._lowest is None else math.log10(max(value, self._lowest))

    def label(self, tick: float) -> str:
        if self._lowest is None:
            return f"{tick:.10g}"
        return f"{'≤ ' if tick == self.ticks[0] else ''}1e{round(math.log10(tick))}"


def _exponent(lowest: float) -> int:
    return round(math.log10(lowest))


def _nice_step(extent: float) -> float:
    """1, 2 or 5 times a power of ten, so that an axis has 4 to 10 steps."""
    power = 10.0 ** math.floor(math.log10(extent / 4))
    return max(step for step in (power, 2 * power, 5 * power) if step <= extent / 4 * 1.0000001)


def _x(place: int, num_places: int) -> float:
    inner = _WIDTH - _LEFT - _RIGHT
    return _LEFT + inner * (place + 0.5) / num_places


def _axes(scale: _Scale, x_name: str, y_name: str, places: Sequence[str]) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, scale.label(tick), anchor="end"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="black" fill="none"/>')
    for number, place in enumerate(places):
        parts.append(_text(_x(number, len(places)), bottom + 18, place, anchor="middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 40, x_name, anchor="middle"))
    middle = (_TOP + bottom) / 2
    turned = f' transform="rotate(-90 16 {middle:.1f})"'
    parts.append(_text(16, middle, y_name, anchor="middle", attributes=turned))
    return parts


def _drawn(line: Line, color: str, scale: _Scale, num_places: int, shift: float) -> list[str]:
    points = [
        (_x(place, num_places) + shift, value)
        for place, value in enumerate(line.values)
        if value is not None
    ]
    path = " ".join(f"{x:.1f},{scale.y(value.mean):.1f}" for x, value in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>']
    for x, value in points:
        low, high = (scale.y(end) for end in _ends(value))
        y = scale.y(value.mean)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{color}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    return parts


def _ends(value: Estimate) -> tuple[float, float]:
    if value.low is None or value.high is None:
        return value.mean, value.mean
    return value.low, value.high


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, attributes: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{attributes}>'
        f"{escape(text)}</text>"
    )
