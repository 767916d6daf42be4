"""The Memory page: what fills memory, how much room is left in queries, and how the peak goes with the slots."""

from __future__ import annotations

from functools import lru_cache

from rich.text import Text

from ft_insight import units
from ft_insight.estimate.memory import Room, limit_here, room_here
from ft_insight.estimate.peak_fit import PeakMemory, fit_peak
from ft_insight.memory_points import MemoryView
from ft_insight.memory_words import (
    MOMENT_WORDS,
    Filled,
    basis_text,
    beside,
    failure_text,
    filled,
    fullest,
    headroom_text,
    no_parts_reason,
)
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import Axis, Layer, chart, split, tick
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    FAINT,
    GOOD,
    MARK,
    QUIET,
    TRACK,
    Cell,
    cut,
    figure,
    flow,
    table,
    words,
    wrap,
)

_COLOURS = {
    "weights": "#4f9fe0",
    "quantised weights": "#3f7fc0",
    "adapters": "#3fb8ac",
    "buffers": "#5a7d8c",
    "gradients": "#7d74d9",
    "optimizer state": "#5cb270",
    "activations": "#c583a6",
    "logits and loss": "#b58ad0",
    "temporaries": "#b8946a",
    "other": "#667180",
    "allocator reserve": "#4a5564",
}
_REST = "#3a4452"


def stack_title(frame: Frame) -> Text:
    """Head the stack with its moment and its sum."""
    moment = fullest(frame.view)
    if moment is None:
        return Text("what fills memory")
    when = MOMENT_WORDS.get(moment.name, moment.name)
    return words(("what fills memory ", ""), figure(units.size(moment.allocated_bytes)), f" · {when}")


def short_stack_title(frame: Frame) -> Text:
    """Head the stack where there is little room."""
    moment = fullest(frame.view)
    return words(("memory ", ""), figure(units.size(moment.allocated_bytes if moment else None)))


def stack_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw what fills memory as one bar up to the card's limit, and as rows with what each is made of."""
    view = frame.view
    if frame.waiting:
        return [Text("nothing yet", QUIET)]
    moment = fullest(view)
    if moment is None:
        return wrap(f"{units.NA}: counted at the end of the first step", width, QUIET)
    rows = filled(moment)
    outside, unknown = beside(view)
    total = limit_here(view)
    whole = max(total.total if total else 0.0, float(sum(max(0, r.bytes) for r in (*rows, *outside))))
    lines = [_bar([*rows, *outside], whole, width), *_rows([*rows, *outside], whole, width)]
    if total is not None:
        free = max(0.0, whole - sum(r.bytes for r in (*rows, *outside)))
        lines.append(words(("□ ", TRACK), "free ", figure(units.size(free)), f" of {units.size(whole)}"))
    else:
        unknown.append("limit: a CPU run has no card" if view.filling.method == "storages" else "limit: not known")
    for text in (no_parts_reason(view), *unknown):
        lines += wrap(f"{units.NA} {text}", width, QUIET) if text else []
    return lines


def _colour(name: str) -> str:
    return _COLOURS.get(name, _REST)


def _bar(rows: list[Filled], whole: float, width: int) -> Text:
    shares = [max(0, row.bytes) / whole if whole else 0.0 for row in rows]
    line = Text()
    for row, cells in zip(rows, split([*shares, max(0.0, 1 - sum(shares))], width), strict=False):
        label = f" {row.name}"
        line.append((label if len(label) < cells else "").ljust(cells), f"bold #10151c on {_colour(row.name)}")
    line.append("━" * (width - line.cell_len), TRACK)
    return line


def _rows(rows: list[Filled], whole: float, width: int) -> list[Text]:
    cells: list[list[Cell]] = [
        [
            words(("■ ", _colour(row.name)), (row.name, "")),
            figure(units.size(row.bytes)),
            units.share(row.bytes / whole if whole else None),
            row.detail,
        ]
        for row in rows
    ]
    return [cut(line, width) for line in table(cells, "<>><")]


# room


@lru_cache(maxsize=4)
def _fitted(seen: MemoryView) -> PeakMemory | str:
    return fit_peak(seen)


def _room(view: RunView) -> Room | str:
    return room_here(view)


