"""The same work on several published GPUs: each time predicted from each other, by the rules that `project` uses."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from ft_insight.catalog import Gpu, UnknownGpuError, find_gpu
from ft_insight.estimate.buckets import FP32, OVERLAP, Buckets, split
from ft_insight.estimate.transfer import TransferError, refusal
from ft_insight.estimate.work import Work, work_of
from ft_insight.validate.checked import Checked
from ft_insight.validate.table import length_of, method_of, number, says_yes, seconds_of
from ft_insight.words import clean

METHOD = "cross-GPU"
LEAST_SWEEP = 3
"""Batch sizes on one GPU from which fixed and per-slot time are told apart."""
LEAST_SPAN = 2.0
"""Of the largest batch over the smallest."""
ACTIVE_B = {"mixtral-8x7b": 12.9, "blackmamba-2.8b": 0.937}
"""Parameters in billions that a token passes through, where the notes do not say that all experts were active."""
LAYERS = ((0.3, 24), (2.0, 24), (4.0, 32), (10.0, 32), (20.0, 40), (50.0, 32), (math.inf, 80))
"""Decoder layers by billions of parameters, up to which."""

Row = dict[str, str]


def check(rows: Sequence[Row]) -> tuple[list[Checked], list[str]]:
    """Predict each row of a ``pair_id`` from each other row of it; return the checks, and what was left out and why.

    Columns as in a table of published runs: source, model, params_b, method, precision, grad_ckpt, gpu, n_gpus,
    batch_per_gpu, seq_len, step_time_s, sweep_id, pair_id, notes. Only the source's own sweep says which part of
    its time is fixed; nothing of the target's measurement is used.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("pair_id"):
            groups.setdefault(row["pair_id"], []).append(row)
    checks: list[Checked] = []
    notes: dict[str, int] = {}
    for group in groups.values():
        for source, target in itertools.permutations(group, 2):
            found = _check_pair(source, target, rows)
            if isinstance(found, Checked):
                checks.append(found)
            else:
                notes[found] = notes.get(found, 0) + 1
    left_out = [f"{count} pairs left out: {why}" for why, count in notes.items()]
    alone = [clean(name, 60) for name, group in groups.items() if len(group) == 1]
    if alone:
        left_out.append(f"{len(alone)} rows left out that are alone with their pair_id: {', '.join(alone)}")
    return checks, left_out


def _check_pair(source: Row, target: Row, rows: Sequence[Row]) -> Checked | str:
    """Return the check of one ordered pair, or why it cannot be checked."""
    try:
        here, there = find_gpu(source["gpu"]), find_gpu(target["gpu"])
    except UnknownGpuError as error:
        return str(error).split(":", maxsplit=1)[0]
    measured, total = seconds_of(target), seconds_of(source)
    if not measured or not total:
        return "no step time"
    if (source.get("n_gpus") or "1") != (target.get("n_gpus") or "1"):
        return "another number of GPUs"
    if _differ(source, target, "batch_per_gpu", number) or _differ(source, target, "seq_len", length_of):
        return "another batch or length"
    if here.name == there.name:
        return "the same GPU"
    why = refusal(here, there, source.get("precision"))
    if isinstance(why, TransferError):
        return why.reason
    work = work_in(source)
    if work is None:
        return "the size of the model or the method is not stated"
    moved = buckets_in(source, rows, here, work, total).on(here, there)
    factor = math.exp(moved.spread)
    return Checked(
        method=METHOD,
        source=source["source"],
        gpu=there.name,
        label=_label(source, here, there, moved),
        measured=measured,
        predicted=moved.total_s,
        unit="s",
        low=moved.total_s / factor,
        high=moved.total_s * factor,
    )


def _differ(one: Row, other: Row, name: str, read: Callable[[str], float | None]) -> bool:
    """Tell whether both rows say what a column is, and not the same."""
    values = [read(row.get(name, "")) for row in (one, other)]
    return None not in values and values[0] != values[1]


def _label(row: Row, here: Gpu, there: Gpu, moved: Buckets) -> str:
    batch = f"batch {row['batch_per_gpu']}" if row.get("batch_per_gpu") else "batch not stated"
    notes = " dense" if "dense" in row.get("notes", "") else ""
    basis = f"{moved.basis}, fp32" if moved.number_format == FP32 else moved.basis
    return f"{row['model']} {row['method']}{notes} {batch}: {here.name} -> {there.name} ({basis})"


def buckets_in(row: Row, rows: Sequence[Row], gpu: Gpu, work: Work, total_s: float) -> Buckets:
    """Return the buckets of a published row: from its GPU's own sweep over batches, else traced from its work."""
    form = FP32 if re.search(r"fp32|float32", row.get("precision", "").split(",")[0].split("/")[0]) else None
    return split(
        total_s, work, gpu, fixed_s=_fixed_seconds(row, rows, total_s), number_format=form, with_optimizer=True
    )


def _fixed_seconds(row: Row, rows: Sequence[Row], total_s: float) -> float | None:
    """Return the part of the row's time that its sweep says is fixed; None without enough batch sizes.

    ``T^n = h^n + (c b)^n`` is linear in ``b^n``; errors count relative to the time.
    """
    batch = number(row.get("batch_per_gpu", ""))
    sweep = [
        (number(each.get("batch_per_gpu", "")), seconds_of(each))
        for each in rows
        if row.get("sweep_id") and each.get("sweep_id") == row["sweep_id"] and each.get("gpu") == row["gpu"]
    ]
    points = [(b, t) for b, t in sweep if b and t]
    sizes = {b for b, _ in points}
    if not batch or len(sizes) < LEAST_SWEEP or max(sizes) < LEAST_SPAN * min(sizes):
        return None
    x, y = (np.array(column, dtype=float) ** OVERLAP for column in zip(*points, strict=True))
    design = np.stack([1 / y, x / y], axis=1)
    fixed, slope = np.maximum(np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0], 0.0)
    whole = fixed + slope * batch**OVERLAP
    return float(total_s * (fixed / whole) ** (1 / OVERLAP)) if whole > 0 else None


def work_in(row: Row) -> Work | None:
    """Return the work of a published row, as far as its columns tell it; None without the model's size or method."""
    size, method = number(row.get("params_b", "")), method_of(row["method"])
    if not size or not method:
        return None
    dense = "dense" in row.get("notes", "")
    active = None if dense else ACTIVE_B.get(row["model"].lower())
    batch, length = number(row.get("batch_per_gpu", "")), length_of(row.get("seq_len", ""))
    return work_of(
        parameters=size * 1e9,
        active=None if active is None else active * 1e9,
        method=method,
        recomputed=says_yes(row.get("grad_ckpt", "")),
        slots=batch * length if batch and length else None,
        layers=next(layers for most, layers in LAYERS if size <= most),
        experts=8 if row["model"].lower() in ACTIVE_B else None,
    )
