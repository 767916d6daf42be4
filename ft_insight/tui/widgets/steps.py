"""Where a step's time goes: the stacked bar, the ledger's tables, and the curve of step times."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ft_insight import units
from ft_insight.run import RECENT_STEPS
from ft_insight.run_view import Share
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import Axis, bar, chart, split, tick, trend
from ft_insight.tui.widgets.text import (
    CURVE,
    QUIET,
    STRONG,
    Cell,
    clean,
    cut,
    figure,
    joined,
    table,
    tail,
    words,
)

_COLOURS = {
    "data_wait": "#c583a6",
    "forward": "#4f9fe0",
    "loss": "#3fb8ac",
    "recompute": "#b58ad0",
    "backward": "#7d74d9",
    "clip": "#a3b35c",
    "optimizer": "#5cb270",
    "callbacks": "#b8946a",
    "other": "#667180",
}
_NAMES = {"data_wait": "data wait"}


def phase_colour(name: str) -> str:
    """Return the colour that a phase has everywhere."""
    return _COLOURS.get(name, "#667180")


def phase_name(name: str) -> str:
    """Return a phase's name for people."""
    return _NAMES.get(name, clean(name, 24))


def waiting_lines(frame: Frame, width: int) -> list[Text]:
    """Say what is waited for, before the run has begun."""
    path = tail(clean(frame.path, 4000), max(10, width - 12))
    return [words("waiting for ", (path, STRONG)), Text("the run has written nothing yet", QUIET)]


def step_title(frame: Frame) -> Text:
    """Head the phases with the time of a step."""
    view = frame.view
    if view.step_s is None:
        return Text("step")
    of = min(RECENT_STEPS, view.totals.steps)
    return words(("step ", ""), figure(units.duration(view.step_s)), f" · median of the last {of}")


def step_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the phases of the recent steps as one bar with a legend of shares and seconds per step."""
    view = frame.view
    if frame.waiting:
        return waiting_lines(frame, width)
    if not view.recent_phases:
        return [Text("no step yet", QUIET)]
    steps = min(RECENT_STEPS, view.totals.steps)
    return [stacked(view.recent_phases, width), *legend(view.recent_phases, width, steps)]


def stacked(shares: Sequence[Share], width: int) -> Text:
    """Draw shares as one bar of full width, named where there is room."""
    line = Text()
    for part, cells in zip(shares, split([s.share for s in shares], width), strict=True):
        label = f" {phase_name(part.name)} {units.share(part.share)}"
        text = label if len(label) < cells else ""
        line.append(text.ljust(cells), f"bold #10151c on {phase_colour(part.name)}")
    return line


def legend(shares: Sequence[Share], width: int, steps: int) -> list[Text]:
    """Name the parts of the bar, with each one's share and seconds per step, in as many columns as fit."""
    cells: list[list[Cell]] = []
    for part in shares:
        per_step = units.duration(part.seconds / steps) if steps else units.NA
        cells.append(
            [
                words(("■ ", phase_colour(part.name)), (phase_name(part.name), "")),
                figure(units.share(part.share)),
                per_step,
            ]
        )
    entries = table(cells, "<>>", gap=1)
    wide = max(e.cell_len for e in entries)
    across = max(1, min(len(entries), (width + 1) // (wide + 1)))
    down = -(-len(entries) // across)
    across = -(-len(entries) // down)
    gap = min(4, max(1, (width - across * wide) // max(1, across - 1)))
    rows = [entries[i::down] for i in range(down)]
    return [Text(" " * gap).join(row) for row in rows]


def phase_table(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the ledger: mean seconds per step and share of every phase, of the whole run and of late."""
    view = frame.view
    if not view.phases:
        return waiting_lines(frame, width) if frame.waiting else [Text("no step yet", QUIET)]
    recent = {s.name: s for s in view.recent_phases}
    steps, late = view.totals.steps, min(RECENT_STEPS, view.totals.steps)
    rows: list[list[Cell]] = [["phase", "s/step", "share", f"last {late}", "share", ""]]
    room = max(0, width - 46)
    for part in view.phases:
        now = recent.get(part.name)
        rows.append(
            [
                words(("■ ", phase_colour(part.name)), (phase_name(part.name), "")),
                figure(units.duration(part.seconds / steps)),
                figure(units.share(part.share)),
                units.duration(now.seconds / late if now else None),
                units.share(now.share if now else None),
                bar(part.share, room, phase_colour(part.name)) if room > 5 else "",
            ]
        )
    whole = sum(p.seconds for p in view.phases) / steps
    rows.append([words(("  a step", "")), figure(units.duration(whole)), "", _recent_step(frame, late), "", ""])
    return [stacked(view.phases, width), *table(rows, "<>>>><")]


def _recent_step(frame: Frame, late: int) -> str:
    return units.duration(sum(p.seconds for p in frame.view.recent_phases) / late)


def outside_table(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw what the time outside of steps went to, and how well the ledger adds up."""
    view = frame.view
    rows: list[list[Cell]] = [["what", "total", "of elapsed"]]
    rows += [[Text(clean(p.name, 24)), figure(units.duration(p.seconds)), units.share(p.share)] for p in view.outside]
    if not view.outside:
        rows.append(["nothing so far", "", ""])
    left = view.unaccounted_s if not frame.waiting else None
    share = left / view.clock_s if left is not None and view.clock_s else None
    rows.append([Text("unaccounted"), figure(units.duration(left)), units.share(share)])
    checks = [
        words(("ledger gap ", ""), figure(units.share(view.ledger_gap))),
        words(("ft-insight itself ", ""), figure(units.share(view.self_share))),
    ]
    return [*table(rows, "<>>"), cut(joined(checks), width)]


def outside_title(frame: Frame) -> Text:
    """Head the rest of the time with the share of the elapsed time that it is."""
    view = frame.view
    spent = sum(s.seconds for s in view.outside) / view.clock_s if view.clock_s and view.outside else None
    return words(("outside of steps ", ""), figure(units.share(spent)), " of elapsed")


def clock_title(frame: Frame) -> Text:
    """Head the ledger with the clock that measured it."""
    clock = {"cuda": "the GPU's", "host": "the host's"}.get(frame.view.phase_clock, clean(frame.view.phase_clock, 20))
    idle = frame.view.idle_at_most
    bound = "" if idle is None else f" · it idled at most {units.share(idle)}"
    return words(("phases of a step", ""), f" · by {clock} clock{bound}")


def step_curve(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the wall time of the steps."""
    points = frame.view.curves.get("step_s", ())
    lines = chart(trend(points), width, height, Axis(lambda s: f"{tick(s)} s", low=0.0), Axis(units.count))
    return lines or [Text("no curve before the second step", QUIET)]


def curve_title(frame: Frame) -> Text:
    """Head the curve of step times."""
    return words(
        ("seconds per step, by step", ""),
        f" · median {units.duration(frame.view.step_s)}",
        ("  ━", CURVE),
        " running mean",
    )
