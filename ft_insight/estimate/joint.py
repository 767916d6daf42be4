"""The step-time model of several runs or a batch sweep: every candidate fitted, the best chosen, intervals.

Fits are in relative error and robust: one with a soft loss, one with the scale that its residuals turn out to have.
Candidates are judged by what each says of points that it has not seen. scipy is imported on the first fit, since
a projection from one run answers without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ft_insight.estimate.models import FORMS, Array, Design, Form, Point
from ft_insight.estimate.step_time import LEVEL, PARAMETER_LEVEL, NotIdentifiable

SOFT = 0.05
"""Relative error from which a residual counts less, before the scale of a fit's own residuals is known."""
LEAST_SCALE = 0.01
TURN = 1.5
"""Residuals of so many standard deviations begin to count less."""
PRIOR_ERROR, PRIOR_WEIGHT = 0.03, 2.0
"""What step times of repeated runs scatter by, as that many observations: with a handful of points, the scatter that
is left after a fit says little."""
WORST = 0.5
"""Log error beyond which a left-out point is an outlier to every form, and is not counted as worse."""
LEAST_GAIN = 1e-3
"""A tenth of a percent of error is no reason to prefer one form to another."""
TOLERANCE = 1e-6
"""Relative change of the squared error, or of the unknowns, at which a fit has arrived."""
TINY_UNKNOWN = 1e-12
"""What an unknown of 0 is moved by, times 1e6, to see what follows from it."""
PLAUSIBLE = 0.1
"""Forms of at least this likelihood beside the best one lend it their intervals."""


