"""Nsight Compute's figures of the kernels that a window saw, from its CSV export.

``ncu --import report.ncu-rep --csv --page details`` writes one line per metric, ``--page raw`` one per kernel with a
line of units after the head; either may begin with ``==PROF==`` lines and the application's own output. A profiled
kernel runs alone and slowly, so its times are not used for anything but weighing its own launches: what a role
takes is what the window measured.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ft_insight.reader import read_run
from ft_insight.records import KernelName, KernelRole, Kernels
from ft_insight.runlog import LogWriter

_METRICS = {
    "compute (sm) throughput": "sm",
    "compute (sm) [%]": "sm",
    "sm [%]": "sm",
    "sol sm": "sm",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm",
    "memory throughput": "memory",
    "memory [%]": "memory",
    "sol memory": "memory",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "dram throughput": "dram",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram",
    "duration": "duration",
    "gpu__time_duration.sum": "duration",
    "gpu__time_duration.avg": "duration",
}
_SECONDS = {
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
}
_KERNEL = "Kernel Name"


class NcuError(ValueError):
    """A file that is no CSV export of Nsight Compute; its message is one line, fit to show."""


@dataclass(frozen=True)
class NcuKernel:
    """One profiled launch, or several of one kernel that the export has already averaged."""

    name: str
    grid: str | None
    """Blocks, as ``64x8x1``."""
    seconds: float | None
    sm_percent: float | None
    memory_percent: float | None
    dram_percent: float | None


def read_ncu(path: str | Path) -> list[NcuKernel]:
    """Read an export, of either page."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise NcuError(f"cannot read {path}: {error.strerror or error}") from None
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if _is_head(line)), None)
    if start is None:
        raise NcuError(
            f"{path} is no CSV export of Nsight Compute: no line names {_KERNEL!r} "
            "(make one with `ncu --import report.ncu-rep --csv --page details`)"
        )
    try:
        head, *rows = csv.reader(line for line in lines[start:] if not line.startswith("=="))
    except csv.Error as error:
        raise NcuError(f"{path} is no CSV export of Nsight Compute: {error}") from None
    needed = max(len(head) - 1, head.index(_KERNEL) + 1)
    rows = [row for row in rows if len(row) >= needed]
    kernels = _from_details(head, rows) if "Metric Name" in head else _from_raw(head, rows)
    if not any(k.sm_percent is not None or k.memory_percent is not None or k.dram_percent is not None for k in kernels):
        raise NcuError(
            f"{path} has no SM or memory throughput: profile with `ncu --set basic` or `--section SpeedOfLight`"
        )
    return kernels


def _is_head(line: str) -> bool:
    if _KERNEL not in line:
        return False
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error:
        return False
    return _KERNEL in cells and len(cells) > 2


def _from_details(head: list[str], rows: Iterable[list[str]]) -> list[NcuKernel]:
    """One line per metric; launches are told apart by their ID, or by name where the export has averaged them."""
    launches: dict[tuple[str, ...], dict[str, str]] = {}
    values: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        cells = dict(zip(head, row, strict=False))
        key = cells.get("ID", ""), cells.get("Process ID", ""), cells[_KERNEL], cells.get("Grid Size", "")
        launches[key] = cells
        reading = _reading(cells.get("Metric Name", ""), cells.get("Metric Unit", ""), _value(cells))
        if reading is not None:
            values.setdefault(key, {}).setdefault(*reading)
    return [_kernel(cells, values.get(key, {})) for key, cells in launches.items()]


def _value(cells: dict[str, str]) -> str:
    return cells.get("Metric Value", cells.get("Average", ""))


def _from_raw(head: list[str], rows: Sequence[list[str]]) -> list[NcuKernel]:
    """One line per launch; a line of units, which names no kernel, comes first."""
    name = head.index(_KERNEL)
    units: list[str] = []
    kernels = []
    for row in rows:
        if not row[name]:
            units = units or row
            continue
        found: dict[str, float] = {}
        for i, (title, value) in enumerate(zip(head, row, strict=False)):
            reading = _reading(title, units[i] if i < len(units) else "", value)
            if reading is not None:
                found.setdefault(*reading)
        kernels.append(_kernel(dict(zip(head, row, strict=False)), found))
    return kernels


def _kernel(cells: dict[str, str], values: dict[str, float]) -> NcuKernel:
    grid = cells.get("Grid Size") or cells.get("launch__grid_dim")
    numbers = re.findall(r"\d+", grid or "")
    return NcuKernel(
        cells[_KERNEL],
        "x".join(numbers) if len(numbers) == 3 else None,
        values.get("duration"),
        values.get("sm"),
        values.get("memory"),
        values.get("dram"),
    )


def _reading(metric: str, unit: str, text: str) -> tuple[str, float] | None:
    """Return which figure a cell is and its value; None for others. Throughputs come in bytes per second, too."""
    which = _METRICS.get(metric.strip().lower())
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if which is None or not math.isfinite(value):
        return None
    unit = unit.strip().lower()
    if which == "duration":
        return which, value * _SECONDS.get(unit or "ns", math.nan)
    return (which, value) if unit in ("%", "") else None


