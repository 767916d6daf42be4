"""Peak memory against the slots of a micro-batch: a fixed part and bytes per slot, with their 90% intervals.

torch's allocator tells the highest sum since the process began, so the peak of a micro-batch is known where it is the
highest so far; of all others only that it was no higher, and no lower than what was read within it. A failure bounds
its peak from below. Regression on such intervals: by expectation maximisation (Tobin 1958; Dempster, Laird and Rubin
1977) with Huber's weights, so that one odd peak does not decide. Where too few peaks are known for that, the line goes
through the one of the largest micro-batch, and its slope is bounded by what stayed allocated between steps and by what
was read within the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ft_insight.memory_points import MemoryPoint, MemoryView
from ft_insight.stats import median

Triple = tuple[float, float, float]
Line = tuple[float, float]
"""Bytes of the fixed part, and per slot."""

LEAST_SHAPES = 4
"""Distinct sizes of micro-batches with a known peak from which on a regression is trusted."""
LEAST_SPREAD = 1.25
"""Ratio of the largest and the smallest of them."""
HUBER = 2.0
ROUNDS = 60
FAR = 6.0
"""Standard deviations beyond which a bound tells nothing."""
SIGMA_FLOOR = 1e-5
"""Of the highest peak: allocations are rounded, so that even a model that fits has errors."""
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""Student's t, 95% one-sided, from 1 degree of freedom on."""


class PeakMemory(msgspec.Struct, frozen=True):
    """``peak = fixed_bytes + bytes_per_slot * slots``, of one process on one device."""

    fixed_bytes: float
    bytes_per_slot: float
    fixed_interval: tuple[float, float]
    per_slot_interval: tuple[float, float]
    points: int
    """Peaks that are known, not only bounded."""
    basis: str
    lines: tuple[Line, ...] = ()
    """Where the interval is between lines: those."""
    centre_slots: float = 0.0
    spread_bytes: float = 0.0
    """Where it is a regression's: half of it at ``centre_slots``, and what it grows by per slot away from there."""
    spread_per_slot: float = 0.0

    def predict(self, slots: float) -> Triple:
        """Return the peak of a micro-batch of so many slots in bytes: estimate, low, high."""
        middle = self.fixed_bytes + self.bytes_per_slot * slots
        ends = [middle, *(fixed + slope * slots for fixed, slope in self.lines)]
        half = math.hypot(self.spread_bytes, self.spread_per_slot * (slots - self.centre_slots))
        return middle, min(ends) - half, max(ends) + half


def fit_peak(seen: MemoryView) -> PeakMemory | str:
    """Fit the peaks of a run; a string says why there is nothing to fit."""
    points = [p for p in seen.points if p.slots > 0]
    exact = [p for p in points if p.exact]
    bounded = [p for p in points if not p.exact and p.high_bytes is not None]
    failed = [p for p in points if p.high_bytes is None]
    if not exact and not bounded:
        return "no memory of a micro-batch was measured in this run"
    shapes = {p.slots for p in exact}
    if len(shapes) >= LEAST_SHAPES and max(shapes) >= LEAST_SPREAD * min(shapes):
        found = _regress(exact, [*bounded, *failed])
        return found if found is not None else "the peak of this run does not grow with its micro-batches"
    base = seen.base_bytes
    if base is None:
        return "what stays allocated between steps was not measured"
    anchored = _anchored(exact, bounded, float(base))
    if isinstance(anchored, str):
        return anchored
    return _beyond(anchored, failed)


# regression


