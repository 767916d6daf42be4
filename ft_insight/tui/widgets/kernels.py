"""The page of kernels: what one recorded step computed, by part of the model and role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from ft_insight import units
from ft_insight.kernel_table import RoleTime, by_role
from ft_insight.layer_times import KIND_WORDS
from ft_insight.records import Kernels
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import bar
from ft_insight.tui.widgets.text import (
    CURVE,
    QUIET,
    SPARK,
    STRONG,
    Cell,
    beside,
    clean,
    cut,
    figure,
    flow,
    joined,
    table,
    words,
    wrap,
)

OFF = "off by default; FtInsightCallback(kernels=True) records one step"
_LEAST_BAR, _MOST_BAR = 6, 30
_TALL = 30
"""Height from which the name of the trace may take a line of its own."""
_SIDE = 44
"""Width from which the sums by part stand beside the table."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: its two lines of heading, its cells, and when it gives way (the greatest number first)."""

    head: tuple[str, str]
    cell: Callable[[RoleTime], Cell]
    yields: int = 0
    align: str = ">"

    @property
    def name(self) -> str:
        return " ".join(word for word in self.head if word)


@dataclass(frozen=True, slots=True)
class _Table:
    head: list[Text]
    rows: list[Text]
    left_out: list[str]


def missing_reason(view: RunView) -> str:
    """Say why there is no record of kernels: the collector's own words, or how to ask for one."""
    told = sorted((n for n in view.notices if n.collector == "kernels"), key=lambda n: not n.off)
    return f"{units.NA}: {clean(told[0].text) if told else OFF}"


def kernel_title(frame: Frame) -> Text:
    """Head the table with the step that it is of, and what is listed."""
    kernels = frame.view.kernels
    if kernels is None:
        return Text("kernels by role")
    what = "kernels on the device" if _on_device(kernels) else "operators on the host, without what they call"
    return words(("kernels by role", ""), " · step ", (units.count(kernels.step), STRONG), f" · {what}")


def short_title(frame: Frame) -> Text:
    """Head the table where there is little room."""
    kernels = frame.view.kernels
    if kernels is None:
        return Text("kernels by role")
    what = "device kernels" if _on_device(kernels) else "host operators"
    return words(("kernels by role", ""), " · step ", (units.count(kernels.step), STRONG), f" · {what}")


def head_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw what stays while the table scrolls: the step, the parts where they have no room, the columns' names."""
    kernels = frame.view.kernels
    if kernels is None:
        return [] if frame.waiting else wrap(missing_reason(frame.view), width, QUIET)
    rows = by_role(kernels.roles)
    drawn = _drawn(rows, kernels, width)
    facts = _facts(frame, kernels, len(rows))
    trace = words(f"trace {clean(kernels.trace, 60)}" if kernels.trace else "")
    if height >= _TALL or joined([*facts, trace]).cell_len <= width:
        facts.append(trace)
    lines = flow(facts, width)
    if drawn.left_out:
        lines += wrap(f"too narrow for: {', '.join(drawn.left_out)}", width, QUIET, most=2)
    if not _has_side(drawn, width):
        parts = [words((f"{name} ", ""), figure(units.share(share))) for name, share, _ in _parts(rows)]
        lines.append(flow([words("by part"), *parts], width, most=1)[0])
        return [*lines, *drawn.head]
    head = drawn.head[-1].copy()
    head.append(" " * (width - _SIDE - head.cell_len))
    return [*lines, *drawn.head[:-1], words(head, "  by part")]


def role_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw one row per role, the longest first, and at the side the sums by part where there is room."""
    kernels = frame.view.kernels
    if kernels is None:
        return []
    rows = by_role(kernels.roles)
    drawn = _drawn(rows, kernels, width)
    return beside(drawn.rows, _side(rows), width - _SIDE - 2) if _has_side(drawn, width) else drawn.rows


def _on_device(kernels: Kernels) -> bool:
    return kernels.clock == "cuda"


def _facts(frame: Frame, kernels: Kernels, roles: int) -> list[Text]:
    window = kernels.window_s
    busy = kernels.busy_s / window if window else None
    facts = [words(("recorded ", ""), figure(units.duration(window)), " under the profiler")]
    if kernels.idle_s is not None:
        idle = kernels.idle_s / window if window else None
        facts.append(words(("device idle ", ""), figure(units.share(idle)), f", busy {units.share(busy)}"))
    elif _on_device(kernels):
        facts.append(words(("device idle ", ""), figure(units.NA)))
    else:
        facts.append(words(("in operators ", ""), figure(units.share(busy))))
    facts.append(words((units.count(roles), STRONG), (" roles", "")))
    if frame.view.ranks > 1:
        facts.append(words("of rank 0"))
    return facts


def _part(kind: str) -> str:
    return clean(KIND_WORDS.get(kind, kind.replace("_", " ")), 24)


def _parts(rows: Sequence[RoleTime]) -> list[tuple[str, float, float]]:
    """Sum the roles of each part: its name, share and seconds, the longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for row in rows:
        share, seconds = sums.get(row.kind, (0.0, 0.0))
        sums[row.kind] = (share + row.share, seconds + _seconds(row))
    return sorted(((_part(kind), *both) for kind, both in sums.items()), key=lambda part: -part[1])


