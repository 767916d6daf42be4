"""Step time at another number of experts per token, from one run: its layers' times tell the experts' part."""

from __future__ import annotations

import math

import msgspec

from ft_insight.estimate.step_time import NotIdentifiable, StepTime, fit_step_time
from ft_insight.run_view import RunView
from ft_insight.stats import median

Triple = tuple[float, float, float]


class DensityTime(msgspec.Struct, frozen=True):
    """What a micro-batch takes where each token passes through another share of the experts."""

    density: float
    """Share of the experts that are active: 1 is dense."""
    slots: float
    micro_s: Triple
    """(estimate, low, high) seconds of forward and backward of a micro-batch; 80% where ``basis`` says measured."""
    basis: str


def active_share(view: RunView) -> float | None:
    """Return the share of the experts that a token passes through in this run; None in a model without experts."""
    model = view.header.model if view.header else None
    if model is None or not model.experts or not model.experts_per_token:
        return None
    return model.experts_per_token / model.experts


def predict_density(
    view: RunView, density: float, slots: float | None = None, model: StepTime | NotIdentifiable | None = None
) -> DensityTime | NotIdentifiable:
    """Predict the time of a micro-batch of ``slots`` (the run's median) at another active share of the experts.

    ``T'(x) = T(x) + E(x density'/density) - E(x)``: the experts' time goes with the rows that they are handed, which
    more slots change just as more experts per token do. ``E`` is fitted to the sampled steps in which layers were
    timed. With too few of those its mean is split into fixed and per-slot time as the whole micro-batch is, and the
    interval then spans all that is possible. ``model`` is the run's step-time model, where it is fitted already.
    Raises ``ValueError`` for a density outside of 0 to 1.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density is the active share of the experts, above 0 and at most 1, not {density:g}")
    now = active_share(view)
    if now is None:
        return NotIdentifiable("the model has no experts, as far as this run says")
    known = [m for m in view.micro if m.slots and m.compute_s]
    if model is None:
        model = fit_step_time([float(m.slots or 0) for m in known], [float(m.compute_s or 0) for m in known])
    spent = sum(part.total_s for part in view.layers if part.kind == "experts")
    if spent <= 0:
        return NotIdentifiable("the experts were not timed in this run: what other densities take cannot be told")
    if isinstance(model, NotIdentifiable):
        return _bounds(model, spent, density / now)
    at = slots if slots is not None else float(median(float(m.slots or 0) for m in known) or 0)
    points = view.parts.experts
    experts = fit_step_time([x for x, _ in points], [y for _, y in points])
    if isinstance(experts, NotIdentifiable):
        return DensityTime(density, at, _shared(model, spent, at, density / now), "experts' mean time: bounds")
    return DensityTime(density, at, _moved(model, experts, at, density / now), f"experts in {len(points)} steps")


def _moved(model: StepTime, experts: StepTime, slots: float, ratio: float) -> Triple:
    """Exchange the experts' time for that of more or fewer rows; errors combine in quadrature."""
    whole, there, here = model.predict(slots), experts.predict(slots * ratio), experts.predict(slots)
    middle = max(whole[0] + there[0] - here[0], 0.0)
    below = math.hypot(whole[0] - whole[1], there[0] - there[1])
    above = math.hypot(whole[2] - whole[0], there[2] - there[0])
    return middle, max(0.0, middle - below), middle + above


def _shared(model: StepTime, spent: float, slots: float, ratio: float) -> Triple:
    """Between experts whose time is all fixed and experts whose time is all per slot."""
    now = model.predict(slots)
    spent = min(spent, now[0])
    per_slot = min(1.0, model.curve.per_slot_s * slots / now[0])
    ends = now[0], now[0] + spent * (ratio - 1)
    low, high = min(ends), max(ends)
    return now[0] + spent * per_slot * (ratio - 1), low - (now[0] - now[1]), high + (now[2] - now[0])


def _bounds(model: NotIdentifiable, spent: float, ratio: float) -> NotIdentifiable:
    if model.known is None:
        return model
    slots, seconds = model.known
    low, high = sorted((seconds, seconds + min(spent, seconds) * (ratio - 1)))
    return NotIdentifiable(
        f"not identifiable: with micro-batches all of {slots:,.0f} slots, anything from {low:.3g} to {high:.3g} s",
        model.known,
    )