def _regress(exact: Sequence[MemoryPoint], bounds: Sequence[MemoryPoint]) -> PeakMemory | None:
    """Fit by expectation maximisation over what is only bounded; None if the slope comes out at 0 or less."""
    points = [*exact, *bounds]
    scale = float(max(p.slots for p in points))
    x = np.array([[1.0, p.slots / scale] for p in points])
    low = np.array([float(p.low_bytes) for p in points])
    high = np.array([math.inf if p.high_bytes is None else float(p.high_bytes) for p in points])
    known = low == high
    beta = _theil_sen(x[known, 1], low[known])
    floor = SIGMA_FLOOR * float(low[known].max())
    spread = median(list(np.abs(low[known] - x[known] @ beta))) or 0.0
    sigma = max(floor, 1.4826 * spread)
    share = np.ones(len(points))
    for _ in range(ROUNDS):
        target, variance = _guessed(x @ beta, sigma, low, high)
        off = np.abs(target - x @ beta) / sigma
        weight = np.where(known & (off > HUBER), HUBER / np.maximum(off, 1e-12), 1.0)
        # a guess counts by how much its bounds narrow it
        share = weight * np.clip(1 - variance / sigma**2, 0.0, 1.0)
        before = beta
        root = np.sqrt(weight)
        beta = np.linalg.lstsq(x * root[:, None], target * root, rcond=None)[0]
        squares = float((weight * (target - x @ beta) ** 2).sum())
        sigma = max(floor, math.sqrt(squares / max(1.0, float(share.sum()) - 2)))
        if np.allclose(beta, before, rtol=1e-7, atol=0):
            break
    if beta[1] <= 0:
        return None
    return _with_intervals(beta, x, share, sigma, scale, len(exact))


def _with_intervals(
    beta: np.ndarray, x: np.ndarray, share: np.ndarray, sigma: float, scale: float, known: int
) -> PeakMemory:
    """Put a regression's errors beside it; what a bounded peak tells counts by how much it narrows its own guess."""
    information = (x * share[:, None]).T @ x
    covariance = sigma**2 * np.linalg.inv(information)
    freedom = max(1, math.floor(share.sum() - 2))
    t = _T95[min(freedom, len(_T95)) - 1]
    fixed, slope = float(beta[0]), float(beta[1] / scale)
    fixed_half = t * math.sqrt(covariance[0, 0])
    slope_half = t * math.sqrt(covariance[1, 1]) / scale
    centre = -float(covariance[0, 1] / covariance[1, 1])
    at_centre = float(covariance[0, 0] + 2 * centre * covariance[0, 1] + centre**2 * covariance[1, 1])
    return PeakMemory(
        fixed,
        slope,
        (max(0.0, fixed - fixed_half), fixed + fixed_half),
        (max(0.0, slope - slope_half), slope + slope_half),
        known,
        f"{known} peaks of micro-batches of different size",
        centre_slots=centre * scale,
        # of a single peak, not of the mean: it is the next one that has to fit
        spread_bytes=t * math.sqrt(at_centre + sigma**2),
        spread_per_slot=slope_half,
    )


