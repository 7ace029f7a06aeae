"""Line charts and stacked bars as inline SVG, without scripts: values show on hover through ``<title>``.

Colours come from the page's CSS (classes s0, s1, ... and the dash patterns beside them), so that light and dark mode
and printing need no second drawing. Everything that comes from data is escaped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from luspo_megatron.report.axis import Axis, linear_axis, log_axis, step_axis, tick_labels
from luspo_megatron.report.binning import Bin, Point

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 34
MARKERS_UP_TO = 40
DASHES = ("", "6 3", "2 3", "8 3 2 3", "", "6 3", "2 3")
LOG_FROM_RATIO = 50.0
COLOURS = 8  # of page_style.py; more series than these share colours and differ in dashes


@dataclass(frozen=True)
class Series:
    """One line of a chart: its label, its points (one per bin) and how to write a value."""

    label: str
    points: Sequence[Point | None]
    text: Callable[[float], str]


def line_chart(groups: Sequence[Bin], series: Sequence[Series], *, title: str, percent: bool = False,
               from_zero: bool = True, may_log: bool = False, range_of_steps: tuple[int, int] | None = None) -> str:
    """Lines with a band from the lowest to the highest value of each bin, and error bars where points have them.

    ``may_log``: a logarithmic axis when all values are positive and spread over a factor of LOG_FROM_RATIO.
    """
    x = _steps(groups, range_of_steps)
    y = _values(series, from_zero, may_log)
    body = [*_frame(x, y, percent)]
    for index, item in enumerate(series):
        line = "".join(_line(groups, item.points, x, y, dash(index, len(groups))))
        body.append(f'<g class="s{index % COLOURS}">{line}</g>')
    body.extend(_hover(groups, series, x))
    return _svg(title, body)


def stacked_bars(groups: Sequence[Bin], series: Sequence[Series], *, title: str,
                 range_of_steps: tuple[int, int] | None = None) -> str:
    """One bar per bin, its parts (the series, from below) stacked; missing points count as 0."""
    tops = [sum(point.mean for item in series if (point := item.points[index])) for index in range(len(groups))]
    first, last = range_of_steps or (groups[0].first, groups[-1].last)
    x = step_axis(first - 0.5, last + 0.5, LEFT, WIDTH - RIGHT)
    y = linear_axis(tops, HEIGHT - BOTTOM, TOP, from_zero=True)
    body = [*_frame(x, y, False)]
    for index, group in enumerate(groups):
        left, right = x(group.first - 0.5), x(group.last + 0.5)
        gap = min(1.0, (right - left) * 0.15)
        width = min(right - left - gap, 60.0)  # one step alone is a bar, not a wall
        left += (right - left - width) / 2
        bottom = 0.0
        for number, item in enumerate(series):
            point = item.points[index]
            if point and point.mean > 0:
                high, low = y(bottom + point.mean), y(bottom)
                bottom += point.mean
                body.append(f'<rect class="s{number % COLOURS} bar" x="{left:.1f}" y="{high:.2f}" width="{width:.2f}" '
                            f'height="{low - high:.2f}"/>')
    body.extend(_hover(groups, list(reversed(series)), x))
    return _svg(title, body)


def dash(index: int, bins: int) -> str:
    """Dash pattern of series ``index``; none in charts of many points, where dashes only look like noise."""
    return DASHES[index % len(DASHES)] if bins <= MARKERS_UP_TO else ""


def swatch(index: int, line_dash: str | None) -> str:
    """The legend's sign for series ``index``: its line with its dashes, or (None) its filled box."""
    if line_dash is not None:
        inner = f'<line x1="1" y1="5" x2="23" y2="5" stroke-dasharray="{line_dash}"/>'
    else:
        inner = '<rect class="bar" x="7" y="0" width="10" height="10"/>'
    return f'<svg class="swatch s{index % COLOURS}" viewBox="0 0 24 10" aria-hidden="true">{inner}</svg>'


def _svg(title: str, body: Sequence[str]) -> str:
    return (f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
            + "".join(body) + "</svg>")