@dataclass(frozen=True)
class Fitted:
    """One form fitted to all points."""

    form: Form
    design: Design
    unknowns: Array
    weight: Array
    """0 to 1 for each point: how much of it the robust loss has let count."""
    residuals: Array
    """log(measured / fitted)."""
    left_out: Array
    """The same from fits that have not seen the point, to first order."""
    information: Array
    """Inverse covariance of the unknowns, in units of the variance of a residual."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of ``unknowns``."""
        return self.form.names(self.design)

    @property
    def error(self) -> float:
        """Mean absolute log error of left-out points; outliers count as ``WORST``."""
        return float(np.minimum(np.abs(self.left_out), WORST).mean())

    @property
    def spread(self) -> float:
        """Root mean square of the same."""
        return math.sqrt(float(np.square(np.clip(self.left_out, -WORST, WORST)).mean()))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of ``variance``."""
        return PRIOR_WEIGHT + max(0, len(self.residuals) - len(self.unknowns))

    @property
    def variance(self) -> float:
        """Variance of a log residual."""
        return float((PRIOR_WEIGHT * PRIOR_ERROR**2 + (self.weight * self.residuals**2).sum()) / self.freedom)

    def log_seconds(self, design: Design) -> Array:
        """Return the logarithm of the predicted times."""
        result: Array = np.log(self.form.seconds(self.unknowns, design))
        return result

    def slope(self, design: Design) -> Array:
        """Return d log(seconds) / d unknowns, one row for each point."""
        steps = np.maximum(np.abs(self.unknowns), TINY_UNKNOWN) * 1e-6
        base = self.log_seconds(design)
        columns = []
        for step, unit in zip(steps, np.eye(len(steps)), strict=True):
            moved = replace(self, unknowns=self.unknowns + step * unit)
            columns.append((moved.log_seconds(design) - base) / step)
        result: Array = np.array(columns).T
        return result


@dataclass(frozen=True)
class Joint:
    """The chosen model of several measured step times, with the others beside it."""

    best: Fitted
    fits: tuple[Fitted, ...]
    """All candidates, in the order of their left-out error."""
    notes: tuple[str, ...]
    """What these points cannot tell."""

    @property
    def unknowns(self) -> dict[str, float]:
        """What was fitted, by name; seconds, or seconds per unit of work."""
        return dict(zip(self.best.names, map(float, self.best.unknowns), strict=True))

    @property
    def outliers(self) -> int:
        """Points that the fit has all but set aside."""
        return int((self.best.weight < 0.3).sum())

    def predict(
        self, work: float, density: float | None = None, length: float | None = None, accumulation: float | None = None
    ) -> tuple[float, float, float]:
        """Return (seconds, low, high) of one step, at the 80% level; what is not given is as in the first point.

        The interval is that of one more measurement: scatter, the unknowns' own error, and how far the plausible
        forms part. Raises ``ValueError`` with one line for what the points cannot tell.
        """
        here = self.best.design
        asked = Point(
            work,
            1.0,
            here.density[0] if density is None else density,
            here.length[0] if length is None else length,
            here.accumulation[0] if accumulation is None else accumulation,
        )
        self._refuse_unknown(asked)
        design = here.at([asked])
        middle = float(self.best.log_seconds(design)[0])
        slope = self.best.slope(design)[0]
        own = float(slope @ np.linalg.pinv(self.best.information, hermitian=True) @ slope)
        parting = self._parting(design, middle)
        half = _student(0.5 + LEVEL / 2, self.best.freedom) * math.sqrt(self.best.variance * (1 + own) + parting)
        return math.exp(middle), math.exp(middle - half), math.exp(min(middle + half, 700.0))

    def _refuse_unknown(self, asked: Point) -> None:
        here = self.best.design
        told = {
            "density": "experts_s" in here.terms,
            "length": "length_s" in here.terms,
            "accumulation": here.has_rest,
        }
        for name, known in told.items():
            column, value = getattr(here, name), getattr(asked, name) or 0.0
            if not known and not np.ptp(column) and not math.isclose(value, column[0], rel_tol=1e-6):
                raise ValueError(f"only {name} {column[0]:g} was measured: {name} {value:g} cannot be predicted")

    def _parting(self, design: Design, middle: float) -> float:
        """Return the variance of the candidates' answers around the best one's, each by its likelihood."""
        weights = np.array(self._likelihoods())
        answers = np.array([float(fit.log_seconds(design)[0]) for fit in self.fits])
        return float((weights * np.minimum(np.abs(answers - middle), 1.0) ** 2).sum() / weights.sum())

    def _likelihoods(self) -> list[float]:
        count = len(self.best.residuals)
        least = max(self.best.spread, 1e-6)
        return [min(1.0, (least / max(fit.spread, 1e-6)) ** count) for fit in self.fits]

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95% interval of an unknown: of the best form, widened by those that are as plausible.

        Raises ``KeyError`` for a name that ``unknowns`` does not have.
        """
        chances = self._likelihoods()
        ends = [
            fit_interval(fit, name)
            for fit, chance in zip(self.fits, chances, strict=True)
            if fit is self.best or (chance >= PLAUSIBLE and fit.names == self.best.names)
        ]
        return min(low for low, _ in ends), max(high for _, high in ends)


def fit_interval(fit: Fitted, name: str) -> tuple[float, float]:
    """Return the 95% interval of one form's unknown from its covariance; seconds are never below 0."""
    if name not in fit.names:
        raise KeyError(name)
    place = fit.names.index(name)
    variance = fit.variance * float(np.linalg.pinv(fit.information, hermitian=True)[place, place])
    half = _student(0.5 + PARAMETER_LEVEL / 2, fit.freedom) * math.sqrt(max(0.0, variance))
    value = float(fit.unknowns[place])
    low = value - half
    return (max(0.0, low) if fit.form.family == "additive" else low), value + half


