"""Sweeps of one thing on one GPU over batch sizes or sequence lengths: each time predicted from all others."""

from __future__ import annotations

from dataclasses import dataclass

from ft_insight.estimate.joint import fit_joint
from ft_insight.estimate.models import Point
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.validate.checked import Checked
from ft_insight.validate.table import number, seconds_of

BY_BATCH = "leave-one-out"
BY_TOKENS = "leave-one-out, tokens"
LEAST_SIZES = 4
"""With one of three left out, two unknowns run through the other two: there is no fit to speak of."""

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Sweep:
    name: str
    rows: list[Row]
    points: list[Point]
    method: str
    untold: int
    """Rows that do not say enough to be a point."""


def check(rows: list[Row]) -> tuple[list[Checked], list[str]]:
    """Return a check of every point of every sweep of at least four sizes, and the reasons of those left out."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["sweep_id"]:
            key = tuple(row[name] for name in ("sweep_id", "source", "model", "method", "gpu", "n_gpus"))
            groups.setdefault(key, []).append(row)
    checks: list[Checked] = []
    left_out: list[str] = []
    small: list[str] = []
    for group in groups.values():
        for sweep in _sweeps(group):
            if sweep.untold:
                left_out.append(f"{sweep.name}: {sweep.untold} rows left out: no batch, or no time of a step")
            if len({point.work for point in sweep.points}) < LEAST_SIZES:
                small.append(sweep.name)
                continue
            checks += _left_out_in_turn(sweep, left_out)
    if small:
        left_out.append(f"{len(small)} sweeps of fewer than {LEAST_SIZES} sizes left out: {', '.join(small)}")
    return checks, left_out


def _sweeps(rows: list[Row]) -> list[_Sweep]:
    """Split rows of one ``sweep_id`` into series: by slots where every length is a number, else by batch."""
    name = rows[0]["sweep_id"]
    if len({row["seq_len"] for row in rows}) > 1 and all(number(row["seq_len"]) for row in rows):
        return [_series(name, rows, BY_TOKENS)]
    lengths = dict.fromkeys(row["seq_len"] for row in rows)
    named = {length: name if len(lengths) == 1 else f"{name} {length}" for length in lengths}
    return [_series(named[at], [row for row in rows if row["seq_len"] == at], BY_BATCH) for at in lengths]


def _series(name: str, rows: list[Row], method: str) -> _Sweep:
    kept, points = [], []
    for row in rows:
        batch, length, seconds = number(row["batch_per_gpu"]), number(row["seq_len"]), seconds_of(row)
        if batch is None or seconds is None:
            continue
        by_tokens = method == BY_TOKENS and length is not None
        work = batch * length if by_tokens and length is not None else batch
        kept.append(row)
        points.append(Point(work, seconds, length=length if by_tokens else None))
    return _Sweep(name, kept, points, method, len(rows) - len(kept))


def _left_out_in_turn(sweep: _Sweep, left_out: list[str]) -> list[Checked]:
    """Predict each point from those of other sizes: one measured again would give itself away."""
    checks = []
    for row, point in zip(sweep.rows, sweep.points, strict=True):
        others = [each for each in sweep.points if (each.work, each.length) != (point.work, point.length)]
        try:
            model = fit_joint(others)
            if isinstance(model, NotIdentifiable):
                raise ValueError(model.reason)
            middle, low, high = model.predict(point.work, length=point.length)
        except ValueError as error:
            left_out.append(f"{sweep.name} at {point.work:g} left out: {error}")
            continue
        label = f"{sweep.name}: batch {row['batch_per_gpu']}"
        if sweep.method == BY_TOKENS:
            label += f" x {row['seq_len']}"
        checks.append(
            Checked(sweep.method, row["source"], row["gpu"], label, point.seconds, middle, "s", low=low, high=high)
        )
    return checks
