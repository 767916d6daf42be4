"""Step time against the slots of a micro-batch: candidate forms, a robust fit, an interval, or an honest no.

The form is ``T(x) = (h^n + (c x)^n)^(1/n)``: ``h`` seconds are spent whatever the micro-batch holds (launches,
dequantising, reading weights), ``c`` seconds by each slot, and ``n`` says how far the two overlap: 1 not at all
(an affine law), 2 as measured on most published sweeps. For a given ``n`` it is linear in ``h^n`` and ``c^n``, so
that the fit of one run is numpy alone: importing ``scipy.optimize`` takes half a second, which is half of what a
projection may take. Fits over several runs, with more candidates, are in ``joint``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXPONENTS = (1.0, 1.5, 2.0)
LEVEL = 0.8
"""Probability that the interval of a predicted time is meant to hold."""
PARAMETER_LEVEL = 0.95
"""Probability that the interval of a fitted parameter is meant to hold."""
BOOTSTRAPS = 200
FOLDS = 5
LEAST_POINTS = 8
LEAST_SPREAD = 1.25
"""The 95% quantile of the slots over the 5% quantile, below which fixed and per-slot time cannot be told apart."""
MOST_POINTS = 1024
"""Fitted at most, of more a random part: beyond it intervals are a matter of the form, and answers of the wait."""
ROBUST_ROUNDS = 12
REJECTED_FROM = 4.685
"""Residuals of so many standard deviations count for nothing (Tukey's bisquare, 95% efficient on Gaussian noise)."""
SPAN = 1e12
"""Slots and seconds beyond this factor around their median are no measurements, and would overflow their powers."""


class Curve(msgspec.Struct, frozen=True):
    """One member of the family: ``exponent`` n, ``fixed_s`` h, ``per_slot_s`` c."""

    exponent: float
    fixed_s: float
    per_slot_s: float

    def seconds(self, slots: float | Array) -> Array:
        """Return the compute time of a micro-batch of so many slots."""
        n = self.exponent
        result: Array = (self.fixed_s**n + (self.per_slot_s * np.asarray(slots, dtype=float)) ** n) ** (1 / n)
        return result


class StepTime(msgspec.Struct, frozen=True):
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
        """Return the 95% interval of ``fixed_s`` or ``per_slot_s``, over the ensemble."""
        values = [getattr(c, name) for c in self.ensemble]
        low, high = np.quantile(values, [(1 - PARAMETER_LEVEL) / 2, (1 + PARAMETER_LEVEL) / 2])
        return float(low), float(high)


class NotIdentifiable(msgspec.Struct, frozen=True):
    """Why a run does not tell how step time depends on the size of a micro-batch."""

    reason: str
    known: tuple[float, float] | None = None
    """The one point that it does know, where all its micro-batches are alike: (slots, median seconds)."""


def fit_step_time(slots: Sequence[float], seconds: Sequence[float], *, seed: int = 0) -> StepTime | NotIdentifiable:
    """Fit the step-time model to micro-batches of ``slots`` positions that took ``seconds`` each.

    Outliers (compilation, a checkpoint in the background, a busy neighbour) are weighted down; errors count
    relative to the time. Which exponent is used is decided by cross-validation.
    """
    points = _points(slots, seconds)
    if isinstance(points, NotIdentifiable):
        return points
    x, y = points
    rng = np.random.default_rng(seed)
    slots_range = float(x.min()), float(x.max())
    if len(x) > MOST_POINTS:
        some = rng.choice(len(x), MOST_POINTS, replace=False)
        x, y = x[some], y[some]
    fits = {n: _Fit(x, y, n) for n in EXPONENTS}
    left_out = {n: _left_out(x, y, n, rng) for n in EXPONENTS}
    limit = 3 * min(_spread(residuals) for residuals in left_out.values())
    best = min(EXPONENTS, key=lambda n: float(np.minimum(np.abs(left_out[n]), limit).mean()))
    return StepTime(
        curve=fits[best].curve,
        ensemble=_ensemble(list(fits.values()), fits[best].weight, rng),
        forms=tuple(fit.curve for fit in fits.values()),
        slots_range=slots_range,
        points=len(x),
        error=_median(np.abs(np.expm1(-left_out[best]))),
    )


def fit_affine(slots: Sequence[float], seconds: Sequence[float]) -> Curve | NotIdentifiable:
    """Split the time of a part of the step into fixed and per-slot time, as robustly, by a line."""
    points = _points(slots, seconds)
    return points if isinstance(points, NotIdentifiable) else _Fit(*points, 1.0).curve


def _points(slots: Sequence[float], seconds: Sequence[float]) -> tuple[Array, Array] | NotIdentifiable:
    """Return what is measured of a run, or why no line goes through it."""
    x, y = np.asarray(slots, dtype=float), np.asarray(seconds, dtype=float)
    usable = _usable(x, y)
    x, y = x[usable], y[usable]
    if len(x) < LEAST_POINTS:
        return NotIdentifiable(f"only {len(x)} micro-batches after the first step; {LEAST_POINTS} are needed")
    return _alike(x, y) or (x, y)


def _alike(x: Array, y: Array) -> NotIdentifiable | None:
    """Say that micro-batches of one size do not tell the parts of their time, and what they do tell."""
    slots, seconds = _median(x), _median(y)
    known = f"{seconds:.3g} s, {slots / seconds:,.0f} slots/s"
    if len(np.unique(x)) == 1:
        what = f"one batch shape seen ({slots:,.0f} slots, {known})"
    else:
        low, high = np.quantile(x, [0.05, 0.95])
        if high / low >= LEAST_SPREAD:
            return None
        what = f"all micro-batches are alike ({low:,.0f} to {high:,.0f} slots, {known})"
    return NotIdentifiable(f"{what}: not identifiable, fixed and per-slot time cannot be told apart", (slots, seconds))


def _usable(x: Array, y: Array) -> NDArray[np.bool_]:
    """Tell which points are measurements at all."""
    usable: NDArray[np.bool_] = (x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)
    for values in (x, y):
        if usable.any():
            with np.errstate(over="ignore"):  # an infinite median leaves nothing, and rightly so
                middle = _median(values[usable])
            usable &= (values > middle / SPAN) & (values < middle * SPAN)
    return usable


def _median(values: Array) -> float:
    """Return the median of at least one value; numpy's own is slow to call, and loads masked arrays for it."""
    ordered = np.sort(values)
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _spread(residuals: Array) -> float:
    """Return the standard deviation that the median absolute residual stands for; never 0."""
    return max(_median(np.abs(residuals)) * 1.4826, 1e-9)


class _Fit:
    """One exponent's robust fit: Gauss-Newton steps on the logarithm of the time, so that errors are relative.

    In ``a = h^n`` and ``b = c^n`` each step is a linear problem of two unknowns. Its weights come from the fitted
    times, never from the measured ones: a point that is low by chance would otherwise count for more.
    """

    def __init__(self, x: Array, y: Array, n: float) -> None:
        self.n = n
        self._units = float(x.max()), _median(y)
        self._power = (x / self._units[0]) ** n
        self._seconds = y / self._units[1]
        fitted = self._seconds
        self.weight = np.ones_like(y)
        for _ in range(ROBUST_ROUNDS):
            a, b = _solve(*self.sums(fitted, self.weight))
            fitted = (a + b * self._power) ** (1 / n)
            self.residuals = np.log(self._seconds / fitted)
            self.weight = _bisquare(self.residuals)
        self.fitted = fitted
        self.curve = self.curve_of(float(a), float(b))

    def sums(self, fitted: Array, weight: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return the normal equations linearised at ``fitted``; ``weight`` may be many rows of weights."""
        scale = 1 / (self.n * fitted**self.n)
        first, second = scale, scale * self._power
        target = 1 / self.n + np.log(self._seconds / fitted)
        return (
            weight @ (first * first),
            weight @ (first * second),
            weight @ (second * second),
            weight @ (first * target),
            weight @ (second * target),
        )

    def curve_of(self, a: float, b: float) -> Curve:
        """Return the curve of a solution."""
        slots, seconds = self._units
        return Curve(self.n, seconds * a ** (1 / self.n), seconds * b ** (1 / self.n) / slots)


def _bisquare(residuals: Array) -> Array:
    inside = np.clip(1 - (residuals / (REJECTED_FROM * _spread(residuals))) ** 2, 0, None)
    # everything is never rejected: with half of the points beyond the limit, all are as good as each other
    return inside**2 if np.count_nonzero(inside) > len(inside) / 2 else np.ones_like(residuals)


def _solve(aa: Array, ab: Array, bb: Array, at: Array, bt: Array) -> tuple[Array, Array]:
    """Solve least squares of two non-negative unknowns exactly: inside, else on the better of the two edges."""
    determinant = aa * bb - ab * ab
    with np.errstate(divide="ignore", invalid="ignore"):
        a, b = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        only_a, only_b = np.maximum(at, 0) / aa, np.maximum(bt, 0) / bb
        gain_a, gain_b = only_a * at, only_b * bt
    inside = (determinant > 1e-12 * aa * bb) & (a >= 0) & (b >= 0)
    on_a = gain_a >= gain_b
    return np.where(inside, a, np.where(on_a, only_a, 0.0)), np.where(inside, b, np.where(on_a, 0.0, only_b))


def _left_out(x: Array, y: Array, n: float, rng: np.random.Generator) -> Array:
    """Return the log residuals of all points, each from a fit that has not seen it."""
    fold = rng.permutation(len(x)) % FOLDS
    found = np.zeros_like(y)
    for k in range(FOLDS):
        curve = _Fit(x[fold != k], y[fold != k], n).curve
        found[fold == k] = np.log(y[fold == k] / curve.seconds(x[fold == k]))
    return found


def _ensemble(fits: Sequence[_Fit], weight: Array, rng: np.random.Generator) -> tuple[Curve, ...]:
    """Return the curves of resampled points, each with the exponent that suited it best.

    Resampling is counting each point zero, one or more times, and one Gauss-Newton step from the full fit is exact
    to first order: so all resamples are a few matrix products, however many points there are. Weights are held
    fixed in it and two unknowns are fitted, both of which make the spread too small; drawing fewer points than
    there are makes up for it.
    """
    count = len(weight)
    # for the bisquare, weight = u^2 with u = 1 - (r/k)^2, and the derivative of weight * r is u * (5u - 4)
    u = np.sqrt(weight)
    slope = float((u * (5 * u - 4)).sum() / weight.sum())
    draws = max(4, round((count - 2) * min(1.0, max(slope, 0.5)) ** 2))
    drawn = rng.multinomial(draws, np.full(count, 1 / count), BOOTSTRAPS).astype(float) * weight
    drawn = drawn[drawn.any(axis=1)]  # a resample of nothing but rejected points tells nothing
    solutions, losses = [], []
    for fit in fits:
        aa, ab, bb, at, bt = fit.sums(fit.fitted, drawn)
        a, b = _solve(aa, ab, bb, at, bt)
        target = 1 / fit.n + fit.residuals
        losses.append(drawn @ target**2 - 2 * (a * at + b * bt) + a * a * aa + 2 * a * b * ab + b * b * bb)
        solutions.append((a, b))
    best = np.argmin(losses, axis=0)
    return tuple(fits[k].curve_of(float(solutions[k][0][i]), float(solutions[k][1][i])) for i, k in enumerate(best))