def fit_joint(points: Sequence[Point], forms: Sequence[Form] = FORMS) -> Joint | NotIdentifiable:
    """Fit every form to measured step times and choose by left-out error; or say why they tell nothing.

    ``points`` need at least two sizes of work, and as many points as the simplest form has unknowns: a fixed time, a
    time per unit (two where densities differ), and what differing lengths and accumulations add.
    """
    sound = [p for p in points if all(0 < v < math.inf for v in (p.work, p.seconds, p.density, p.accumulation))]
    if not sound:
        return NotIdentifiable("no measured step times")
    if len({p.work for p in sound}) < 2:
        middle = float(np.median([p.seconds for p in sound]))
        work = sound[0].work
        return NotIdentifiable(
            f"not identifiable: one size of work seen ({work:g}, {middle:.4g} s, {work / middle:.4g} a second)"
        )
    design = Design.of(sound)
    for name, known in (("density", "experts_s" in design.terms), ("accumulation", design.has_rest)):
        if not known and np.ptp(getattr(design, name)):
            return NotIdentifiable(f"not identifiable: {name} goes with the size of work in these points")
    tried = [form for form in forms if len(form.names(design)) + form.spare <= len(sound)]
    if not tried:
        return NotIdentifiable(f"not identifiable: {len(sound)} points, too few for the unknowns of any form")
    fits = [fit_form(form, design) for form in tried]
    best = fits[0]
    for fit in fits[1:]:  # the first that none beats by more than chance, in the order of preference
        if _better(fit, best):
            best = fit
    notes = _notes(design)
    if len(sound) <= len(best.unknowns):
        notes = ("no more points than unknowns: the form is assumed, not chosen", *notes)
    return Joint(best, tuple(sorted(fits, key=lambda fit: fit.error)), notes)


def _better(fit: Fitted, than: Fitted) -> bool:
    """Tell whether left-out points speak for a form by more than their own scatter, one standard error."""
    gain = np.minimum(np.abs(than.left_out), WORST) - np.minimum(np.abs(fit.left_out), WORST)
    return float(gain.mean()) > max(LEAST_GAIN, float(gain.std(ddof=1)) / math.sqrt(len(gain)))


def _notes(design: Design) -> tuple[str, ...]:
    notes = []
    if "experts_s" not in design.terms:
        notes.append(f"density {design.density[0]:g} only: what other densities take cannot be told")
    if "length_s" not in design.terms:
        notes.append("how attention grows with the sequence length cannot be told apart")
    if not design.has_rest:
        notes.append("the time of a step besides its micro-batches is within the fixed time")
    return tuple(notes)


def fit_form(form: Form, design: Design) -> Fitted:
    """Fit one form, in relative error and robustly."""
    from scipy.optimize import least_squares

    positive = form.family == "additive"
    start = form.start(design)
    scale = np.abs(start)
    log_seconds = np.log(design.seconds)

    def unknowns(theta: Array) -> Array:
        result: Array = np.exp(np.clip(theta, -60, 60)) * scale if positive else theta * scale
        return result

    def misses(theta: Array) -> Array:
        result: Array = np.log(form.seconds(unknowns(theta), design)) - log_seconds
        return result

    tolerance: dict[str, float] = {"ftol": TOLERANCE, "xtol": TOLERANCE, "gtol": TOLERANCE}
    begin = np.log(start / scale) if positive else start / scale
    first = least_squares(misses, begin, loss="soft_l1", f_scale=SOFT, **tolerance)
    count = len(log_seconds)
    freedom = max(1, count - len(start))
    sigma = max(LEAST_SCALE, 1.4826 * float(np.median(np.abs(first.fun))) * math.sqrt(count / freedom))
    second = least_squares(misses, first.x, loss="soft_l1", f_scale=TURN * sigma, **tolerance)
    residuals = -second.fun
    weight = 1 / np.sqrt(1 + (residuals / (TURN * sigma)) ** 2)
    bare = Fitted(form, design, unknowns(second.x), weight, residuals, residuals, np.eye(len(start)))
    slope = bare.slope(design)
    information = slope.T * weight @ slope
    leverage = np.einsum("ij,jk,ik->i", slope, np.linalg.pinv(information, hermitian=True), slope) * weight
    return replace(bare, left_out=residuals / (1 - np.minimum(leverage, 0.95)), information=information)


def _student(probability: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
