"""Hours and dollars of a job from its rate, and which of the rows of a projection stand out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ft_insight.estimate.measured import Measured
from ft_insight.estimate.micro import Triple
from ft_insight.estimate.parallel import Setting, present_setting
from ft_insight.estimate.rate import Rate
from ft_insight.estimate.workload import Workload
from ft_insight.records import ProjectionRow

AHEAD = 1.005
"""A row that others come nearer to than this factor stands out by nothing that can be read."""


def hours_of(rate: Rate, workload: Workload, measured: Measured, setting: Setting | None) -> Triple:
    """Return the hours of the job: its steps, and what is measured besides them."""
    extra_s = _extra_seconds(measured, workload, rate.scale, setting)
    low, high = rate.queries_per_s[1], rate.queries_per_s[2]
    middle, least, most = ((workload.total / r + extra_s) / 3600 for r in (rate.queries_per_s[0], high, low))
    return middle, least, most


def dollars_of(hours: Triple | None, price: float | None) -> Triple | None:
    """Return the dollars of so many hours; None where either is unknown."""
    return None if hours is None or price is None else (hours[0] * price, hours[1] * price, hours[2] * price)


def _extra_seconds(measured: Measured, workload: Workload, scale: float, setting: Setting | None) -> float:
    """Return the seconds of start-up, evaluations and saves, as measured; an evaluation scales like a step."""
    view = measured.view
    header = view.header
    per_step = measured.queries_per_step
    if header is None or not per_step:
        return 0.0
    own = present_setting(measured, measured.gpu_count)
    if setting is not None and own is not None:
        per_step *= setting.global_batch / own.global_batch
    steps = workload.total / per_step
    extra = sum(part.seconds for part in view.outside if part.name == "startup")
    if header.train.eval_every_steps and view.mean_evaluation_s:
        extra += steps // header.train.eval_every_steps * view.mean_evaluation_s * scale
    if header.train.save_every_steps and view.mean_save_s:
        extra += steps // header.train.save_every_steps * view.mean_save_s
    return extra if math.isfinite(extra) else 0.0


def marked(rows: Sequence[ProjectionRow]) -> tuple[ProjectionRow, ...]:
    """Mark the cheapest row, the fastest, and the one whose dollars times hours are least, where one is ahead."""
    marks: dict[int, list[str]] = {}
    priced = {i: (row.usd[0], row.hours[0]) for i, row in enumerate(rows) if row.usd and row.hours}
    for name, values in (
        ("cheapest", {i: usd for i, (usd, _) in priced.items()}),
        ("fastest", {i: row.hours[0] for i, row in enumerate(rows) if row.hours}),
        ("best value", {i: usd * hours for i, (usd, hours) in priced.items()}),
    ):
        least = min(values, key=values.__getitem__, default=None)
        alike = sum(value <= AHEAD * values[least] for value in values.values()) if least is not None else 0
        if least is not None and alike == 1 < len(values):
            marks.setdefault(least, []).append(name)
    return tuple(replaced(row, {"marks": tuple(marks.get(i, ()))}) for i, row in enumerate(rows))


def replaced(row: ProjectionRow, figures: Mapping[str, object]) -> ProjectionRow:
    """Return the row with these figures instead of its own."""
    values = {name: getattr(row, name) for name in row.__struct_fields__}
    return ProjectionRow(**{**values, **figures})
