"""Draws the charts of the HTML page as inline SVG: colours come from the page's CSS, so they follow light and dark.

Modes differ in marker, line and hatching as well as in colour. A drawing is `WIDTH` units wide and scales with its
column; its text is large enough to read on a phone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vitgraph.records.stats import P99_MIN_SAMPLES, FloatArray

WIDTH = 440
MARKERS = (
    '<svg class="defs" aria-hidden="true"><defs>'
    '<marker id="m-eager" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" refX="4.5" refY="4.5">'
    '<circle class="m-eager" cx="4.5" cy="4.5" r="3"/></marker>'
    '<marker id="m-graph" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" refX="4.5" refY="4.5">'
    '<path class="m-graph" d="M4.5 0.8L8.2 7.6H0.8z"/></marker>'
    '<marker id="m-miss" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" refX="4.5" refY="4.5">'
    '<path class="m-miss" d="M1.3 1.3L7.7 7.7M7.7 1.3L1.3 7.7"/></marker>'
    '<marker id="m-monolithic" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" refX="4.5" refY="4.5">'
    '<path class="m-monolithic" d="M1.3 1.3H7.7V7.7H1.3z"/></marker>'
    '<pattern id="p-waste" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="p-ground" width="6" height="6"/><rect class="p-line" width="2.6" height="6"/></pattern>'
    "</defs></svg>"
)
"""Markers and hatching that the charts refer to; stands once in a page."""

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 300, 56, 10, 14, 50
_LOG_SPAN = 4.0
_BUDGET_REACH = 1.5
_MOST_TICKS = 7
_BAR_ROW, _BAR_HEIGHT = 24, 15


@dataclass(frozen=True, slots=True)
class Series:
    """Latencies of one mode or run.

    Attributes:
        label: Name in the legend.
        style: CSS class of its line and markers: `eager`, `graph` and `monolithic`, or `first` and `second`.
        times_ms: Milliseconds a request; shape `[n]`.
    """

    label: str
    style: str
    times_ms: FloatArray


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to one axis of the drawing.

    Attributes:
        low: Value at `start`.
        high: Value at `stop`.
        start: Position of `low` in drawing units.
        stop: Position of `high`.
        is_log: Logarithmic instead of linear.
    """

    low: float
    high: float
    start: float
    stop: float
    is_log: bool

    @classmethod
    def over(cls, values: FloatArray, start: float, stop: float, *, from_zero: bool = False) -> _Scale:
        """Logarithmic where the values span enough for that, with a little room at both ends."""
        low, high = float(np.min(values)), float(np.max(values))
        if low > 0 and high >= _LOG_SPAN * low:
            return cls(low / 1.15, high * 1.15, start, stop, True)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(0.0 if from_zero and low >= 0 else low - room, high + room, start, stop, False)

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values within the axis, few enough to label."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1, 2, 5), (1, 3), (1,)):
                ticks = [factor * 10.0**power for power in powers for factor in factors]
                ticks = [tick for tick in ticks if self.low <= tick <= self.high]
                if len(ticks) <= _MOST_TICKS:
                    break
            return ticks
        step = 10.0 ** math.floor(math.log10(self.high - self.low))
        steps = [step * factor for factor in (0.1, 0.2, 0.5, 1, 2)]
        step = next(size for size in steps if (self.high - self.low) / size <= _MOST_TICKS)
        first = math.ceil(self.low / step)
        return [round(index * step, 10) for index in range(first, math.floor(self.high / step) + 1)]


def latency_by_tokens(
    tokens: FloatArray,
    eager_ms: FloatArray,
    graph_ms: FloatArray,
    has_miss: FloatArray,
    budgets: Sequence[int],
    monolithic_ms: FloatArray | None = None,
) -> str:
    """Scatter of a request's latency over its output tokens, with the token budgets as vertical lines.

    Args:
        tokens: Output tokens of each request; shape `[n]`, like all of the next.
        eager_ms: Milliseconds a request in eager mode.
        graph_ms: Milliseconds a request in graph mode.
        has_miss: Not 0 where an item of the request ran eagerly in graph mode.
        budgets: Token budgets that were captured.
        monolithic_ms: Milliseconds a request with monolithic graphs; None where they were not measured.
    """
    whole_ms = eager_ms[:0] if monolithic_ms is None else monolithic_ms
    x = _Scale.over(tokens, _LEFT, WIDTH - _RIGHT)
    y = _Scale.over(np.concatenate([eager_ms, graph_ms, whole_ms]), _HEIGHT - _BOTTOM, _TOP, from_zero=True)
    reach = _BUDGET_REACH * float(np.max(tokens))
    lines = [budget for budget in budgets if x.low <= budget <= min(reach, x.high)]
    parts = [
        *_axes(x, y, "Output tokens a request", "Latency a request (ms)"),
        *(f'<path class="budget" d="M{x(budget):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>' for budget in lines),
    ]
    replayed = np.asarray(has_miss) == 0
    groups = (
        ("eager", tokens, eager_ms),
        ("graph", tokens[replayed], graph_ms[replayed]),
        ("miss", tokens[~replayed], graph_ms[~replayed]),
        ("monolithic", tokens[: whole_ms.size], whole_ms),
    )
    for style, xs, ys in groups:
        points = " ".join(_distinct(f"{x(a):.0f},{y(b):.0f}" for a, b in zip(xs, ys, strict=True)))
        if points:
            marker = f"url(#m-{style})"
            parts.append(
                f'<polyline class="points" points="{points}" marker-start="{marker}" marker-mid="{marker}" '
                f'marker-end="{marker}"/>'
            )
    entries = [("m-eager", "eager"), ("m-graph", "graph")]
    entries += [("m-miss", "graph, with an eager fallback")] if not replayed.all() else []
    entries += [("m-monolithic", "monolithic")] if whole_ms.size else []
    entries += [("budget", "token budget")] if lines else []
    label = (
        f"Latency of each request over its output tokens, eager and graph{' and monolithic' if whole_ms.size else ''}"
    )
    return _figure("Latency by tokens", label, _HEIGHT, parts, entries)


