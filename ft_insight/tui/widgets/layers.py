"""Time per kind of layer and per decoder layer: bars for the overview, tables for the page of times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.text import Text

from ft_insight import units
from ft_insight.layer_times import MOE_KINDS, KindTime, by_kind
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.experts import grouped
from ft_insight.tui.widgets.plots import bar, columns
from ft_insight.tui.widgets.text import (
    CURVE,
    QUIET,
    SPARK,
    STRONG,
    Cell,
    clean,
    cut,
    figure,
    joined,
    table,
    words,
    wrap,
)

NORM_KINDS = frozenset({"input_norm", "post_attention_norm", "final_norm"})
_PART_WEIGHT = 0.25
"""A part has to be so much larger than a kind to be shown in its place: it is already in its sum."""
_MOST_BARS = 16
"""More decoder layers than that are drawn as columns side by side."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A kind of layer, or several taken together; ``part`` is one of those that the row before sums up."""

    name: str
    forward_s: float
    recompute_s: float
    backward_s: float
    share: float
    part: bool = False

    @property
    def total_s(self) -> float:
        return self.forward_s + self.recompute_s + self.backward_s

    @property
    def label(self) -> Text:
        return Text(f"  {self.name}", QUIET) if self.part else Text(self.name)


def _row(time: KindTime, part: bool = False) -> _Row:
    name = clean(time.words, 24)
    return _Row(name, time.forward_s, time.recompute_s, time.backward_s, time.share, part)


def _sum(name: str, rows: Iterable[_Row | KindTime]) -> _Row:
    taken = list(rows)
    return _Row(
        name,
        sum(r.forward_s for r in taken),
        sum(r.recompute_s for r in taken),
        sum(r.backward_s for r in taken),
        sum(r.share for r in taken),
    )


def _rows(view: RunView, *, norms: bool = False) -> list[_Row]:
    """List the kinds, the costliest first, MoE as one with its parts below; with ``norms`` those as one, too."""
    kinds = by_kind(view.layers)
    groups: list[list[_Row]] = []
    for name, together, inside in (("MoE", MOE_KINDS, True), ("norms", NORM_KINDS if norms else frozenset(), False)):
        parts = [k for k in kinds if k.kind in together]
        if parts:
            below = [_row(k, part=True) for k in parts] if inside and len(parts) > 1 else []
            groups.append([_sum(name, parts), *below])
        kinds = tuple(k for k in kinds if k.kind not in together)
    groups += [[_row(k)] for k in kinds]
    groups.sort(key=lambda group: -group[0].share)
    return [row for group in groups for row in group]


def _fitted(rows: list[_Row], height: int) -> list[_Row]:
    """Keep the costliest rows where there is too little room, and sum up the other kinds in the last one."""
    if len(rows) <= height:
        return rows
    order = sorted(rows, key=lambda r: -r.share * (_PART_WEIGHT if r.part else 1.0))
    left_out = [r for r in order[height:] if not r.part]
    if not left_out:
        kept = {id(r) for r in order[:height]}
        return [r for r in rows if id(r) in kept]
    kept = {id(r) for r in order[: max(1, height - 1)]}
    others = [r for r in rows if id(r) not in kept and not r.part]
    shown = [r for r in rows if id(r) in kept]
    if height < 2:
        return shown
    return [*shown, others[0] if len(others) == 1 else _sum(f"{len(others)} others", others)]


def missing_reason(frame: Frame) -> str:
    """Say why there are no times of layers: the collector's own words, or that none was to be expected yet."""
    told = sorted((n for n in frame.view.notices if n.collector == "layers"), key=lambda n: not n.off)
    if told:
        return f"{units.NA}: {clean(told[0].text)}"
    return f"{units.NA}: no step was sampled" if frame.status.over else "from the third step on"


def _sampled(view: RunView) -> str:
    return f"{units.count(view.layer_steps)} sampled step{'' if view.layer_steps == 1 else 's'}, per micro-batch"


def layer_title(frame: Frame) -> Text:
    """Head the kinds with what their times are means of."""
    return words(("time per kind of layer", ""), *((f" · {_sampled(frame.view)}",) if frame.view.layers else ()))


def short_title(frame: Frame) -> Text:
    """Head the kinds where the panel is narrow."""
    of = f" · {_sampled(frame.view)}".replace("sampled ", "")
    return words(("layers", ""), *((of,) if frame.view.layers else ()))


