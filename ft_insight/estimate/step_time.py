"""Step time against the slots of a micro-batch: candidate forms, a robust fit, an interval, or an honest no.

The form is ``T(x) = (h^n + (c x)^n)^(1/n)``: ``h`` seconds are spent whatever the micro-batch holds (launches,
dequantising, reading weights), ``c`` seconds by each slot, and ``n`` says how far the two overlap: 1 not at all
(an affine law), 2 as measured on most published sweeps. For a given ``n`` it is linear in ``h^n`` and ``c^n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]

EXPONENTS = (1.0, 1.5, 2.0)
LEVEL = 0.8
"""Probability that an interval is meant to hold."""
BOOTSTRAPS = 200
FOLDS = 5
LEAST_POINTS = 8
LEAST_SPREAD = 1.25
"""The 95% quantile of the slots over the 5% quantile, below which fixed and per-slot time cannot be told apart."""
ROBUST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """One member of the family: ``exponent`` n, ``fixed_s`` h, ``per_slot_s`` c."""

    exponent: float
    fixed_s: float
    per_slot_s: float

    def seconds(self, slots: float | Array) -> Array:
        """Return the compute time of a micro-batch of so many slots."""
        n = self.exponent
        result: Array = (self.fixed_s**n + (self.per_slot_s * np.asarray(slots, dtype=float)) ** n) ** (1 / n)
        return result


@dataclass(frozen=True, slots=True)
class StepTime:
    """A fitted step-time model, with what it was fitted on and how far it can be trusted."""

    curve: Curve
    ensemble: tuple[Curve, ...]
    """Fits to resampled points, each with the exponent that suited it best."""
    forms: tuple[Curve, ...]
    """The best fit of every exponent; where they part, outside of what was seen, the model is unsure."""
    slots_range: tuple[float, float]
    points: int
    error: float
    """Median absolute relative error of micro-batches that were left out of the fit."""

    def predict(self, slots: float) -> tuple[float, float, float]:
        """Return (seconds, low, high) of a micro-batch of so many slots, at the 80% level.

        The interval is that of the mean time, not of a single step. Outside of the observed slots it spans what the
        other forms say as well.
        """
        middle = float(self.curve.seconds(slots))
        drawn = np.array([float(c.seconds(slots)) for c in self.ensemble])
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        if not self.slots_range[0] * 0.95 <= slots <= self.slots_range[1] * 1.05:
            others = [float(c.seconds(slots)) for c in self.forms]
            low, high = min(low, *others), max(high, *others)
        return middle, min(float(low), middle), max(float(high), middle)

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 80% interval of ``fixed_s`` or ``per_slot_s``, over the ensemble."""
        values = [getattr(c, name) for c in self.ensemble]
        low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


@dataclass(frozen=True, slots=True)
class NotIdentifiable:
    """Why a run does not tell how step time depends on the size of a micro-batch."""

    reason: str


def fit_step_time(slots: Sequence[float], seconds: Sequence[float], *, seed: int = 0) -> StepTime | NotIdentifiable:
    """Fit the step-time model to micro-batches of ``slots`` positions that took ``seconds`` each.

    Outliers (compilation, a checkpoint in the background, a busy neighbour) are weighted down; errors count
    relative to the time. Which exponent is used is decided by cross-validation.
    """
    x, y = np.asarray(slots, dtype=float), np.asarray(seconds, dtype=float)
    usable = (x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)
    x, y = x[usable], y[usable]
    if len(x) < LEAST_POINTS:
        return NotIdentifiable(f"only {len(x)} micro-batches after the first step; {LEAST_POINTS} are needed")
    if len(np.unique(x)) == 1:
        return NotIdentifiable(f"one batch shape seen ({int(x[0]):,} slots): fixed and per-slot time cannot be told apart")
    low, high = np.quantile(x, [0.05, 0.95])
    if high / low < LEAST_SPREAD:
        return NotIdentifiable(f"all micro-batches are alike ({low:,.0f} to {high:,.0f} slots): not identifiable")
    rng = np.random.default_rng(seed)
    forms = {n: _fit(x, y, n) for n in EXPONENTS}
    errors = {n: _left_out_error(x, y, n, rng) for n in EXPONENTS}
    best = min(EXPONENTS, key=lambda n: errors[n])
    return StepTime(
        curve=forms[best],
        ensemble=tuple(_resampled(x, y, rng) for _ in range(BOOTSTRAPS)),
        forms=tuple(forms.values()),
        slots_range=(float(x.min()), float(x.max())),
        points=len(x),
        error=errors[best],
    )


def _fit(x: Array, y: Array, n: float) -> Curve:
    """Fit for one exponent: non-negative least squares of relative errors, reweighted to resist outliers."""
    design = np.column_stack([np.ones_like(x), (x / x.max()) ** n])
    target = y**n
    # d(T^n) = n T^(n-1) dT: dividing by n T^n makes residuals relative to T
    relative = 1 / (n * target)
    weight = np.ones_like(y)
    solution = np.zeros(2)
    for _ in range(ROBUST_ROUNDS):
        scale = relative * np.sqrt(weight)
        solution, _ = nnls(design * scale[:, None], target * scale)
        residual = np.abs((design @ solution) ** (1 / n) / y - 1)
        spread = max(float(np.median(residual)) * 1.4826, 1e-6)
        weight = np.minimum(1.0, 1.5 * spread / np.maximum(residual, 1e-12))
    return Curve(n, float(solution[0] ** (1 / n)), float(solution[1] ** (1 / n) / x.max()))


def _left_out_error(x: Array, y: Array, n: float, rng: np.random.Generator) -> float:
    fold = rng.permutation(len(x)) % FOLDS
    errors = []
    for k in range(FOLDS):
        curve = _fit(x[fold != k], y[fold != k], n)
        errors.append(np.abs(curve.seconds(x[fold == k]) / y[fold == k] - 1))
    return float(np.median(np.concatenate(errors)))


def _resampled(x: Array, y: Array, rng: np.random.Generator) -> Curve:
    chosen = rng.integers(0, len(x), min(len(x), 400))
    if x[chosen].max() == x[chosen].min():
        chosen = np.arange(len(x))
    curves = [_fit(x[chosen], y[chosen], n) for n in EXPONENTS]
    return min(curves, key=lambda c: float(np.median(np.abs(c.seconds(x[chosen]) / y[chosen] - 1))))
