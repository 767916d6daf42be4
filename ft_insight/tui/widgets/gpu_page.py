"""The GPU page: curves of every GPU over the run, and every memory figure."""

from __future__ import annotations

from rich.text import Text

from ft_insight import units
from ft_insight.run_view import GpuView, Points, RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.gpus import (
    celsius,
    gpu_name,
    no_gpu_reason,
    percent,
    reasons,
    scale,
    sized,
    watts,
)
from ft_insight.tui.widgets.plots import Axis, chart, trend
from ft_insight.tui.widgets.text import (
    QUIET,
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


def memory_table(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw every memory figure of the process."""
    memory = frame.view.memory
    names = (
        ("torch allocated", "allocated_bytes"),
        ("torch reserved", "reserved_bytes"),
        ("torch peak allocated", "peak_allocated_bytes"),
        ("torch peak reserved", "peak_reserved_bytes"),
        ("process RSS on the host", "rss_bytes"),
    )
    cells: list[list[Cell]] = [[label, sized(getattr(memory, name) if memory else None)] for label, name in names]
    return table(cells, "<>") if width < 70 or height < 1 else _two_columns(cells)


def _two_columns(cells: list[list[Cell]]) -> list[Text]:
    half = -(-len(cells) // 2)
    left = table(cells[:half], "<>")
    return beside(left, table(cells[half:], "<>"), left[0].cell_len, 6)


def gpu_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the curves of every GPU over the time of the run."""
    view = frame.view
    if not view.gpus:
        return wrap(f"no GPU statistics: {no_gpu_reason(view)}", width, QUIET) if not frame.waiting else []
    across = 2 if width >= 96 else 1
    lines: list[Text] = []
    for number, gpu in enumerate(view.gpus):
        lines += [*_heading(view, gpu, number, width), *_plots(gpu, width, height - 9, across)]
    for reason in reasons(view):
        lines += wrap(reason, width, QUIET)
    return lines


def _heading(view: RunView, gpu: GpuView, number: int, width: int) -> list[Text]:
    now = gpu.latest
    facts = [
        words((f"GPU {number}", STRONG), f" {clean(gpu_name(view, gpu), 40)}"),
        words("DRAM ", figure(percent(now.dram_percent))),
        words("memory controller ", figure(percent(now.memory_controller_percent))),
        words("this process ", sized(now.process_memory_bytes)),
        words("SM clock ", figure(f"{units.count(now.sm_clock_mhz)} MHz" if now.sm_clock_mhz else units.NA)),
        celsius(now.temperature_c),
    ]
    return flow(facts, width)


def _plots(gpu: GpuView, width: int, height: int, across: int) -> list[Text]:
    now = gpu.latest
    total = now.memory_total_bytes / units.GIB if now.memory_total_bytes else None
    gib = tuple((x, y / units.GIB) for x, y in gpu.memory_used_bytes)
    of = f" of {units.size(now.memory_total_bytes)}"
    limit = now.power_limit_w
    wanted: list[tuple[Text, Points, Axis]] = [
        (words(("utilisation ", ""), figure(percent(now.gpu_percent))), gpu.gpu_percent, scale("%", 100.0)),
        (words(("SM active ", ""), figure(percent(now.sm_percent))), gpu.sm_percent, scale("%", 100.0)),
        (words(("memory ", ""), sized(now.memory_used_bytes), of), gib, scale(" GiB", total)),
        (words(("power ", ""), watts(gpu, "")), gpu.power_w, scale(" W", limit)),
    ]
    column = (width - 3 * (across - 1)) // across
    drawn = [w for w in wanted if w[1] or across > 1]
    tall = max(6, height // max(1, -(-len(drawn) // across)))
    blocks = [[head, *chart(trend(points), column, tall - 1, axis, Axis(units.clock))] for head, points, axis in drawn]
    lines = [head for head, points, _ in wanted if not points and across == 1]
    for i in range(0, len(blocks), across):
        pair = blocks[i : i + across]
        lines += beside(pair[0], pair[1], column, 3) if len(pair) == 2 else pair[0]
    return lines