def _guessed(mean: np.ndarray, sigma: float, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what is expected of each peak within its bounds, and the variance of that guess; 0 where it is known."""
    target, variance = np.where(low == high, low, mean), np.where(low == high, 0.0, sigma**2)
    near = (low != high) & ((low > mean - FAR * sigma) | (high < mean + FAR * sigma))
    for i in np.flatnonzero(near):
        target[i], variance[i] = truncated(float(mean[i]), sigma, float(low[i]), float(high[i]))
    return target, variance


def _theil_sen(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    pairs = [(j, i) for i in range(len(x)) for j in range(i + 1, len(x)) if x[j] != x[i]]
    slope = median([(y[j] - y[i]) / (x[j] - x[i]) for j, i in pairs]) or 0.0
    return np.array([median(list(y - slope * x)) or 0.0, slope])


def truncated(mean: float, sigma: float, low: float, high: float) -> tuple[float, float]:
    """Return mean and variance of a normal distribution between two bounds."""
    a, b = (low - mean) / sigma, (high - mean) / sigma
    if b < -FAR:
        return high, 0.0
    if a > FAR:
        return low, 0.0
    mass = _cumulated(b) - _cumulated(a)
    if mass < 1e-12:
        return min(max(mean, low), high), 0.0
    first = (_density(a) - _density(b)) / mass
    second = (_moment(a) - _moment(b)) / mass
    return mean + sigma * first, max(0.0, sigma**2 * (1 + second - first**2))


def _density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) if math.isfinite(z) else 0.0


def _moment(z: float) -> float:
    return z * _density(z) if math.isfinite(z) else 0.0


def _cumulated(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


# a line through one peak


def _anchored(exact: Sequence[MemoryPoint], bounded: Sequence[MemoryPoint], base: float) -> PeakMemory | str:
    """Draw the line through the known peak of the largest micro-batch, or, without one, between its bounds."""
    anchor = max(exact or bounded, key=lambda p: p.slots)
    x, highest = float(anchor.slots), float(anchor.high_bytes or 0)
    steepest = (highest - base) / x
    if not exact:
        steepest = min((float(p.high_bytes or 0) - base) / p.slots for p in bounded)
    if steepest <= 0:
        return "the peak of this run lies outside of its steps"
    flattest = _slope_read([*exact, *bounded], base, steepest)
    if not exact:
        lines = ((base, flattest), (base, steepest))
        return _between(lines, (flattest + steepest) / 2, base, "no peak known, only bounds: the highest came before")
    slope = _slope_between(exact)
    text = "2 or 3 sizes of micro-batches with a known peak" if slope else "1 size of micro-batch with a known peak"
    slope = min(slope or steepest, steepest)
    flat, steep = min(flattest, slope), steepest
    lines = ((highest - flat * x, flat), (highest - steep * x, steep))
    found = _between(lines, slope, highest - slope * x, text)
    return msgspec.structs.replace(found, points=len(exact))


def _between(lines: tuple[Line, Line], slope: float, fixed: float, basis: str) -> PeakMemory:
    low, high = sorted(line[0] for line in lines)
    flat, steep = sorted(line[1] for line in lines)
    return PeakMemory(fixed, slope, (max(0.0, low), high), (flat, steep), 0, basis, lines=lines)


def _slope_between(exact: Sequence[MemoryPoint]) -> float | None:
    """Return the slope through the known peaks, where there are two sizes that differ enough."""
    least, most = (of(exact, key=lambda p: p.slots) for of in (min, max))
    if most.slots < LEAST_SPREAD * least.slots:
        return None
    slopes = [(most.low_bytes - p.low_bytes) / (most.slots - p.slots) for p in exact if p.slots < most.slots]
    slope = median(slopes)
    return slope if slope and slope > 0 else None


def _slope_read(points: Sequence[MemoryPoint], base: float, most: float) -> float:
    """Return the slope of what was read within micro-batches: that of a peak is no less, but for its fixed part."""
    read = [(float(p.slots), float(p.seen_bytes)) for p in points if p.seen_bytes is not None and p.seen_bytes > base]
    if not read:
        return most
    sizes = [x for x, _ in read]
    if max(sizes) >= LEAST_SPREAD * min(sizes):
        slope = float(_theil_sen(np.array(sizes[:60]), np.array([y for _, y in read[:60]]))[1])
    else:
        slope = median([(y - base) / x for x, y in read]) or most
    return min(max(slope, 0.0), most)


def _beyond(found: PeakMemory, failed: Sequence[MemoryPoint]) -> PeakMemory:
    """Raise the slope until the line is above what failed: that needed more than there was."""
    for point in failed:
        middle = found.predict(point.slots)[0]
        if middle < point.low_bytes:
            slope = found.bytes_per_slot + (point.low_bytes - middle) / point.slots
            line = (found.fixed_bytes, slope)
            flat, steep = found.per_slot_interval
            found = msgspec.structs.replace(
                found,
                bytes_per_slot=slope,
                per_slot_interval=(flat, max(steep, slope)),
                lines=tuple(
                    each for each in (*found.lines, line) if each[0] + each[1] * point.slots >= point.low_bytes
                ),
            )
    return found
