"""The GPUs in a report: one table of all, then by phase, what held them back and what is not known."""

from __future__ import annotations

from ft_insight import units
from ft_insight.gpu_words import (
    errors,
    held_down,
    per_second,
    percent,
    phase_reasons,
    phase_rows,
    phases_reason,
    unknown_lines,
)
from ft_insight.report.layout import Section
from ft_insight.run_view import GpuView, Points, RunView
from ft_insight.words import clean

SHARES = {"utilisation": "gpu_percent", "SM active": "sm_percent", "tensor": "tensor_percent", "DRAM": "dram_percent"}
HEAD = ("GPU", *SHARES, "memory", "power", "heat", "SM clock", "PCIe out / in", "NVLink out / in")


def gpu_sections(view: RunView) -> list[Section]:
    """Return the table of GPUs, and a section for each one's phases."""
    sections = []
    if view.gpus:
        after = [line for n, gpu in enumerate(view.gpus) for line in _words(n, gpu)]
        if view.gpu_dropped:
            after.append(f"{view.gpu_dropped:,} readings are missing: the driver did not answer in time")
        rows = [_row(n, gpu) for n, gpu in enumerate(view.gpus)]
        sections.append(Section("GPUs, means over the run", table=(HEAD, *rows), after=tuple(after)))
    for number, gpu in enumerate(view.gpus):
        rows = phase_rows(gpu)
        why = () if rows else (f"n/a: {phases_reason(gpu)}",)
        title, notes = f"Use of GPU {number} by phase, mean [80% interval]", phase_reasons(gpu) if rows else []
        sections.append(Section(title, lines=why, table=tuple(rows), after=tuple(notes)))
    if view.host is not None:
        cpu, rss = _mean(view.host.cpu_percent), view.host.latest.rss_bytes
        text = f"CPU {percent(cpu)} of one core on average, {units.size(rss)} resident"
        sections.append(Section("The training process on its host", (text,)))
    return sections


def _mean(points: Points) -> float | None:
    return sum(y for _, y in points) / len(points) if points else None


def _row(number: int, gpu: GpuView) -> tuple[str, ...]:
    mean = {name: _mean(points) for name, points in gpu.curves.items()}
    now = gpu.latest
    traffic = [
        f"{per_second(mean.get(f'{link}_tx_bytes_per_s'))} / {per_second(mean.get(f'{link}_rx_bytes_per_s'))}"
        for link in ("pcie", "nvlink")
    ]
    clock = mean.get("sm_clock_mhz")
    return (
        str(number),
        *(percent(mean.get(name)) for name in SHARES.values()),
        f"{units.size(now.memory_used_bytes)} of {units.size(now.memory_total_bytes)}",
        f"{_whole(mean.get('power_w'))} of {_whole(now.power_limit_w)} W",
        f"{_whole(mean.get('temperature_c'))} °C",
        units.NA if clock is None else f"{units.count(clock)} MHz",
        *traffic,
    )


def _whole(value: float | None) -> str:
    return units.NA if value is None else f"{value:.0f}"


def _words(number: int, gpu: GpuView) -> list[str]:
    lines = [f"GPU {number} is {clean(gpu.latest.uuid, 60)}; clocks held down by: {held_down(gpu)}; {errors(gpu)}"]
    if gpu.lost_at_s is not None:
        lines.append(f"GPU {number} was lost {units.duration(gpu.lost_at_s)} into the run")
    return lines + [f"GPU {number} {line}" for line in unknown_lines(gpu)]
