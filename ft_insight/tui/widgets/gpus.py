"""GPUs and memory: short rows for the overview, curves for their own page."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from ft_insight import units
from ft_insight.gpu_words import percent
from ft_insight.records import Device
from ft_insight.run_view import GpuView, RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import Axis, bar, chart, spark, tick, trend
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    QUIET,
    STRONG,
    Cell,
    clean,
    cut,
    figure,
    flow,
    joined,
    table,
    words,
    wrap,
)

FULL = 0.95
"""Memory fuller than this asks for attention: the next long batch may not fit."""
HOT_C = 85.0


def overview_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw utilisation, memory, power and temperature of each GPU, or why there is none of that."""
    view = frame.view
    if not view.gpus:
        return _without_gpu(frame, width, height)
    if height >= 7 * len(view.gpus):
        return _roomy(view, width, height)
    if height > len(view.gpus) > 2:
        return [*gpu_table(view, width), *flow(_allocator(view), width)][:height]
    each = 2 if len(view.gpus) * 2 <= height else 1
    shown = len(view.gpus) if len(view.gpus) * each <= height else max(1, (height - 1) // each)
    lines = [line for n, gpu in enumerate(view.gpus[:shown]) for line in _rows(view, gpu, n, width)[:each]]
    if shown < len(view.gpus):
        return [*lines, Text(f"{len(view.gpus) - shown} more: tab 5", QUIET)]
    return [*lines, cut(joined(_allocator(view)), width)][:height]


def gpu_table(view: RunView, width: int) -> list[Text]:
    """Draw one row per GPU."""
    limits = width >= 50
    rows: list[list[Cell]] = [["GPU", "util", "SM", "memory", "power", ""]]
    for number, gpu in enumerate(view.gpus):
        now = gpu.latest
        part = _part(now.memory_used_bytes, now.memory_total_bytes)
        used = figure(units.size(now.memory_used_bytes), ATTENTION if part and part >= FULL else STRONG)
        shares = [figure(percent(now.gpu_percent)), figure(percent(now.sm_percent))]
        memory = words(used, f" of {units.size(now.memory_total_bytes)}" if limits else "")
        rows.append([str(number), *shares, memory, watts(gpu, "", limit=limits), celsius(now.temperature_c)])
    return table(rows, ">>>>>>", gap=1)


def _roomy(view: RunView, width: int, height: int) -> list[Text]:
    """Give each GPU a block of figures with bars, and what is left of the height to its utilisation."""
    lines: list[Text] = []
    below = flow(_allocator(view), width, most=3)
    spare = (height - len(below)) // len(view.gpus) - 5
    for number, gpu in enumerate(view.gpus):
        now = gpu.latest
        counted = bool(gpu.curve("sm_percent"))
        curve = gpu.curve("sm_percent" if counted else "gpu_percent")
        drawn = spare >= 4 and bool(curve)
        key = words(("━ ", CURVE), f"{'SM' if counted else 'util'} over time") if drawn else Text()
        head = joined([_called(view, gpu, number, 30), celsius(now.temperature_c)])
        lines.append(joined([head, key]) if head.cell_len + key.cell_len + 3 <= width else head)
        lines += _block(gpu, width)
        if drawn:
            lines += chart(trend(curve), width, min(spare, 12), scale("%", 100.0), Axis(units.clock))
    return [*lines, *below]


def _block(gpu: GpuView, width: int) -> list[Text]:
    now = gpu.latest
    filled = _part(now.memory_used_bytes, now.memory_total_bytes)
    limit = now.power_limit_w
    percents = ((now.gpu_percent, "util"), (now.sm_percent, "SM"))
    rows: list[tuple[Text, Text, float | None, str]] = [
        (Text(name), figure(percent(value)), None if value is None else value / 100, CURVE) for value, name in percents
    ]
    rows.append((Text("memory"), _used(gpu), filled, _full_colour(filled)))
    drawn = now.power_w
    rows.append((Text("power"), watts(gpu, ""), drawn / limit if drawn is not None and limit else None, CURVE))
    figures = table([row[:2] for row in rows], "<<")
    widest = max(line.cell_len for line in figures)
    room = min(60, width - widest - 2)
    lines = []
    for line, (_, _, part, style) in zip(figures, rows, strict=True):
        space = " " * (widest - line.cell_len + 2)
        lines.append(line if part is None or room < 6 else words(line, space, bar(part, room, style)))
    return lines


def _called(view: RunView, gpu: GpuView, number: int, most: int) -> Text:
    return words((f"GPU {number} ", ""), clean(gpu_name(view, gpu), most))


def _used(gpu: GpuView) -> Text:
    return words(sized(gpu.latest.memory_used_bytes), f" of {units.size(gpu.latest.memory_total_bytes)}")


def _full_colour(part: float | None) -> str:
    return ATTENTION if part is not None and part >= FULL else CURVE


def gpu_title(frame: Frame) -> Text:
    """Head the panel."""
    count = len(frame.view.gpus)
    return words(("GPU and memory", ""), f" · {count} GPUs" if count > 1 else "")


def _rows(view: RunView, gpu: GpuView, number: int, width: int) -> list[Text]:
    now = gpu.latest
    figures = [
        words(("util ", ""), figure(percent(now.gpu_percent))),
        words(("SM ", ""), figure(percent(now.sm_percent))),
        watts(gpu),
        celsius(now.temperature_c),
    ]
    spare = width - joined([Text(f"GPU {number}"), *figures]).cell_len - 1
    facts = joined([_called(view, gpu, number, max(0, min(22, spare))), *figures])
    room = width - facts.cell_len - 2
    if room >= 8:
        busy = gpu.curve("sm_percent") or gpu.curve("gpu_percent")
        facts = words(facts, "  ", spark(busy, min(room, 40), high=100.0))
    part = _part(now.memory_used_bytes, now.memory_total_bytes)
    used = words(("memory ", ""), _used(gpu), "  ")
    room = min(width - used.cell_len - 5, 60)
    if part is not None and room > 5:
        style = _full_colour(part)
        used = words(used, bar(part, room, style), (f" {units.share(part)}", style if part >= FULL else QUIET))
    return [facts, used]


def _without_gpu(frame: Frame, width: int, height: int) -> list[Text]:
    if frame.waiting:
        return [Text("nothing yet", QUIET)]
    memory = frame.view.memory
    rss = memory.rss_bytes if memory else None
    lines = [words(("memory of the process ", ""), figure(units.size(rss)), " RSS")]
    if memory and memory.allocated_bytes is not None:
        lines.append(joined(_allocator(frame.view)[:2]))
    why = no_gpu_reason(frame.view)
    return lines + wrap(f"no GPU statistics: {why}", width, QUIET, most=max(1, height - len(lines)))


def no_gpu_reason(view: RunView) -> str:
    """Say why there are no GPU statistics: the collector's own words, or the lack of a GPU."""
    told = reasons(view)
    if told:
        return told[0]
    devices = view.header.devices if view.header else ()
    if devices and all(d.kind != "cuda" for d in devices):
        kinds = ", ".join(sorted({clean(d.kind, 12) for d in devices}))
        return f"the run computes on: {kinds}"
    return "none in the log yet"


def reasons(view: RunView) -> list[str]:
    """List what the collectors said of GPUs, the reasons for being off first."""
    told = [n for n in view.notices if any(w in n.collector.lower() for w in ("gpu", "nvml"))]
    return [clean(n.text) for n in sorted(told, key=lambda n: not n.off)]


def _allocator(view: RunView) -> list[Text]:
    memory = view.memory
    facts = (
        ("torch peak ", memory.peak_allocated_bytes if memory else None),
        ("reserved ", memory.reserved_bytes if memory else None),
        ("process RSS ", memory.rss_bytes if memory else None),
    )
    return [words((name, ""), sized(value)) for name, value in facts]


def gpu_name(view: RunView, gpu: GpuView) -> str:
    """Return the name of a GPU, from the header's device of the same identity."""
    device = _device(view, gpu)
    return device.name if device else ""


def _device(view: RunView, gpu: GpuView) -> Device | None:
    devices = view.header.devices if view.header else ()
    return next((d for d in devices if gpu.latest.uuid in (d.uuid, d.pci)), None)


def scale(unit: str, high: float | None) -> Axis:
    """Return an axis from 0 in a unit."""
    text: Callable[[float], str] = lambda v: f"{tick(v)}{unit}"  # noqa: E731
    return Axis(text, low=0.0, high=high)


def sized(value: float | None) -> Text:
    """Write bytes to be read first."""
    return figure(units.size(value))


def _part(used: int | None, total: int | None) -> float | None:
    return used / total if used is not None and total else None


def watts(gpu: GpuView, unknown: str = "power ", *, limit: bool = True) -> Text:
    """Write the power drawn, of its limit."""
    drawn, most = gpu.latest.power_w, gpu.latest.power_limit_w if limit else None
    if drawn is None:
        return words((unknown, ""), figure(units.NA))
    return words((units.count(drawn), STRONG), f" of {units.count(most)} W" if most else " W")


def celsius(value: float | None) -> Text:
    """Write a temperature; a hot one asks for attention."""
    if value is None:
        return Text()
    return Text(f"{units.count(value)} °C", ATTENTION if value >= HOT_C else STRONG)
