"""Plain SVG figures: stacked bars, and lines. No library: two shapes and text are all that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain

COLOURS = ("#3b6ea8", "#e0813c", "#5b9a57", "#b8505f", "#8a6fb0", "#b59b3a", "#4aa3a8", "#8c8c8c", "#c9c9c9")
LEFT, WIDTH, RIGHT, BAR, GAP = 250, 460, 60, 18, 8
Points = Sequence[tuple[float, float]]


def stacked(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """Return one bar per entry, from 0 to 100%, made of named shares of 1."""
    names = list(dict.fromkeys(chain.from_iterable(bars.values())))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    body, top = _legend(colours)
    for label, parts in bars.items():
        body.append(_text(LEFT - 8, top + 13, label, "end"))
        x = float(LEFT)
        for name, share in parts.items():
            said = f"{label}: {name} {share:.1%}"
            width = WIDTH * share
            body.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}">'
                f"<title>{escape(said)}</title></rect>"
            )
            if share >= 0.08:
                body.append(_text(x + width / 2, top + 13, f"{share:.0%}", "middle", "#fff"))
            x += width
        top += BAR + GAP
    return _document(title, body, top)


def lines(title: str, ours: Mapping[str, Points], theirs: Mapping[str, Points], x_label: str, y_label: str) -> str:
    """Return curves over a common pair of axes, both from 0; points are marked, and ``theirs`` are dashed."""
    series = {**ours, **theirs}
    body, top = _legend({name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)})
    height, left = 240, 70
    right = LEFT + WIDTH
    every = list(chain.from_iterable(series.values()))
    most_x, most_y = (max((point[axis] for point in every), default=1.0) or 1.0 for axis in (0, 1))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + (right - left) * point[0] / most_x, top + height * (1 - point[1] / most_y)

    body.append(f'<path d="M{left} {top}V{top + height}H{right}" fill="none" stroke="#888"/>')
    for part in (0.0, 0.5, 1.0):
        x, y = place((most_x * part, most_y * part))
        body.append(_text(x, top + height + 16, f"{most_x * part:.3g}", "middle"))
        body.append(_text(left - 6, y + 4, f"{most_y * part:.3g}", "end"))
    body.append(_text((left + right) / 2, top + height + 34, x_label, "middle"))
    body.append(_text(left, top - 6, y_label, "start"))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if name in theirs else ""
        places = [place(point) for point in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return _document(title, body, top + height + 44)


def _legend(colours: Mapping[str, str]) -> tuple[list[str], int]:
    body, x, y = [], 10, 36
    for name, colour in colours.items():
        width = 26 + 7 * len(name)
        if x + width > LEFT + WIDTH + RIGHT:
            x, y = 10, y + 18
        body.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        body.append(_text(x + 17, y + 10, name, "start"))
        x += width
    return body, y + 34


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _document(title: str, body: Sequence[str], height: float) -> str:
    width = LEFT + WIDTH + RIGHT
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
            f'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height:.0f}" fill="#fff"/>',
            f'<text x="10" y="22" font-size="15" fill="#222">{escape(title)}</text>',
            *body,
            "</svg>\n",
        )
    )
