"""Small charts as inline SVG; colours and dashes come from the page's style by the classes `v-VOICE`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

Point = tuple[float, float]
WIDTH, HEIGHT, ROW = 320, 180, 24
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 10, 24


def line_chart(label: str, series: Mapping[str, Sequence[Point]]) -> Markup:
    """Lines over training steps, one for each voice; `label` tells who cannot see it what is drawn.

    Every voice needs at least one point.
    """
    points = [point for line in series.values() for point in line]
    across, up = ticks([x for x, _ in points], 5), ticks([y for _, y in points], 4)
    to_x, to_y = _scale(across, LEFT, WIDTH - RIGHT), _scale(up, HEIGHT - BOTTOM, TOP)
    marks = [_line(LEFT, to_y(y), WIDTH - RIGHT, to_y(y), "grid") for y in up]
    marks += [_text(LEFT - 6, to_y(y) + 4, f"{y:g}", "end") for y in up]
    marks += [_text(to_x(x), HEIGHT - 6, f"{x:g}", "middle") for x in across]
    for voice, line in series.items():
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line)
        marks.append(Markup('<polyline class="v-{}" points="{}"/>').format(voice, path))
        if len(line) < 12:
            marks += [_dot(to_x(x), to_y(y), voice) for x, y in line]
    ends = "; ".join(f"{voice} from {line[0][1]:.3g} to {line[-1][1]:.3g}" for voice, line in series.items())
    return _svg(HEIGHT, f"{label}: {ends}", marks)


def interval_chart(label: str, rows: Mapping[str, tuple[float, float, float]]) -> Markup:
    """A row for each voice, given as (low, difference, high): a dot on its interval, and a line where 0 is."""
    height = TOP + ROW * len(rows) + BOTTOM
    across = ticks([0.0, *(value for row in rows.values() for value in row)], 5)
    to_x = _scale(across, LEFT, WIDTH - RIGHT)
    marks = [_line(to_x(x), TOP, to_x(x), height - BOTTOM, "grid" if x else "zero") for x in across]
    marks += [_text(to_x(x), height - 6, f"{x:g}", "middle") for x in across]
    for index, (voice, (low, middle, high)) in enumerate(rows.items()):
        y = TOP + ROW * (index + 0.5)
        marks += [_text(LEFT - 6, y + 4, voice, "end"), _line(to_x(low), y, to_x(high), y, f"v-{voice}"),
                  _dot(to_x(middle), y, voice)]
    told = "; ".join(f"{voice} {middle:+.3g}, from {low:+.3g} to {high:+.3g}"
                     for voice, (low, middle, high) in rows.items())
    return _svg(height, f"{label}: {told}", marks)


def ticks(values: Sequence[float], most: int) -> list[float]:
    """At most `most` + 2 round numbers, evenly spaced, that span the values; two at least."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if high - low <= 1e-9 * max(largest, 1e-3):  # equal but for rounding: no ticks could tell them apart
        half = max(largest, 1e-6) / 2 if largest else 0.5
        low, high = low - half, high + half
    rough = (high - low) / most
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(index * step, 12) for index in range(first, last + 1)]


def _scale(across: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """From values between the first and last tick to places between `start` and `end`."""
    low, high = across[0], across[-1]
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _svg(height: float, label: str, marks: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, label, Markup("").join(marks))


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> Markup:
    return Markup(f'<line class="{escape(name)}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')


def _dot(x: float, y: float, voice: str) -> Markup:
    return Markup(f'<circle class="v-{escape(voice)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')
