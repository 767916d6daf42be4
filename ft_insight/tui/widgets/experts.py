"""Load of experts: the worst layer's bars for the overview, and the heat map of all layers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.run import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import bar, columns
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    QUIET,
    SPARK,
    STRONG,
    Cell,
    beside,
    clean,
    figure,
    flow,
    table,
    words,
    wrap,
)

UNEVEN = 2.0
"""An expert with more than so many times its even share asks for attention."""
_RAMP = (
    *("#12161d", "#151e29", "#1a2a3b", "#20374f", "#274663"),
    "#2f5577",  # the even share, give or take a tenth
    *("#5b5f68", "#86694f", "#ae7840", "#d68a36", "#ffa23a"),
)


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
    lines += _load_lines(load, width, room)
    room = height - len(lines) - 1
    return lines + _layer_lines(view, width, room) if room >= 3 and len(view.experts) > 1 else lines


def _load_lines(load: LayerLoad, width: int, room: int) -> list[Text]:
    count = len(load.counts)
    if room == 1 and count * 8 <= width + 1:
        return [_in_one_line(load)]
    for across in (1, 2, 3, 4):
        if -(-count // across) <= room and (width - 3 * (across - 1)) // across >= 22:
            return _bars(load, width, across)
    return _columns(load, width, max(1, min(room, 9)))


def _in_one_line(load: LayerLoad) -> Text:
    line = Text()
    for expert, share in enumerate(load.shares):
        level = columns([share / max(load.shares)], 1, 1, [_colour(share, load.ideal)])[0]
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
        (units.share(top), _alarm(load.max_over_mean)),
        f" (even {units.share(load.ideal)})",
    )
    return [
        taken,
        words(("max/mean ", ""), figure(units.significant(load.max_over_mean))),
        words(("dead ", ""), (str(len(load.dead)), ATTENTION if load.dead else STRONG)),
        words(("CV ", ""), figure(units.significant(load.cv), "")),
    ]


def _alarm(over: float) -> str:
    return ATTENTION if over >= UNEVEN else STRONG


def _colour(share: float, ideal: float) -> str:
    return "#ffa23a" if share >= UNEVEN * ideal else CURVE


def _bars(load: LayerLoad, width: int, across: int) -> list[Text]:
    column = (width - 3 * (across - 1)) // across
    digits = len(str(len(load.counts) - 1))
    scale = max(max(load.shares), 2 * load.ideal)
    rows = []
    for expert, share in enumerate(load.shares):
        drawn = bar(share / scale, column - digits - 7, _colour(share, load.ideal), mark=load.ideal / scale)
        number = f"{units.share(share):>5}"
        rows.append(words((f"{expert:>{digits}} ", QUIET), drawn, (f" {number}", ATTENTION if not share else "")))
    down = -(-len(rows) // across)
    lines = rows[:down]
    for i in range(1, across):
        lines = beside(lines, rows[i * down : (i + 1) * down], i * column + (i - 1) * 3, 3)
    return lines


def _columns(load: LayerLoad, width: int, height: int) -> list[Text]:
    margin = 5 if height >= 4 else 0
    groups = grouped(load.shares, width - margin)
    cell = min(4, max(1, (width - margin) // len(groups)))
    scale = max(max(load.shares), 2 * load.ideal)
    drawn = columns([s / scale for s in groups], height, cell, [_colour(s, load.ideal) for s in groups])
    per = -(-len(load.shares) // len(groups))
    if height < 3:
        return drawn
    note = f"experts 0 to {len(load.counts) - 1}" + (f", each column the busiest of {per}" if per > 1 else "")
    drawn = columns([s / scale for s in groups], height - 1, cell, [_colour(s, load.ideal) for s in groups])
    even = height - 2 - min(height - 2, int(load.ideal / scale * (height - 1)))
    axis = [Text("even┤" if row == even else "    │", QUIET) for row in range(height - 1)]
    lines = [words(a, line) for a, line in zip(axis, drawn, strict=True)] if margin else drawn
    return [*lines, Text(" " * margin + note, QUIET)]


def grouped(shares: Sequence[float], most: int) -> list[float]:
    """Take the greatest of neighbouring shares where there are more experts than cells."""
    per = max(1, -(-len(shares) // max(1, most)))
    return [max(shares[i : i + per]) for i in range(0, len(shares), per)]


# the page


def heat_title(frame: Frame) -> Text:
    """Head the heat map with its order."""
    order = "most uneven first" if frame.by_imbalance else "in the model's order"
    return words(("layers and experts", ""), f" · {order} (s)")


def heat_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw every layer's figures and the load of its experts as coloured cells."""
    view = frame.view
    if not view.experts:
        return wrap(missing_reason(view), width, QUIET)
    names = layer_names(view.experts)
    order = list(range(len(names)))
    if frame.by_imbalance:
        order.sort(key=lambda i: -view.experts[i].max_over_mean)
    rows: list[list[Cell]] = [["layer", "max/mean", "CV", "dead", "busiest"]]
    rows += [_figures(view.experts[i], names[i]) for i in order]
    left = table(rows, "<>>>>")
    most = max(len(load.counts) for load in view.experts)
    room = max(8, width - left[0].cell_len - 3)
    cell = min(9, room // most) if most <= room else 1
    cells = [_cells_head(most, cell, room)]
    cells += [_cells(view.experts[i], cell, room) for i in order]
    return [
        *_facts(view, width),
        *_scale(most, room, width),
        Text(),
        *beside(left, cells, left[0].cell_len, 3),
    ]


def _figures(load: LayerLoad, name: str) -> list[Cell]:
    return [
        Text(name if len(name) <= 18 else f"…{name[-17:]}"),
        Text(units.significant(load.max_over_mean), _alarm(load.max_over_mean)),
        figure(units.significant(load.cv), ""),
        Text(str(len(load.dead)), ATTENTION if load.dead else ""),
        f"{load.worst} {units.share(load.shares[load.worst]):>4}",
    ]


def _cells_head(most: int, cell: int, room: int) -> Text:
    if most > room:
        return Text(f"experts 0 to {most - 1}", QUIET)
    every = 1 if cell >= 3 else max(1, -(-4 // cell))
    width = cell * every
    return Text("".join(f"{e:<{width}}" if cell < 3 else f"{e:^{width}}" for e in range(0, most, every)), QUIET)


def _cells(load: LayerLoad, cell: int, room: int) -> Text:
    line = Text()
    for share in grouped(load.shares, room):
        colour = heat(share / load.ideal)
        ink = "#10151c" if share > 1.5 * load.ideal else "#c9d3de"
        text = units.share(share).rjust(cell - 1) if cell >= 4 else ""
        line.append((text or ("×" if not share else "")).ljust(cell), f"{ink} on {colour}")
    return line


def heat(over_even: float) -> str:
    """Return the colour of a load: dark when idle, blue when even, orange from twice the even share on."""
    return _RAMP[max(0, min(len(_RAMP) - 1, round(over_even / UNEVEN * (len(_RAMP) - 1))))]


def _scale(most: int, room: int, width: int) -> list[Text]:
    line = words("share of tokens  0 ")
    for colour in _RAMP:
        line.append("  ", f"on {colour}")
    line.append(" twice the even share", QUIET)
    per = -(-most // room)
    note = words(f"a cell is the busiest of {per}") if per > 1 else Text()
    return flow([line, note, words("× none")], width)


def _facts(view: RunView, width: int) -> list[Text]:
    model = view.header.model if view.header else None
    per_token = f", {model.experts_per_token} per token" if model and model.experts_per_token else ""
    worst = view.experts[worst_layer(view)]
    dead = sum(len(load.dead) for load in view.experts)
    padding = "padding counted as tokens" if view.expert_padding_counted else "padding left out"
    parts = [
        words(f"{len(view.experts)} layers of {len(worst.counts)} experts{per_token}"),
        words(("worst max/mean ", ""), (units.significant(worst.max_over_mean), _alarm(worst.max_over_mean))),
        words(("dead ", ""), (str(dead), ATTENTION if dead else STRONG)),
        words(f"counted {clean(view.expert_method or units.NA, 24)}, {padding}"),
    ]
    return flow(parts, width)