def latency_distribution(series: Sequence[Series], title: str = "Latency distribution") -> str:
    """Cumulative share of requests over latency, with mean and P99 (or the maximum) marked on each line."""
    x = _Scale.over(np.concatenate([one.times_ms for one in series]), _LEFT, WIDTH - _RIGHT, from_zero=True)
    y = _Scale(0.0, 103.0, _HEIGHT - _BOTTOM, _TOP, False)
    parts = _axes(x, y, "Latency a request (ms)", "Share of requests (%)")
    tail_name = "max"
    for one in series:
        ordered = np.sort(one.times_ms)
        n = ordered.size
        steps = [f"{x(time_ms):.0f},{y(100 * (index + 1) / n):.0f}" for index, time_ms in enumerate(ordered)]
        start = f"{x(float(ordered[0])):.0f},{y(0):.0f}"
        parts.append(f'<polyline class="line {one.style}" points="{" ".join(_distinct([start, *steps]))}"/>')
        tail_name, tail = ("P99", float(np.percentile(ordered, 99))) if n >= P99_MIN_SAMPLES else ("max", ordered[-1])
        for time_ms, shape in ((float(np.mean(ordered)), _dot), (float(tail), _diamond)):
            height = 100 * float(np.mean(ordered <= time_ms))
            parts.append(shape(x(time_ms), y(height), one.style))
    entries = [(f"line {one.style}", one.label) for one in series]
    entries += [("dot", "mean"), ("diamond", tail_name)]
    return _figure(title, f"{title}: cumulative share of requests over latency", _HEIGHT, parts, entries)


def budget_bars(names: Sequence[str], items: Sequence[int], waste_pct: Sequence[float]) -> str:
    """Items and waste of each token budget, side by side; one row a budget."""
    top, left, gap = 30, 12 + 7.5 * max(map(len, names)), 58
    half = (WIDTH - left - 2 * gap) / 2
    waste_left = left + half + gap
    most = max(items)
    parts = [
        f'<text x="{left:.0f}" y="16" class="strong">Items replayed</text>',
        f'<text x="{waste_left:.0f}" y="16" class="strong">Waste (%)</text>',
    ]
    for row, (name, count, waste) in enumerate(zip(names, items, waste_pct, strict=True)):
        y = top + row * _BAR_ROW
        base = y + _BAR_HEIGHT - 3
        parts += [
            f'<text x="{left - 8:.0f}" y="{base}" class="end">{html.escape(name)}</text>',
            _bar("b-graph", left, y, half * count / most),
            f'<text x="{left + half * count / most + 5:.0f}" y="{base}">{count}</text>',
            _bar("b-waste", waste_left, y, half * waste / 100),
            f'<text x="{waste_left + half * waste / 100 + 5:.0f}" y="{base}">{waste:.0f}</text>',
        ]
    height = top + len(names) * _BAR_ROW
    return _figure("Items and waste by token budget", "Items and waste of each token budget", height, parts, [])


