"""The GPU page: what every GPU did over the run, by phase, and what held it back."""

from __future__ import annotations

from rich.text import Text

from ft_insight import units
from ft_insight.gpu_words import (
    SOURCES,
    errors,
    held_down,
    per_second,
    percent,
    phase_reasons,
    phase_rows,
    phases_reason,
    unknown_lines,
)
from ft_insight.run_view import GpuView, Points, RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.gpus import celsius, gpu_name, gpu_table, no_gpu_reason, reasons, scale, sized, watts
from ft_insight.tui.widgets.plots import Axis, chart, spark, trend
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
    joined,
    table,
    words,
    wrap,
)

MOST_CHARTED = 2
"""GPUs with charts; of more, each curve is one line."""
SPARK = 40
Plot = tuple[str, Text, Points, Axis]


def page_title(frame: Frame) -> Text:
    """Head the page."""
    count = len(frame.view.gpus)
    return Text(f"{count} GPUs" if count > 1 else "GPU")


def gpu_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw every GPU over the time of the run."""
    view = frame.view
    if not view.gpus:
        return _without(frame, width)
    lines = gpu_table(view, width) if len(view.gpus) > MOST_CHARTED else []
    for number, gpu in enumerate(view.gpus):
        lines += [Text(), *_one(view, gpu, number, width, height)] if lines else _one(view, gpu, number, width, height)
    if view.gpu_dropped:
        lines += wrap(f"{view.gpu_dropped:,} readings missing: the driver did not answer in time", width, ATTENTION)
    for reason in reasons(view):
        if not reason.startswith("not known "):  # that stands with each GPU
            lines += wrap(reason, width, QUIET)
    return lines


def _without(frame: Frame, width: int) -> list[Text]:
    if frame.waiting:
        return []
    lines = wrap(f"no GPU statistics: {no_gpu_reason(frame.view)}", width, QUIET)
    host = frame.view.host
    if host is not None:
        cpu = words("CPU ", figure(percent(host.latest.cpu_percent)), " of one core")
        rows: list[list[Cell]] = [
            [cpu, spark(host.cpu_percent, min(SPARK, width // 2))],
            [words("resident ", sized(host.latest.rss_bytes)), spark(host.rss_bytes, min(SPARK, width // 2))],
        ]
        lines += [Text("the training process:", QUIET), *table(rows, "<<")]
    return lines


def _one(view: RunView, gpu: GpuView, number: int, width: int, height: int) -> list[Text]:
    now = gpu.latest
    source = SOURCES.get(now.counters or "", "")
    head = [
        words((f"GPU {number}", STRONG), f" {clean(gpu_name(view, gpu), 40)}"),
        Text("lost by its driver", ATTENTION) if gpu.lost_at_s is not None else Text(),
        words("counters by ", source) if source else Text(),
        words("memory ", sized(now.memory_used_bytes), f" of {units.size(now.memory_total_bytes)}"),
        words("this process ", sized(now.process_memory_bytes)),
        words("energy ", figure(_energy(gpu.energy_j))),
    ]
    lines = flow(head, width)
    if len(view.gpus) <= MOST_CHARTED:
        lines += _charts(_uses(gpu), width, height)
        lines += _sparks(_rest(gpu), width)
    else:
        lines += _sparks([*_uses(gpu), *_rest(gpu)], width)
    throttled = max(gpu.power_throttled or 0.0, gpu.thermal_throttled or 0.0) > 0
    held = words("clocks held down by: ", (held_down(gpu), ATTENTION if throttled else ""))
    bad = bool(gpu.xids or gpu.ecc_uncorrected)
    lines += [cut(held, width), cut(words("errors: ", (errors(gpu), ATTENTION if bad else "")), width)]
    return [*lines, *_phases(gpu, width), *(line for u in unknown_lines(gpu) for line in wrap(u, width, QUIET))]


def _energy(joules: float | None) -> str:
    return units.NA if joules is None else f"{units.significant(joules / 3.6e6)} kWh"


def _uses(gpu: GpuView) -> list[Plot]:
    """List what is drawn large: how busy the parts of the GPU are, and what that takes."""
    now, full = gpu.latest, scale("%", 100.0)
    counted = bool(gpu.curve("sm_percent"))
    busy = ("SM active", "sm_percent") if counted else ("utilisation (any kernel)", "gpu_percent")
    dram = (
        ("DRAM bandwidth", "dram_percent")
        if gpu.curve("dram_percent")
        else (
            "memory controller",
            "memory_controller_percent",
        )
    )
    shares = [busy, dram, ("tensor cores", "tensor_percent")]
    plots = [(word, figure(percent(getattr(now, name))), gpu.curve(name), full) for word, name in shares]
    return [*plots, ("power", watts(gpu, ""), gpu.curve("power_w"), scale(" W", now.power_limit_w))]


def _rest(gpu: GpuView) -> list[Plot]:
    """List what is drawn in one line each."""
    now = gpu.latest
    counted = bool(gpu.curve("sm_percent"))
    plots: list[Plot] = []
    if counted:
        plots.append(("utilisation", figure(percent(now.gpu_percent)), gpu.curve("gpu_percent"), scale("%", 100.0)))
        occupied = figure(percent(now.sm_occupancy_percent))
        plots.append(("SM occupancy", occupied, gpu.curve("sm_occupancy_percent"), scale("%", 100.0)))
    heat = celsius(now.temperature_c) if now.temperature_c is not None else figure(units.NA)
    plots.append(("temperature", heat, gpu.curve("temperature_c"), scale(" °C", None)))
    for word, name in (("SM clock", "sm_clock_mhz"), ("memory clock", "memory_clock_mhz")):
        value = getattr(now, name)
        text = figure(units.NA if value is None else f"{units.count(value)} MHz")
        plots.append((word, text, gpu.curve(name), scale("", None)))
    for word, link in (("PCIe", "pcie"), ("NVLink", "nvlink")):
        for way, name in (("out", "tx"), ("in", "rx")):
            field = f"{link}_{name}_bytes_per_s"
            plots.append((f"{word} {way}", figure(per_second(getattr(now, field))), gpu.curve(field), scale("", None)))
    return plots


def _charts(plots: list[Plot], width: int, height: int) -> list[Text]:
    across = 2 if width >= 96 else 1
    column = (width - 3 * (across - 1)) // across
    drawn = [p for p in plots if p[2]]
    tall = max(6, (height - 16) // max(1, -(-len(drawn) // across)))
    blocks = [
        [words(f"{word} ", now), *chart(trend(points), column, min(tall, 12) - 1, axis, Axis(units.clock))]
        for word, now, points, axis in drawn
    ]
    lines: list[Text] = []
    for i in range(0, len(blocks), across):
        pair = blocks[i : i + across]
        lines += beside(pair[0], pair[1], column, 3) if len(pair) == 2 else pair[0]
    absent = [words(f"{word} ", now) for word, now, points, _ in plots if not points]
    return lines + (flow(absent, width) if absent else [])


def _sparks(plots: list[Plot], width: int) -> list[Text]:
    """Draw a curve in a line each, in two columns where there is room."""
    column = (width - 3) // 2 if width >= 96 else width
    room = min(SPARK, column - 34)
    rows: list[list[Cell]] = [
        [word, now, spark(points, room, low=axis.low, high=axis.high) if points and room > 0 else Text()]
        for word, now, points, axis in plots
    ]
    if width < 96:
        return table(rows, "<<<")
    half = -(-len(rows) // 2)
    return beside(table(rows[:half], "<<<"), table(rows[half:], "<<<"), column, 3)


def _phases(gpu: GpuView, width: int) -> list[Text]:
    rows = phase_rows(gpu)
    if not rows:
        return wrap(f"use by phase n/a: {phases_reason(gpu)}", width, QUIET)
    title = joined([Text("use by phase", STRONG), Text("mean [80% interval]", QUIET)])
    cells: list[list[Cell]] = [[*rows[0]]]
    for name, share, *means in rows[1:]:
        cells.append([name, Text(share), *(figure(m, "") for m in means)])
    lines = [title, *(cut(line, width) for line in table(cells, "<" + ">" * (len(rows[0]) - 1)))]
    return lines + [line for why in phase_reasons(gpu) for line in wrap(why, width, QUIET)]