def overview_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw each kind's share of the model's time and its seconds per micro-batch, the small ones in one line."""
    view = frame.view
    if not view.layers:
        return wrap(missing_reason(frame), width, QUIET, most=max(1, height))
    gap = 1 if width < 44 else 2
    rows = _fitted(_rows(view, norms=True), max(1, height))
    cells: list[list[Cell]] = [
        [
            cut(row.label, 14 if width < 44 else 24),
            figure(units.share(row.share), "" if row.part else STRONG),
            units.duration(row.total_s),
        ]
        for row in rows
    ]
    lines = table(cells, "<>>", gap=gap)
    room = width - max(line.cell_len for line in lines) - gap
    if room < 6:
        return lines
    styles = [SPARK if row.part else CURVE for row in rows]
    drawn = [bar(row.share, room, style) for row, style in zip(rows, styles, strict=True)]
    return [words(line, " " * gap, b) for line, b in zip(lines, drawn, strict=True)]


def compact_line(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the shares of the costliest kinds in one line, for screens without room for bars."""
    line = words("layers")
    for row in _rows(frame.view, norms=True):
        if row.part:
            continue
        entry = words((f"  {row.name} ", ""), figure(units.share(row.share)))
        if line.cell_len + entry.cell_len > width:
            break
        line.append_text(entry)
    return [line]


# the page of times


def kind_table(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw forward, recomputation and backward of every kind, per micro-batch, and its share of the model's time."""
    view = frame.view
    if not view.layers:
        return wrap(missing_reason(frame), width, QUIET)
    rows = _rows(view)
    whole = _sum("a micro-batch", [r for r in rows if not r.part])
    cells: list[list[Cell]] = [["kind", "forward", "recompute", "backward", "total", "share"]]
    for row in rows:
        times = [units.duration(s) for s in (row.forward_s, row.recompute_s, row.backward_s)]
        strong = "" if row.part else STRONG
        total, share = figure(units.duration(row.total_s), strong), figure(units.share(row.share), strong)
        cells.append([row.label, *times, total, share])
    sums = [figure(units.duration(s), "") for s in (whole.forward_s, whole.recompute_s, whole.backward_s)]
    cells.append([whole.label, *sums, figure(units.duration(whole.total_s)), ""])
    lines = table(cells, "<>>>>>")
    widest = max(line.cell_len for line in lines)
    room = min(40, width - widest - 2)
    if room < 6:
        return [cut(line, width) for line in lines]
    for at, row in enumerate(rows, 1):
        space = " " * (widest - lines[at].cell_len + 2)
        lines[at] = words(lines[at], space, bar(row.share, room, SPARK if row.part else CURVE))
    return lines


def _decoder(view: RunView) -> list[tuple[int, float]]:
    """Sum each decoder layer's kinds: pairs of its number and its seconds per micro-batch."""
    sums: dict[int, float] = {}
    for time in view.layers:
        if time.layer is not None:
            sums[time.layer] = sums.get(time.layer, 0.0) + time.total_s
    return sorted(sums.items())


def decoder_title(frame: Frame) -> Text:
    """Head the decoder layers."""
    count = len(_decoder(frame.view))
    return words(("decoder layers", ""), *((f" · {count}, per micro-batch",) if count else ()))


def decoder_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the seconds of every decoder layer: few as bars, many as columns; the slowest one is bright."""
    layers = _decoder(frame.view)
    if not layers:
        return [Text(f"{units.NA}: nothing was timed inside of decoder layers", QUIET)]
    slowest, most = max(layers, key=lambda layer: layer[1])
    mean = sum(seconds for _, seconds in layers) / len(layers)
    parts = [
        words(("slowest ", ""), (f"layer {slowest} ", ""), figure(units.duration(most))),
        words(("mean ", ""), figure(units.duration(mean))),
    ]
    head = cut(joined(parts), width)
    if len(layers) <= min(_MOST_BARS, max(4, height - 1)):
        return [head, *_bars(layers, slowest, width)]
    return [head, *_columns(layers, most, width, min(8, max(1, height - 2)))]


def _bars(layers: list[tuple[int, float]], slowest: int, width: int) -> list[Text]:
    most = max(seconds for _, seconds in layers) or 1.0
    digits = max(len(str(layer)) for layer, _ in layers)
    lines = []
    for layer, seconds in layers:
        bright = layer == slowest
        drawn = bar(seconds / most, max(1, width - digits - 12), CURVE if bright else SPARK)
        time = f" {units.duration(seconds):>8} "
        lines.append(words(f"{layer:>{digits}} ", drawn, (time, STRONG if bright else ""), "◂" if bright else ""))
    return lines


def _columns(layers: list[tuple[int, float]], most: float, width: int, height: int) -> list[Text]:
    groups = grouped([seconds for _, seconds in layers], width)
    cell = max(1, min(4, width // len(groups)))
    scale = most or 1.0
    at = groups.index(max(groups))
    styles = [CURVE if i == at else SPARK for i in range(len(groups))]
    per = -(-len(layers) // len(groups))
    note = f"layers {layers[0][0]} to {layers[-1][0]}" + (f", each column the slowest of {per}" if per > 1 else "")
    return [*columns([v / scale for v in groups], height, cell, styles), Text(note, QUIET)]
