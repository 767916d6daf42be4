"""From a run to a prediction: step time, memory, other GPUs, hours and dollars. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from ft_insight.catalog import find_gpu
from ft_insight.estimate.parts import phase_fits
from ft_insight.estimate.project import DEFAULT_GPUS, Ask, Measured, measure, project
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.workload import WorkloadError, workload_of
from ft_insight.records import Fit, Projection
from ft_insight.run_view import RunView

__all__ = ["DEFAULT_GPUS", "Ask", "Measured", "estimate_records", "fit_record", "measure", "project"]


def fit_record(measured: Measured, t_s: float) -> Fit:
    """Put the fitted step-time model into a record; where there is none, why."""
    model = measured.step_time
    phases = phase_fits(measured.view)
    if isinstance(model, NotIdentifiable):
        return Fit(t_s=t_s, identifiable=False, reason=model.reason, rest_s=measured.rest_s, phases=phases)
    return Fit(
        t_s=t_s,
        identifiable=True,
        exponent=model.curve.exponent,
        fixed_s=model.curve.fixed_s,
        per_slot_s=model.curve.per_slot_s,
        rest_s=measured.rest_s,
        fixed_interval_s=model.interval("fixed_s"),
        per_slot_interval_s=model.interval("per_slot_s"),
        slots_range=(int(model.slots_range[0]), int(model.slots_range[1])),
        points=model.points,
        error=model.error,
        phases=phases,
    )


def estimate_records(view: RunView, t_s: float) -> Iterator[Fit | Projection]:
    """Yield what a run's end says: the fitted model, then the projection of the job that the trainer was set to do.

    One by one, so that the model is there whatever comes of the projection.
    """
    measured = measure(view)
    yield fit_record(measured, t_s)
    try:
        workload = workload_of(view)
    except WorkloadError:
        return
    gpus = tuple(find_gpu(name) for name in DEFAULT_GPUS)
    yield project(measured, Ask(workload, gpus), t_s)
