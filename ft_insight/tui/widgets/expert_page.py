"""The page of experts: the heat map of all layers, one layer in detail, and the paper's variance over the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.experts import (
    UNEVEN,
    alarm,
    grouped,
    layer_names,
    load_lines,
    missing_reason,
    points,
    worst_layer,
)
from ft_insight.tui.widgets.plots import Axis, chart, tick, trend
from ft_insight.tui.widgets.text import (
    ATTENTION,
    QUIET,
    STRONG,
    Cell,
    beside,
    clean,
    cut,
    figure,
    flow,
    table,
    words,
    wrap,
)

_RAMP = (
    *("#12161d", "#151e29", "#1a2a3b", "#20374f", "#274663"),
    "#2f5577",  # the even share, give or take a tenth
    *("#5b5f68", "#86694f", "#ae7840", "#d68a36", "#ffa23a"),
)
_LESS = ("#1b2129", "#20334a", "#28496c", "#356694", "#4a8bc9", "#6cb0f0")
_MORE = ("#1b2129", "#3d3127", "#654a2d", "#966832", "#cb8535", "#ffa23a")
_DARK, _LIGHT = "#10151c", "#c9d3de"
_OF_TRAINING = "of late", "at the start"
_WIDE = 104
"""Width from which the variance has a panel of its own beside the layer."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A layer: its load over the run, at the run's start, and of late."""

    key: str
    name: str
    load: LayerLoad
    start: LayerLoad | None
    now: LayerLoad

    @property
    def changes(self) -> tuple[float, ...]:
        """Each expert's share of late less its share at the start; () where the start is not known."""
        if self.start is None:
            return ()
        return tuple(now - then for now, then in zip(self.now.shares, self.start.shares, strict=True))


def _rows(frame: Frame) -> list[_Row]:
    view, change = frame.view, frame.view.load_change
    start = {load.layer: load for load in change.start} if change is not None else {}
    latest = {load.layer: load for load in change.end} if change is not None else {}
    rows = []
    for name, load in zip(layer_names(view.experts), view.experts, strict=True):
        now, then = latest.get(load.layer, load), start.get(load.layer)
        if then is not None and len(then.counts) != len(now.counts):
            then = None
        rows.append(_Row(load.layer, name, load, then, now))
    return sorted(rows, key=lambda row: -row.load.max_over_mean) if frame.by_imbalance else rows


def _at(frame: Frame, rows: Sequence[_Row]) -> int:
    """Return where the selected layer stands: the least even one until another is chosen."""
    key = frame.layer or frame.view.experts[worst_layer(frame.view)].layer
    return next((at for at, row in enumerate(rows) if row.key == key), 0)


def moved(frame: Frame, by: int) -> str | None:
    """Return the layer that lies so many rows further down than the selected one."""
    if not frame.view.experts:
        return None
    rows = _rows(frame)
    return rows[max(0, min(len(rows) - 1, _at(frame, rows) + by))].key


# the heat map


def heat_title(frame: Frame) -> Text:
    """Head the heat map with what it shows and its order."""
    what = "change since the start, in points" if frame.since_start else "share of tokens"
    order = "most uneven first" if frame.by_imbalance else "in the model's order"
    return words(("layers and experts", ""), f" · {what} (c)", f" · {order} (s)")


def short_heat_title(frame: Frame) -> Text:
    """Head the heat map where there is little room."""
    what = "change since the start, in points" if frame.since_start else "share of tokens"
    order = "most uneven first" if frame.by_imbalance else "in the model's order"
    return words(("experts", ""), f" · {what} · {order}")