def room_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Say how much room is left in queries, what that rests on, and what failed."""
    view = frame.view
    if frame.waiting:
        return []
    failures = [line for each in view.filling.failures[-2:] for line in _failure(failure_text(each), width)]
    found = _room(view)
    batch = view.header.train.batch if view.header else None
    if isinstance(found, str):
        return [*wrap(f"{units.NA} room: {found}", width, QUIET), *_fit_facts(view, width), *failures]
    style = ATTENTION if batch is not None and found.batch < batch else GOOD
    lines = wrap(headroom_text(found, batch), width, style)
    interval = f" [{found.low}-{found.high}]"
    facts = [
        words(f"at {found.longest:,} tokens, the longest row ", figure(str(found.batch)), interval),
        words("of typical rows ", figure(_typical(found))),
        words("uses ", figure(units.size(found.use_bytes)), f" of {units.size(found.limit.total)}"),
    ]
    lines += flow(facts, width, most=3)
    return [*lines, *_fit_facts(view, width), *wrap(basis_text(found), width, QUIET), *failures]


def _typical(found: Room) -> str:
    return units.NA if found.typical is None else f"{found.typical[0]} [{found.typical[1]}-{found.typical[2]}]"


def _failure(text: str, width: int) -> list[Text]:
    return wrap(f"▲ {text}", width, ATTENTION, indent=2)


def _fit_facts(view: RunView, width: int) -> list[Text]:
    found = _fitted(view.filling)
    if isinstance(found, str):
        return wrap(f"{units.NA} bytes per slot: {found}", width, QUIET)
    low, high = found.per_slot_interval
    least, most = found.fixed_interval
    facts = [
        words(
            ("per slot ", ""),
            figure(units.size(found.bytes_per_slot)),
            f" [{units.size(low)}-{units.size(high)}]",
        ),
        words(("fixed ", ""), figure(units.size(found.fixed_bytes)), f" [{units.size(least)}-{units.size(most)}]"),
    ]
    return flow(facts, width)


# curves


def peak_title(frame: Frame) -> Text:
    """Head the peaks of micro-batches."""
    return words(("peak, by the slots of a micro-batch", ""), ("  •", CURVE), " known", ("  ━", MARK), " fit")


def peak_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw known peaks against slots with the fitted line; failures as crosses."""
    seen = frame.view.filling
    known = tuple((float(p.slots), p.low_bytes / units.GIB) for p in seen.points if p.exact)
    failed = tuple((float(p.slots), p.low_bytes / units.GIB) for p in seen.points if p.high_bytes is None)
    if not known and not failed:
        return [] if frame.waiting else wrap(f"{units.NA}: no micro-batch with a known peak yet", width, QUIET)
    layers = [Layer(known, CURVE, sign="•"), Layer(failed, ATTENTION, sign="x")]
    found = _fitted(seen)
    if isinstance(found, PeakMemory):
        most = max(x for x, _ in (*known, *failed))
        ends = (0.0, most)
        layers.insert(0, Layer(tuple((x, found.predict(x)[0] / units.GIB) for x in ends), MARK))
    return chart(layers, width, max(7, height), _bytes_axis(), Axis(lambda n: f"{units.count(n)} slots", low=0.0))


def timeline_title(frame: Frame) -> Text:
    """Head the timeline with the names of its curves."""
    curves = frame.view.curves
    if not curves.get("allocated_bytes"):
        return Text("resident memory of the process, by step")
    names = ((CURVE, "allocated"), (MARK, "peak so far"), (FAINT, "reserved"))
    keys = [words((" ━", style), f" {name} ") for style, name in names]
    return words(("memory, by step", ""), *keys)


def timeline_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw what was allocated between steps, reserved, and the highest so far; on a CPU what is resident."""
    curves = frame.view.curves
    wanted = (("reserved_bytes", FAINT), ("peak_allocated_bytes", MARK), ("allocated_bytes", CURVE))
    layers = [
        Layer(tuple((x, y / units.GIB) for x, y in curves[name]), style) for name, style in wanted if curves.get(name)
    ]
    if not layers and curves.get("rss_bytes"):
        layers = [Layer(tuple((x, y / units.GIB) for x, y in curves["rss_bytes"]))]
    if not layers:
        return [] if frame.waiting else wrap(f"{units.NA}: no memory was read yet", width, QUIET)
    return chart(layers, width, max(7, height), _bytes_axis(), Axis(lambda n: f"step {units.count(n)}"))


def _bytes_axis() -> Axis:
    return Axis(lambda gib: units.size(gib * units.GIB) if 0 < gib < 1 else f"{tick(gib)} GiB", low=0.0)