def _seconds(row: RoleTime) -> float:
    return row.forward_s + row.recompute_s + row.backward_s + row.other_s


def _side(rows: Sequence[RoleTime]) -> list[Text]:
    parts = _parts(rows)
    cells: list[list[Cell]] = [
        [cut(Text(name), 18), figure(units.share(share)), units.duration(seconds)] for name, share, seconds in parts
    ]
    lines = table(cells, "<>>", gap=1)
    room = _SIDE - 3 - max(line.cell_len for line in lines)
    widest = max(line.cell_len for line in lines)
    return [
        words("│ ", line, " " * (widest - line.cell_len + 1), bar(share, room, SPARK))
        for line, (_, share, _) in zip(lines, parts, strict=True)
    ]


def _has_side(drawn: _Table, width: int) -> bool:
    return bool(drawn.rows) and not drawn.left_out and max(r.cell_len for r in drawn.rows) <= width - _SIDE - 2


# the table


def _drawn(rows: Sequence[RoleTime], kernels: Kernels, width: int) -> _Table:
    """Set the table in the room there is: closer columns first, then without those that give way."""
    columns = _columns(rows, kernels)
    left_out: list[str] = []
    while True:
        gap = next((gap for gap in (2, 1) if _width(columns, rows, gap) <= width), 0)
        least = max(columns, key=lambda column: column.yields)
        if gap or not least.yields:
            lines = _with_bars(columns, rows, width, gap or 1)
            heads = len(lines) - len(rows)
            return _Table(lines[:heads], lines[heads:], left_out)
        columns.remove(least)
        left_out.insert(0, least.name)


def _width(columns: Sequence[_Column], rows: Sequence[RoleTime], gap: int) -> int:
    return max(line.cell_len for line in _set(columns, rows, gap))


def _set(columns: Sequence[_Column], rows: Sequence[RoleTime], gap: int) -> list[Text]:
    heads: list[list[Cell]] = [[column.head[i] for column in columns] for i in range(2)]
    cells = [[column.cell(row) for column in columns] for row in rows]
    lines = table([*heads, *cells], "".join(column.align for column in columns), gap)
    return lines if lines[0].plain.strip() else lines[1:]


def _with_bars(columns: Sequence[_Column], rows: Sequence[RoleTime], width: int, gap: int) -> list[Text]:
    """Set the table with a bar beside each share; where the parts can stand at the side, the bars leave them room."""
    lines = _set(columns, rows, gap)
    room = width - max(line.cell_len for line in lines) - gap
    if room >= _LEAST_BAR + _SIDE + 2:
        room -= _SIDE + 2
    room = min(_MOST_BAR, room)
    if room < _LEAST_BAR:
        return [cut(line, width) for line in lines]
    most = max((row.share for row in rows), default=0.0) or 1.0
    at = 1 + next(i for i, column in enumerate(columns) if column.name == "share")
    bars = _Column(("", ""), lambda row: bar(row.share / most, room, CURVE), align="<")
    return _set([*columns[:at], bars, *columns[at:]], rows, gap)


def _columns(rows: Sequence[RoleTime], kernels: Kernels) -> list[_Column]:
    """List the columns that this record can fill."""
    columns = [
        _Column(("", "part"), lambda row: Text(_part(row.kind)), align="<"),
        _Column(("", "role"), lambda row: Text(clean(row.role.replace("_", " "), 24)), align="<"),
        _Column(("", "forward"), lambda row: _time(row.forward_s), yields=1),
        _Column(("", "recompute"), lambda row: _time(row.recompute_s), yields=2),
        _Column(("", "backward"), lambda row: _time(row.backward_s), yields=1),
        _Column(("", "other"), lambda row: _time(row.other_s), yields=8),
        _Column(("", "share"), lambda row: figure(units.share(row.share))),
        _Column(("", "calls"), lambda row: units.count(row.calls), yields=9),
        _Column(("", "TFLOP/s"), lambda row: _rate(row.tflops)),
    ]
    if _on_device(kernels):
        columns += [
            _Column(("of", "peak"), lambda row: _of_peak(row), yields=3),
            _Column(("of", "bandwidth"), lambda row: _percent(row.bandwidth_share), yields=4),
            _Column(
                ("theoretical", "occupancy"), lambda row: _percent(row.theoretical_occupancy_percent, 100), yields=7
            ),
        ]
    if any(row.sm_percent is not None or row.memory_percent is not None for row in rows):
        columns += [
            _Column(("SM", "(ncu)"), lambda row: _percent(row.sm_percent, 100), yields=5),
            _Column(("memory", "(ncu)"), lambda row: _percent(row.memory_percent, 100), yields=6),
        ]
    return columns


def _time(seconds: float) -> Text:
    return Text(units.duration(seconds)) if seconds else Text("-", QUIET)


def _rate(tflops: float | None) -> Text:
    """Write a rate; where no product is computed there is none to be had."""
    return Text("-", QUIET) if tflops is None else Text(units.significant(tflops))


def _of_peak(row: RoleTime) -> Text:
    return Text("-", QUIET) if row.tflops is None else _percent(row.flops_share)


def _percent(value: float | None, whole: float = 1) -> Text:
    return figure(units.share(None if value is None else value / whole), "")