def heat_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the layers' figures and their experts as coloured cells: as many rows as leave room for the details."""
    view = frame.view
    if not view.experts:
        return wrap(missing_reason(view), width, QUIET)
    rows = _rows(frame)
    at = _at(frame, rows)
    facts = _facts(view, width)
    budget = height - (20 if width < _WIDE and height > 34 else max(7, min(14, height * 2 // 5)))
    room = max(3, budget - len(facts) - 2)
    first = max(0, min(at - room // 2, len(rows) - room))
    seen = range(first, min(len(rows), first + room))
    left = table(_figures(rows, at, frame.since_start), "<>>>>")
    left = [left[0], *(left[i + 1] for i in seen)]
    left_width = max(line.cell_len for line in left)
    most = max(len(row.load.counts) for row in rows)
    across = max(8, width - left_width - 3)
    cell = min(9, across // most) if most <= across else 1
    full = _full_change(rows)
    cells = [
        _cells_head(most, cell, across),
        *(
            _change_cells(rows[i], cell, across, full) if frame.since_start else _cells(rows[i], cell, across)
            for i in seen
        ),
    ]
    part = f"rows {seen[0] + 1} to {seen[-1] + 1} of {len(rows)}" if len(seen) < len(rows) else ""
    scale = _change_scale(rows, full, most, across, _basis(view)) if frame.since_start else _scale(most, across)
    return [*facts, *flow([*scale[:1], words(part), *scale[1:]], width, most=1), *beside(left, cells, left_width, 3)]


def _figures(rows: Sequence[_Row], at: int, since_start: bool) -> list[list[Cell]]:
    head: list[Cell] = ["  layer", *(("max/mean", "grew", "shrank") if since_start else _HEADS)]
    return [head, *((_changed if since_start else _loaded)(row, row_at == at) for row_at, row in enumerate(rows))]


_HEADS = ("max/mean", "CV", "dead", "busiest")


def _named(row: _Row, selected: bool) -> Text:
    name = row.name if len(row.name) <= 18 else f"…{row.name[-17:]}"
    return Text(f"▸ {name}" if selected else f"  {name}", STRONG if selected else "")


def _loaded(row: _Row, selected: bool) -> list[Cell]:
    load = row.load
    return [
        _named(row, selected),
        Text(units.significant(load.max_over_mean), alarm(load.max_over_mean)),
        figure(units.significant(load.cv), ""),
        Text(str(len(load.dead)), ATTENTION if load.dead else ""),
        f"{load.worst} {units.share(load.shares[load.worst]):>4}",
    ]


def _changed(row: _Row, selected: bool) -> list[Cell]:
    changes = row.changes
    if row.start is None or not changes:
        return [_named(row, selected), figure(units.NA), "", ""]
    most, least = (f(range(len(changes)), key=changes.__getitem__) for f in (max, min))
    over, digits = row.now.max_over_mean, _digits(row.now)
    return [
        _named(row, selected),
        words(f"{units.significant(row.start.max_over_mean)} → ", (units.significant(over), alarm(over))),
        words(f"{most} ", (f"{points(changes[most], digits):>5}", "")) if changes[most] > 0 else "-",
        f"{least} {points(changes[least], digits):>5}" if changes[least] < 0 else "-",
    ]


def _digits(load: LayerLoad) -> int:
    """Return how many digits of a point a change needs: more where the shares of many experts are small."""
    return 1 if load.ideal > 0.02 else 2


def _cells_head(most: int, cell: int, room: int) -> Text:
    if most > room:
        return Text(f"experts 0 to {most - 1}", QUIET)
    every = 1 if cell >= 3 else max(1, -(-4 // cell))
    width = cell * every
    return Text("".join(f"{e:<{width}}" if cell < 3 else f"{e:^{width}}" for e in range(0, most, every)), QUIET)


def _cells(row: _Row, cell: int, room: int) -> Text:
    line, ideal = Text(), row.load.ideal
    for share in grouped(row.load.shares, room):
        ink = _DARK if share > 1.5 * ideal else _LIGHT
        short = units.share(share) if len(units.share(share)) < cell else f"{share:.0%}"
        text = short.rjust(cell - 1) if cell >= 4 else ""
        line.append((text or ("×" if not share else "")).ljust(cell), f"{ink} on {heat(share / ideal)}")
    return line


def _change_cells(row: _Row, cell: int, room: int, full: float) -> Text:
    line = Text()
    per = max(1, -(-len(row.load.counts) // room))
    changes = row.changes
    for i in range(0, len(changes), per):
        change = max(changes[i : i + per], key=abs)
        text = points(change) if len(points(change)) < cell else points(change, 0)
        ink = _DARK if abs(change) > 0.7 * full else _LIGHT
        line.append((text.rjust(cell - 1) if cell >= 4 else "").ljust(cell), f"{ink} on {diverging(change / full)}")
    return line


def heat(over_even: float) -> str:
    """Return the colour of a load: dark when idle, blue when even, orange from twice the even share on."""
    return _RAMP[max(0, min(len(_RAMP) - 1, round(over_even / UNEVEN * (len(_RAMP) - 1))))]


def diverging(change: float) -> str:
    """Return the colour of a change between -1 and 1: blue for what shrank, dark for none, orange for what grew."""
    ramp = _MORE if change > 0 else _LESS
    return ramp[min(len(ramp) - 1, round(abs(change) * (len(ramp) - 1)))]


def _full_change(rows: Sequence[_Row]) -> float:
    """Return the change that has the full colour: the greatest one, but no less than half of the even share.

    Noise would else look like change in a run where nothing changed.
    """
    greatest = max((abs(change) for row in rows for change in row.changes), default=0.0)
    return max(greatest, *(row.load.ideal / 2 for row in rows))


def _swatches(colours: Sequence[str]) -> Text:
    return Text.assemble(*((" ", f"on {colour}") for colour in colours for _ in range(2 if len(colours) < 8 else 1)))


def _scale(most: int, room: int) -> list[Text]:
    per = -(-most // room)
    return [
        words("0 ", _swatches(_RAMP), " twice the even share"),
        words("× none"),
        words(f"a cell is the busiest of {per}" if per > 1 else ""),
    ]


def _basis(view: RunView) -> str:
    return view.load_change.basis if view.load_change is not None else ""


def _change_scale(rows: Sequence[_Row], full: float, most: int, room: int, basis: str) -> list[Text]:
    if all(row.start == row.now for row in rows):
        return [Text("nothing since the start yet: its counts are all there are")]
    per = -(-most // room)
    digits = _digits(rows[0].now)
    ramp = _swatches([*_LESS[:0:-1], *_MORE])
    return [
        words(f"{points(-full, digits)} ", ramp, f" {points(full, digits)} points"),
        words(f"a cell is the greatest change of {per}" if per > 1 else ""),
        words(basis),
    ]


def _facts(view: RunView, width: int) -> list[Text]:
    model = view.header.model if view.header else None
    per_token = f", {model.experts_per_token} per token" if model and model.experts_per_token else ""
    worst = view.experts[worst_layer(view)]
    dead = sum(len(load.dead) for load in view.experts)
    padding = "padding counted as tokens" if view.expert_padding_counted else "padding left out"
    variance = _variance(view)
    parts = [
        words(f"{len(view.experts)} layers of {len(worst.counts)} experts{per_token}"),
        words(("worst max/mean ", ""), (units.significant(worst.max_over_mean), alarm(worst.max_over_mean))),
        words(("dead ", ""), (str(dead), ATTENTION if dead else STRONG)),
        words(("variance ", ""), variance) if variance is not None and width < _WIDE else Text(),
        words(f"counted {clean(view.expert_method or units.NA, 24)}, {padding}"),
    ]
    return flow(parts, width)


# one layer


def detail_title(frame: Frame) -> Text:
    """Head the selected layer."""
    if not frame.view.experts:
        return Text("layer")
    rows = _rows(frame)
    row = rows[_at(frame, rows)]
    change = frame.view.load_change
    now, then = ("after the run", "before it") if change is not None and change.rows is not None else _OF_TRAINING
    mark = f" · white mark: {then}" if row.start is not None else ""
    return words((f"layer {clean(row.name, 40)}", ""), f" · {now}{mark}")


def detail_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the selected layer's experts of late, each with its share at the start, and its figures then and now."""
    if not frame.view.experts:
        return wrap(missing_reason(frame.view), width, QUIET)
    rows = _rows(frame)
    row = rows[_at(frame, rows)]
    lines = flow(_detail_facts(row), width, most=2 if height >= 6 else 1)
    return [*lines, *load_lines(row.now, width, max(1, height - len(lines)), row.start)]


def _detail_facts(row: _Row) -> list[Text]:
    now, then = row.now, row.start
    taken = words(
        (f"expert {now.worst} takes ", ""),
        (units.share(now.shares[now.worst]), alarm(now.max_over_mean)),
        f" (even {units.share(now.ideal)})",
    )

    def pair(label: str, name: str, style: str = STRONG) -> Text:
        show = str if name == "dead" else units.significant
        value, before = ((len(x.dead) if name == "dead" else getattr(x, name)) if x else None for x in (now, then))
        text = show(value) if value is not None else units.NA
        old = show(before) if before is not None else text
        return words((f"{label} ", ""), f"{old} → " if old != text else "", (text, style))

    return [
        taken,
        pair("max/mean", "max_over_mean", alarm(now.max_over_mean)),
        pair("CV", "cv"),
        pair("entropy", "entropy"),
        pair("dead", "dead", ATTENTION if now.dead else STRONG),
    ]


# the variance


def _variance(view: RunView) -> Text | None:
    """Write the variance at the start and of late; None where it cannot be had."""
    change = view.load_change
    if change is None or change.model_start is None or change.model_end is None:
        return None
    before, now = (units.significant(load.variance_n) for load in (change.model_start, change.model_end))
    return words(f"{before} → ", (now, STRONG))


def variance_title(frame: Frame) -> Text:
    """Head the variance."""
    of = " · of rank 0's data" if frame.view.ranks > 1 else ""
    return words(("variance over expert means", ""), f" · by step{of}")


def variance_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the paper's variance of each flush of counts, and how it went from the start till now."""
    view = frame.view
    variance, curve = _variance(view), view.curves.get("expert_variance", ())
    if variance is None and not curve:
        why = "queries were not counted, or layers differ in their number of experts"
        return wrap(f"{units.NA}: {why}", width, QUIET)
    head = flow([variance, words(_basis(view))], width, most=2 if height >= 10 else 1) if variance is not None else []
    note = cut(words("tokens per query, mean over layers; by n"), width)
    drawn = chart(trend(curve), width, height - len(head) - 1, Axis(tick, low=0.0), Axis(units.count))
    return [*head, note, *drawn]
