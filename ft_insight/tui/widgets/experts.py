"""Load of experts: one layer's bars or columns, and the least even layer's for the overview."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import bar, columns
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    MARK,
    QUIET,
    SPARK,
    STRONG,
    beside,
    clean,
    figure,
    flow,
    words,
    wrap,
)

UNEVEN = 2.0
"""An expert with more than so many times its even share asks for attention."""
_AXIS = 5
"""Width of the axis at the left of columns."""
_LEAST_BAND = 4
"""Columns stand in several bands, one expert each, where every band gets so many lines."""


def layer_names(layers: Sequence[LayerLoad]) -> list[str]:
    """Shorten names of layers to the parts in which they differ: ``model.layers.17.mlp`` becomes ``17``."""
    parts = [clean(load.layer, 120).split(".") for load in layers]
    if len(parts) < 2 or len({len(p) for p in parts}) != 1:
        return [".".join(p) for p in parts]
    differing = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    return [".".join(p[i] for i in differing) or ".".join(p) for p in parts]


def worst_layer(view: RunView) -> int:
    """Return the position of the layer with the greatest imbalance."""
    return max(range(len(view.experts)), key=lambda i: view.experts[i].max_over_mean)


def missing_reason(view: RunView) -> str:
    """Say why there are no expert counts."""
    told = [clean(n.text) for n in view.notices if "expert" in n.collector.lower() or "router" in n.collector.lower()]
    if told:
        return f"{units.NA}: {told[0]}"
    if view.header is not None and not view.header.model.experts:
        return f"{units.NA}: no MoE layer"
    return "no expert counts yet"


def expert_title(frame: Frame) -> Text:
    """Head the bars with the layer that they are of."""
    view = frame.view
    if not view.experts:
        return Text("experts")
    worst = worst_layer(view)
    name = layer_names(view.experts)[worst]
    of = f", least even of {len(view.experts)}" if len(view.experts) > 1 else ""
    return words(("experts ", ""), f"· layer {name}{of}")


def short_title(frame: Frame) -> Text:
    """Head the bars where the panel is narrow."""
    view = frame.view
    name = layer_names(view.experts)[worst_layer(view)] if view.experts else ""
    return words(("experts ", ""), f"· layer {name} of {len(view.experts)}" if name else "")


def overview_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the load of the least even layer's experts, each against its even share."""
    view = frame.view
    if not view.experts:
        return wrap(missing_reason(view), width, QUIET, most=max(1, height))
    load = view.experts[worst_layer(view)]
    lines = flow(_summary(load), width, most=2 if height >= 6 else 1)
    room = height - len(lines)
    lines += load_lines(load, width, room)
    room = height - len(lines) - 1
    return lines + _layer_lines(view, width, room) if room >= 3 and len(view.experts) > 1 else lines


