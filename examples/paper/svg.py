"""A chart as SVG text: points, lines, axes with round ticks and a legend. No dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8f6bb3", "#c77d0a")
WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 34, 46


@dataclass(frozen=True)
class Series:
    """What has one colour and one name: ``style`` is ``dots``, ``line`` or ``dashed``."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: str = "dots"


def chart(title: str, x_name: str, y_name: str, series: Sequence[Series]) -> str:
    """Return a chart of ``series``, both axes from 0."""
    x_ticks = ticks(max(x for each in series for x, _ in each.points))
    y_ticks = ticks(max(y for each in series for _, y in each.points))

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_ticks[-1] * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(WIDTH / 2, 18, title, size=13),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name),
        _text(14, (TOP + HEIGHT - BOTTOM) / 2, y_name, turn=True),
    ]
    for tick in x_ticks:
        x, y = at(tick, 0)
        parts.append(_text(x, y + 16, f"{tick:g}"))
    for tick in y_ticks:
        x, y = at(0, tick)
        parts.append(f'<line x1="{x}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 6, y + 4, f"{tick:g}", anchor="end"))
    for row, each in enumerate(series):
        colour = COLOURS[each.colour % len(COLOURS)]
        parts += _drawn([at(x, y) for x, y in each.points], colour, each.style)
        y = TOP + 12 + 15 * row
        parts += _drawn([(LEFT + 10, y - 4), (LEFT + 30, y - 4)], colour, each.style)
        parts.append(_text(LEFT + 38, y, each.name, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least ``most``, about five of them."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(most / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= most)
    return [round(i * step, 10) for i in range(math.ceil(most / step) + 1)]


def _drawn(points: Sequence[tuple[float, float]], colour: str, style: str) -> list[str]:
    if style == "dots":
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if style == "dashed" else ""
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>']


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "middle", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turned}>{escape(text)}</text>'