def outcome_bars(outcomes: Sequence[tuple[str, int]]) -> str:
    """Items that hit, and items that missed by reason; the first row is the hits."""
    total = sum(count for _, count in outcomes)
    left = 12 + 7.2 * max(len(name) for name, _ in outcomes)
    room = WIDTH - left - 108
    parts = []
    for row, (name, count) in enumerate(outcomes):
        y = 4 + row * _BAR_ROW
        length = room * count / total
        parts += [
            f'<text x="{left - 8:.0f}" y="{y + 12}" class="end">{html.escape(name)}</text>',
            _bar("b-graph" if row == 0 else "b-eager", left, y, length),
            f'<text x="{left + length + 5:.0f}" y="{y + 12}">{count} ({100 * count / total:.1f}%)</text>',
        ]
    height = 4 + len(outcomes) * _BAR_ROW
    return _figure("Hits and misses", "Items that hit, and items that missed by reason", height, parts, [])


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference to draw.

    Attributes:
        label: Its row's name.
        style: `eager` or `graph`.
        delta_pct: The difference in percent.
        ci95: Its interval; None draws the point alone.
        floor_pct: Noise floor; None draws none.
    """

    label: str
    style: str
    delta_pct: float
    ci95: tuple[float, float] | None
    floor_pct: float | None


def interval_rows(intervals: Sequence[Interval]) -> str:
    """Differences with their 95 % intervals, one row each, over the band of the noise floor."""
    top, row_height, left = 6, 34, 12 + 8 * max(len(one.label) for one in intervals)
    bottom = top + row_height * len(intervals)
    ends = [0.0]
    for one in intervals:
        ends += [one.delta_pct, *(one.ci95 or ()), *((-one.floor_pct, one.floor_pct) if one.floor_pct else ())]
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    x = _Scale(min(ends) - room, max(ends) + room, left, WIDTH - _RIGHT, False)
    parts = []
    for row, one in enumerate(intervals):
        y = top + row * row_height + row_height / 2
        if one.floor_pct is not None:
            start, stop = x(-one.floor_pct), x(one.floor_pct)
            parts.append(
                f'<rect class="floor" x="{start:.1f}" y="{y - 13:.1f}" width="{stop - start:.1f}" height="26"/>'
            )
        if one.ci95 is not None:
            low, high = (x(end) for end in one.ci95)
            parts.append(
                f'<path class="line solid {one.style}" d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 5}V{y + 5}'
                f'M{high:.1f} {y - 5}V{y + 5}"/>'
            )
        parts.append((_diamond if one.style == "eager" else _dot)(x(one.delta_pct), y, one.style))
        parts.append(f'<text x="{left - 8:.0f}" y="{y + 5}" class="end">{html.escape(one.label)}</text>')
    parts.append(f'<path class="zero" d="M{x(0):.1f} {top}V{bottom}"/>')
    parts += _x_axis(x, bottom, "Second run against first (%), negative = second faster")
    entries = [("dot", "graph"), ("diamond", "eager"), ("floor", "noise floor")]
    label = "Differences of the two runs with their 95 % intervals"
    return _figure("Differences with 95% intervals", label, bottom + 46, parts, entries)


def _figure(title: str, label: str, height: float, parts: Sequence[str], entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(f"<li>{_key(style)}{html.escape(name)}</li>" for style, name in entries)
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{legend}"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _key(style: str) -> str:
    drawings: dict[str, str] = {
        "m-eager": '<circle class="m-eager" cx="11" cy="7" r="4"/>',
        "m-graph": '<path class="m-graph" d="M11 1.5L16 12.5H6z"/>',
        "m-miss": '<path class="m-miss" d="M6.5 2.5L15.5 11.5M15.5 2.5L6.5 11.5"/>',
        "m-monolithic": '<path class="m-monolithic" d="M6.5 2.5H15.5V11.5H6.5z"/>',
        "budget": '<path class="budget" d="M11 0V14"/>',
        "floor": '<rect class="floor" y="2" width="22" height="10"/>',
        "dot": _dot(11, 7, "plain"),
        "diamond": _diamond(11, 7, "plain"),
    }
    drawing = drawings.get(style, f'<path class="{style}" d="M0 7H22"/>')
    return f'<svg class="key" viewBox="0 0 22 14" aria-hidden="true">{drawing}</svg>'


def _axes(x: _Scale, y: _Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y(tick) + 4:.1f}" class="end">{tick:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text class="middle" transform="translate(13 {middle:.0f}) rotate(-90)">{y_label}</text>')
    return [*parts, *_x_axis(x, _HEIGHT - _BOTTOM, x_label)]


def _x_axis(x: _Scale, y: float, label: str) -> list[str]:
    parts = [f'<path class="axis" d="M{x.start:.1f} {y:.1f}H{x.stop:.1f}"/>']
    for tick in x.ticks():
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {y:.1f}v4"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{y + 18:.1f}" class="middle">{tick:g}</text>')
    parts.append(f'<text x="{(x.start + x.stop) / 2:.0f}" y="{y + 39:.1f}" class="middle">{label}</text>')
    return parts


def _bar(style: str, x: float, y: float, length: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{max(length, 0):.1f}" height="{_BAR_HEIGHT}"/>'


def _dot(x: float, y: float, style: str) -> str:
    return f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def _diamond(x: float, y: float, style: str) -> str:
    return f'<path class="mark {style}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'


def _distinct(points: Iterable[str]) -> list[str]:
    """The points without those that fall on one already drawn, so that a page does not grow with the requests."""
    return list(dict.fromkeys(points))