def _steps(groups: Sequence[Bin], range_of_steps: tuple[int, int] | None) -> Axis:
    first, last = range_of_steps or (groups[0].first, groups[-1].last)
    return step_axis(first, last, LEFT + 4, WIDTH - RIGHT - 4)


def _values(series: Sequence[Series], from_zero: bool, may_log: bool) -> Axis:
    points = [point for item in series for point in item.points if point]
    values = [value for point in points for value in (point.low, point.high)]
    values += [value for point in points if point.error is not None
               for value in (point.mean - point.error, point.mean + point.error)]
    if may_log and min(values) > 0 and max(values) / min(values) > LOG_FROM_RATIO:
        return log_axis(values, HEIGHT - BOTTOM, TOP)
    return linear_axis(values, HEIGHT - BOTTOM, TOP, from_zero=from_zero)


def _frame(x: Axis, y: Axis, percent: bool) -> Iterator[str]:
    """Grid, ticks and the name of the step axis."""
    bottom = HEIGHT - BOTTOM
    for tick, label in zip(y.ticks, tick_labels(y, percent), strict=True):
        at = y(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>'
    for tick in x.ticks:
        at = x(tick)
        anchor = "end" if at > WIDTH - RIGHT - 14 else "middle"
        at_text = WIDTH - RIGHT + 4 if anchor == "end" else at
        yield f'<line class="axis" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 4}"/>'
        yield f'<text x="{at_text:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{tick:.0f}</text>'
    yield f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'


def _line(groups: Sequence[Bin], points: Sequence[Point | None], x: Axis, y: Axis, dash: str) -> Iterator[str]:
    """Band, line, markers and error bars; a missing point breaks the line."""
    markers = sum(point is not None for point in points) <= MARKERS_UP_TO
    for run in _runs(points):
        located = [(x(groups[index].x), points[index]) for index in run]
        known = [(at, point) for at, point in located if point]
        if any(point.high > point.low for _, point in known):
            outline = [f"{at:.1f},{y(point.high):.1f}" for at, point in known]
            outline += [f"{at:.1f},{y(point.low):.1f}" for at, point in reversed(known)]
            yield f'<polygon class="band" points="{" ".join(outline)}"/>'
        if len(known) > 1:
            way = " ".join(f"{at:.1f},{y(point.mean):.1f}" for at, point in known)
            yield f'<polyline points="{way}" stroke-dasharray="{dash}"/>'
        for at, point in known:
            if point.error is not None:
                low, high = y(point.mean - point.error), y(point.mean + point.error)
                yield (f'<path d="M{at:.1f} {low:.1f}V{high:.1f}M{at - 3:.1f} {low:.1f}h6M{at - 3:.1f} '
                       f'{high:.1f}h6"/>')
            if markers or len(known) == 1:
                yield f'<circle cx="{at:.1f}" cy="{y(point.mean):.1f}" r="{3 if len(known) == 1 else 2.5}"/>'


def _runs(points: Sequence[Point | None]) -> Iterator[list[int]]:
    """Indices of neighbouring known points."""
    run: list[int] = []
    for index, point in enumerate(points):
        if point is not None:
            run.append(index)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _hover(groups: Sequence[Bin], series: Sequence[Series], x: Axis) -> Iterator[str]:
    """An invisible strip around each bin that tells all its values."""
    centres = [x(group.x) for group in groups]
    edges = [LEFT, *((a + b) / 2 for a, b in zip(centres, centres[1:], strict=False)), WIDTH - RIGHT]
    for index, group in enumerate(groups):
        lines = [group.label]
        for item in series:
            point = item.points[index]
            if point is None:
                continue
            text = f"{item.label}: {item.text(point.mean)}"
            if point.high > point.low:
                text += f" ({item.text(point.low)} to {item.text(point.high)})"
            if point.error is not None:
                low, high = point.mean - point.error, point.mean + point.error
                text += f" (95% interval {item.text(low)} to {item.text(high)})"
            lines.append(text)
        if len(lines) > 1:
            left, width = edges[index], edges[index + 1] - edges[index]
            yield (f'<rect class="hover" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - BOTTOM - TOP}">'
                   f"<title>{escape(chr(10).join(lines))}</title></rect>")