def load_lines(load: LayerLoad, width: int, room: int, start: LayerLoad | None = None) -> list[Text]:
    """Draw the load of a layer's experts, as bars where there is room for them.

    A mark shows each expert's share at the ``start``; without one, bars have it at the even share.
    """
    count = len(load.counts)
    if room == 1 and count * 8 <= width + 1:
        return [_in_one_line(load)]
    for across in (1, 2, 3, 4):
        if -(-count // across) <= room and (width - 3 * (across - 1)) // across >= 22:
            return _bars(load, width, across, start)
    bands = -(-count // max(1, width - _AXIS))
    if bands > 1 and room // bands >= _LEAST_BAND:
        per = -(-count // bands)
        parts = [range(i, min(i + per, count)) for i in range(0, count, per)]
        return [line for part in parts for line in _columns(load, width, room // bands, start, part)]
    return _columns(load, width, max(1, min(room, 9 if start is None else 14)), start, range(count))


def _in_one_line(load: LayerLoad) -> Text:
    line = Text()
    for expert, share in enumerate(load.shares):
        level = columns([share / (max(load.shares) or 1.0)], 1, 1, [_colour(share, load.ideal)])[0]
        number = (f" {units.share(share):<5}", "" if share else ATTENTION)
        line.append_text(words(f"{expert} ", level, number))
    return line


def _layer_lines(view: RunView, width: int, room: int) -> list[Text]:
    """Draw the imbalance of all layers: whether the worst one stands alone."""
    over = [load.max_over_mean for load in view.experts]
    height = min(5, room - 1)
    groups = grouped(over, width)
    scale = max(*over, UNEVEN)
    cell = max(1, min(3, width // len(groups)))
    styles = [ATTENTION if v >= UNEVEN else SPARK for v in groups]
    note = Text(f"max/mean of all {len(over)} layers, in the model's order", QUIET)
    return [Text(), note, *columns([v / scale for v in groups], height, cell, styles)]


def _summary(load: LayerLoad) -> list[Text]:
    top = load.shares[load.worst]
    taken = words(
        ("expert ", ""),
        (str(load.worst), STRONG),
        (" takes ", ""),
        (units.share(top), alarm(load.max_over_mean)),
        f" (even {units.share(load.ideal)})",
    )
    return [
        taken,
        words(("max/mean ", ""), figure(units.significant(load.max_over_mean))),
        words(("dead ", ""), (str(len(load.dead)), ATTENTION if load.dead else STRONG)),
        words(("CV ", ""), figure(units.significant(load.cv), "")),
    ]


def alarm(over: float) -> str:
    """Return the style of a layer's max/mean."""
    return ATTENTION if over >= UNEVEN else STRONG


def _colour(share: float, ideal: float) -> str:
    return "#ffa23a" if share >= UNEVEN * ideal else CURVE


def _bars(load: LayerLoad, width: int, across: int, start: LayerLoad | None) -> list[Text]:
    column = (width - 3 * (across - 1)) // across
    digits = len(str(len(load.counts) - 1))
    before = start.shares if start else [load.ideal] * len(load.counts)
    scale = max(*load.shares, *before, 2 * load.ideal)
    told = start is not None and column >= 34
    rows = []
    for expert, (share, mark) in enumerate(zip(load.shares, before, strict=True)):
        room = column - digits - (14 if told else 7)
        drawn = bar(share / scale, room, _colour(share, load.ideal), mark=mark / scale)
        number = (f" {units.share(share):>5}", ATTENTION if not share else "")
        change = f" {points(share - mark):>6}" if told else ""
        rows.append(words((f"{expert:>{digits}} ", QUIET), drawn, number, change))
    down = -(-len(rows) // across)
    lines = rows[:down]
    for i in range(1, across):
        lines = beside(lines, rows[i * down : (i + 1) * down], i * column + (i - 1) * 3, 3)
    return lines


def points(change: float, digits: int = 1) -> str:
    """Write a difference of two shares in percentage points: ``+12.4``, ``-0.3``, ``0``."""
    text = f"{change * 100:+.{digits}f}"
    return "0" if float(text) == 0 else text


def _columns(load: LayerLoad, width: int, height: int, start: LayerLoad | None, experts: range) -> list[Text]:
    """Draw some of the experts as columns, on the scale of all of them."""
    margin = _AXIS if height >= 4 else 0
    before = start.shares if start else ()
    shown = [experts[i] for i in busiest([load.shares[e] for e in experts], width - margin)]
    cell = min(4, max(1, (width - margin) // len(shown)))
    scale = max(*load.shares, *before, 2 * load.ideal)
    high = height if height < 3 else height - 1
    shares = [load.shares[e] for e in shown]
    colours = [_colour(s, load.ideal) for s in shares]
    drawn = columns([s / scale for s in shares], high, cell, colours)
    if height < 3:
        return drawn
    if before:
        drawn = _marked(drawn, [before[e] / scale for e in shown], cell, colours)
    per = -(-len(experts) // len(shown))
    note = f"experts {experts[0]} to {experts[-1]}" + (f", each column the busiest of {per}" if per > 1 else "")
    even = high - 1 - min(high - 1, int(load.ideal / scale * high))
    axis = [Text("even┤" if row == even else "    │", QUIET) for row in range(high)]
    lines = [words(a, line) for a, line in zip(axis, drawn, strict=True)] if margin else drawn
    return [*lines, Text(" " * margin + note, QUIET)]


def _marked(lines: list[Text], fractions: Sequence[float], cell: int, colours: Sequence[str]) -> list[Text]:
    """Lay a mark over every column, as high as its fraction."""
    high, wide = len(lines), max(1, cell - 1)
    for i, (fraction, colour) in enumerate(zip(fractions, colours, strict=True)):
        row, at = high - 1 - min(high - 1, int(fraction * high)), i * cell
        line = lines[row]
        style = MARK if line.plain[at] == " " else f"{MARK} on {colour}"
        lines[row] = line[:at] + Text("─" * wide, style) + line[at + wide :]
    return lines


def busiest(shares: Sequence[float], most: int) -> list[int]:
    """Return all experts, or the busiest of neighbouring ones where there are more of them than cells."""
    per = max(1, -(-len(shares) // max(1, most)))
    return [max(range(i, min(i + per, len(shares))), key=shares.__getitem__) for i in range(0, len(shares), per)]


def grouped(shares: Sequence[float], most: int) -> list[float]:
    """Take the greatest of neighbouring shares where there are more experts than cells."""
    per = max(1, -(-len(shares) // max(1, most)))
    return [max(shares[i : i + per]) for i in range(0, len(shares), per)]
