"""Bars, sparklines and braille curves as lines of text: no state, no canvas that outlives a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from rich.text import Text

from ft_insight.run_view import Points
from ft_insight.tui.widgets.text import CURVE, FAINT, MARK, QUIET, SPARK, TRACK
from ft_insight.units import significant

_LEVELS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True, slots=True)
class Layer:
    """Points of one look in a chart; later layers lie above earlier ones."""

    points: Points
    style: str = CURVE
    joined: bool = True
    sign: str = ""
    """Drawn in the cell of every point, instead of dots."""


@dataclass(frozen=True, slots=True)
class Axis:
    """How values are written, and the ends of the axis where the data shall not choose them."""

    text: Callable[[float], str]
    low: float | None = None
    high: float | None = None


def tick(value: float) -> str:
    """Write a round value shortly: ``0.5``, ``20``."""
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def bar(fraction: float, width: int, style: str = CURVE, mark: float | None = None) -> Text:
    """Draw a horizontal bar on a quiet track, with an optional mark at another fraction."""
    full, half = divmod(round(min(1.0, max(0.0, fraction)) * width * 2), 2)
    line = Text("━" * full + "╸" * half, style)
    line.append("━" * (width - full - half), TRACK)
    if mark is not None and width > 2:
        at = min(width - 1, int(mark * width))
        line = line[:at] + Text("│", MARK) + line[at + 1 :]
    return line


def spark(points: Points, width: int, low: float | None = 0.0, high: float | None = None) -> Text:
    """Draw a curve in one line; its scale ends at the least and greatest value where none is given."""
    values = _buckets([y for _, y in points], width)
    if not values:
        return Text()
    bottom = min(values) if low is None else low
    span = (max(values) if high is None else high) - bottom
    levels = [round((v - bottom) / span * 7) if span > 0 else 3 for v in values]
    return Text("".join(_LEVELS[max(0, min(7, n))] for n in levels), SPARK)


def _buckets(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count > 0 else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def columns(fractions: Sequence[float], height: int, cell: int, styles: Sequence[str]) -> list[Text]:
    """Draw vertical bars, one of ``cell`` columns per value; fractions are of the full height."""
    lines = []
    for row in range(height - 1, -1, -1):
        line = Text()
        for value, style in zip(fractions, styles, strict=True):
            eighths = max(0, min(8, round(value * height * 8) - row * 8))
            block = " " if not eighths else _LEVELS[eighths - 1]
            line.append(block * max(1, cell - 1) + (" " if cell > 1 else ""), style)
        lines.append(line)
    return lines


def split(shares: Sequence[float], width: int) -> list[int]:
    """Share out ``width`` cells by largest remainder, so that they always add up."""
    whole = sum(shares)
    exact = [s / whole * width if whole > 0 else 0.0 for s in shares]
    cells = [int(e) for e in exact]
    order = sorted(range(len(exact)), key=lambda i: cells[i] - exact[i])
    for i in order[: (width - sum(cells)) if whole > 0 else 0]:
        cells[i] += 1
    return cells


def smooth(points: Points, part: int = 12) -> Points:
    """Return the running mean over about 1/``part`` of the curve: the trend under the noise."""
    half = len(points) // (2 * part)
    if not half:
        return points
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    last = len(points)
    spans = [(max(0, i - half), min(last, i + half + 1)) for i in range(last)]
    return tuple((points[i][0], (sums[b] - sums[a]) / (b - a)) for i, (a, b) in enumerate(spans))


def trend(points: Points) -> list[Layer]:
    """Return the layers of a noisy curve: each point faint, the running mean bright above."""
    return [Layer(points, FAINT), Layer(smooth(points))]


def chart(layers: Sequence[Layer], width: int, height: int, y: Axis, x: Axis) -> list[Text]:
    """Draw curves with a value axis at the left and the ends of the other below; [] without room for it."""
    points = [p for layer in layers for p in layer.points]
    if not points or height < 3 or width < 24:
        return []
    rows = height - 1
    low, high = _range([p[1] for p in points], y)
    left, right = _range([p[0] for p in points], x)
    labels = _tick_rows(low, high, rows, y.text)
    margin = max((len(text) for text in labels.values()), default=0)
    canvas = _Canvas(width - margin - 1, rows)
    for layer in layers:
        canvas.draw(layer, (left, right), (low, high))
    lines = [
        Text(f"{labels.get(row, '').rjust(margin)}{'┤' if row in labels else '│'}", QUIET) + canvas.line(row)
        for row in range(rows)
    ]
    first, last = x.text(left), x.text(right)
    ends = f"{first}{last.rjust(max(1, width - margin - 1 - len(first)))}"
    return [*lines, Text(" " * (margin + 1) + ends, QUIET)]


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if high <= low:
        pad = abs(high) * 0.05 or 0.5
        return (low if axis.low is not None else low - pad), low + pad
    return low, high


def _tick_rows(low: float, high: float, rows: int, text: Callable[[float], str]) -> dict[int, str]:
    wanted = max(1, min(4, rows // 2))
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.75)
    found = {}
    value = math.ceil(low / step - 1e-9) * step
    while value <= high + step * 1e-9:
        row = rows - 1 - min(rows - 1, int((value - low) / (high - low) * rows))
        found[row] = text(0.0 if abs(value) < step * 1e-9 else value)
        value += step
    return found


class _Canvas:
    """Braille cells of 2 by 4 dots, each in the style of the last layer that touched it."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = width, height
        self._cells: list[dict[int, tuple[int, str]]] = [{} for _ in range(height)]
        self._signs: dict[tuple[int, int], tuple[str, str]] = {}

    def draw(self, layer: Layer, x: tuple[float, float], y: tuple[float, float]) -> None:
        wide, high = self._width * 2 - 1, self._height * 4 - 1
        dots = [
            (round((px - x[0]) / (x[1] - x[0]) * wide), high - round((py - y[0]) / (y[1] - y[0]) * high))
            for px, py in layer.points
        ]
        if layer.sign:
            self._signs.update({(y // 4, x // 2): (layer.sign, layer.style) for x, y in dots})
        elif not layer.joined or len(dots) == 1:
            for dot in dots:
                self._dot(*dot, layer.style)
        else:
            for a, b in pairwise(dots):
                self._stroke(a, b, layer.style)

    def _stroke(self, a: tuple[int, int], b: tuple[int, int], style: str) -> None:
        length = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
        for i in range(length + 1):
            self._dot(a[0] + round((b[0] - a[0]) * i / length), a[1] + round((b[1] - a[1]) * i / length), style)

    def _dot(self, x: int, y: int, style: str) -> None:
        if 0 <= x < self._width * 2 and 0 <= y < self._height * 4:
            row = self._cells[y // 4]
            row[x // 2] = (row.get(x // 2, (0, ""))[0] | _DOTS[y % 4][x % 2], style)

    def line(self, row: int) -> Text:
        cells = [self._cell(row, x) for x in range(self._width)]
        runs = groupby(cells, key=itemgetter(1))
        return Text.assemble(*(("".join(sign for sign, _ in run), style) for style, run in runs))

    def _cell(self, row: int, x: int) -> tuple[str, str]:
        if (row, x) in self._signs:
            return self._signs[row, x]
        bits, style = self._cells[row].get(x, (0, ""))
        return (chr(0x2800 + bits), style) if bits else (" ", "")