def attach(kernels: Kernels, ncu: Sequence[NcuKernel]) -> Kernels:
    """Fill in SM and memory percentages by role: of each kernel, weighted by the time that the window saw it take."""
    figures = _Figures(ncu)
    matched: dict[tuple[str, str, str], list[tuple[float, NcuKernel]]] = {}
    for name in kernels.names:
        found = figures.of(name)
        if found is not None:
            matched.setdefault((name.kind, name.role, name.pass_name), []).append((name.seconds, found))
    if not matched:
        raise NcuError(
            "no kernel of this report is in the log: profile the same model and step, and record kernels on a GPU"
        )
    roles = tuple(_filled(role, matched.get((role.kind, role.role, role.pass_name), [])) for role in kernels.roles)
    return msgspec.structs.replace(kernels, roles=roles)


def _filled(role: KernelRole, found: list[tuple[float, NcuKernel]]) -> KernelRole:
    covered = sum(seconds for seconds, _ in found)
    return msgspec.structs.replace(
        role,
        sm_percent=_mean((s, k.sm_percent) for s, k in found),
        memory_percent=_mean((s, k.memory_percent) for s, k in found),
        dram_percent=_mean((s, k.dram_percent) for s, k in found),
        ncu_coverage=round(min(covered / role.seconds, 1.0), 4) if found and role.seconds > 0 else None,
    )


def _mean(values: Iterable[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in values if value is not None]
    whole = sum(weight for weight, _ in known)
    return round(sum(weight * value for weight, value in known) / whole, 3) if whole > 0 else None


class _Figures:
    """Profiled kernels by name: as written, then as both tools may agree to write it, then the bare function.

    A launch of the same size is preferred, for one kernel serves matmuls of several roles.
    """

    def __init__(self, ncu: Sequence[NcuKernel]) -> None:
        self._known: dict[tuple[str, str | None], list[NcuKernel]] = {}
        for kernel in ncu:
            for spelling in _spellings(kernel.name):
                for grid in {kernel.grid, None}:
                    self._known.setdefault((spelling, grid), []).append(kernel)

    def of(self, name: KernelName) -> NcuKernel | None:
        for spelling in _spellings(name.name):
            for grid in (name.grid, None):
                found = self._known.get((spelling, grid))
                if found:
                    return _averaged(found)
        return None


def _averaged(kernels: list[NcuKernel]) -> NcuKernel:
    weights = [k.seconds if k.seconds and math.isfinite(k.seconds) else 1e-9 for k in kernels]
    pairs = list(zip(weights, kernels, strict=True))
    return NcuKernel(
        kernels[0].name,
        None,
        sum(weights),
        _mean((w, k.sm_percent) for w, k in pairs),
        _mean((w, k.memory_percent) for w, k in pairs),
        _mean((w, k.dram_percent) for w, k in pairs),
    )


def _spellings(name: str) -> Iterator[str]:
    """Yield a kernel's name from most to least specific."""
    yield name
    plain = re.sub(r"\((?:unsigned )?(?:int|long|bool|char|short)\)", "", name)
    plain = re.sub(r"(?<=\d)u?l{0,2}\b|\s|^void\s", "", _without_arguments(plain))
    yield plain
    bare = re.sub(r"<.*", "", plain)
    yield bare.rpartition("::")[2]


def _without_arguments(name: str) -> str:
    """Cut the list of arguments off: the last bracket at the outermost level."""
    depth = 0
    for position in range(len(name) - 1, -1, -1):
        depth += (name[position] == ")") - (name[position] == "(")
        if depth == 0:
            return name[:position] if name[position] == "(" else name
    return name


def import_into(log: Path, csv: Path) -> str:
    """Fill the figures of a report into the kernels of a finished run; return what was done, in a line.

    The filled record is appended to the log, so that nothing is lost. Raises :class:`NcuError` for a run that records
    no kernels on a device, is still going on, or has none of the kernels of the report.
    """
    view, status = read_run(log)
    if view.kernels is None or not view.kernels.names:
        raise NcuError(f"{log} holds no kernels of a GPU: train with FtInsightCallback(kernels=True) on one first")
    if not status.over:
        raise NcuError(f"{log} is still being written ({status.text}): import when the run is over")
    filled = attach(view.kernels, read_ncu(csv))
    covered = sum(role.share * (role.ncu_coverage or 0.0) for role in filled.roles)
    if not covered:
        raise NcuError(f"{csv} has none of the kernels of {log}: was it taken of the same training?")
    writer = LogWriter(log, lambda: view.clock_s, append=True)
    writer.put(filled)
    writer.close()
    if writer.failure:
        raise NcuError(writer.failure)
    roles = sum(role.sm_percent is not None for role in filled.roles)
    return f"SM and memory use of {roles} roles, {covered:.0%} of kernel time, added to {log}: ft-insight report {log}"
