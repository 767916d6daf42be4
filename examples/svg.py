"""Figures as SVG text: points and lines over two axes, and stacked bars. Two shapes and text are all that they need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from xml.sax.saxutils import escape

COLOURS = ("#3b6ea8", "#e0813c", "#5b9a57", "#b8505f", "#8a6fb0", "#b59b3a", "#4aa3a8", "#8c8c8c", "#c9c9c9")
WIDTH, HEIGHT = 460, 260
"""Of what is drawn, without axes, names and the legend."""
EDGE = 60
LABELS, BAR, GAP = 250, 18, 8
SWATCH = 20
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """What has one name: ``style`` is any of ``dots``, ``line`` and ``dashed``, in words."""

    name: str
    points: Points
    colour: int = 0
    style: str = "dots"


def chart(title: str, x_name: str, y_name: str, series: Sequence[Series]) -> str:
    """Return a chart of ``series``, both axes from 0, with the legend above it."""
    entries = [(each.name, [_drawn([(0, 0), (SWATCH, 0)], each)]) for each in series]
    body, top = _legend(entries, EDGE + WIDTH)
    every = list(chain.from_iterable(each.points for each in series))
    x_ticks, y_ticks = (ticks(max((point[axis] for point in every), default=0.0)) for axis in (0, 1))
    bottom = top + HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return EDGE + x / x_ticks[-1] * WIDTH, bottom - y / y_ticks[-1] * HEIGHT

    for tick in x_ticks:
        body.append(_text(at(tick, 0)[0], bottom + 16, f"{tick:g}"))
    for tick in y_ticks:
        y = at(0, tick)[1]
        body.append(f'<line x1="{EDGE}" x2="{EDGE + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(_text(EDGE - 6, y + 4, f"{tick:g}", anchor="end"))
    body += [_drawn([at(x, y) for x, y in sorted(each.points)], each) for each in series]
    body.append(_text(EDGE + WIDTH / 2, bottom + 36, x_name))
    body.append(_text(16, top + HEIGHT / 2, y_name, turn=True))
    return _document(title, body, EDGE + WIDTH + EDGE / 3, bottom + 48)


def stacked(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return one bar per entry, from 0 to 100%, made of named shares of 1."""
    names = list(dict.fromkeys(chain.from_iterable(bars.values())))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    swatches = [(name, [f'<rect y="-6" width="12" height="12" fill="{colour}"/>']) for name, colour in colours.items()]
    body, top = _legend(swatches, LABELS + WIDTH + EDGE)
    for label, parts in bars.items():
        body.append(_text(LABELS - 8, top + 13, label, anchor="end"))
        x = float(LABELS)
        for name, share in parts.items():
            said = escape(f"{label}: {name} {share:.1%}")
            width = WIDTH * share
            body.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}">'
                f"<title>{said}</title></rect>"
            )
            if share >= 0.08:
                body.append(_text(x + width / 2, top + 13, f"{share:.0%}", colour="#fff"))
            x += width
        top += BAR + GAP
    return _document(title, body, LABELS + WIDTH + EDGE, top)


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least ``most``, about five of them."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(most / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= most)
    return [round(i * step, 10) for i in range(math.ceil(most / step) + 1)]


def _drawn(places: Points, series: Series) -> str:
    colour = COLOURS[series.colour % len(COLOURS)]
    drawn = []
    if "line" in series.style or "dashed" in series.style:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if "dashed" in series.style else ""
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    if "dots" in series.style:
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in places]
    return "".join(drawn)


def _legend(entries: Sequence[tuple[str, Sequence[str]]], width: float) -> tuple[list[str], int]:
    """Return the legend's rows within ``width``, and where they end."""
    body, x, y = [], 10, 42
    for name, swatch in entries:
        wide = SWATCH + 22 + 7 * len(name)
        if x > 10 and x + wide > width:
            x, y = 10, y + 18
        body.append(f'<g transform="translate({x} {y})">{"".join(swatch)}</g>')
        body.append(_text(x + SWATCH + 10, y + 4, name, anchor="start"))
        x += wide
    return body, y + 24


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "#444", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{turned}>{escape(text)}</text>'


def _document(title: str, body: Sequence[str], width: float, height: float) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'font-family="sans-serif" font-size="12">',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            f'<text x="10" y="22" font-size="15" fill="#222">{escape(title)}</text>',
            *body,
            "</svg>\n",
        )
    )
