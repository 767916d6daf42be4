"""A few steps measured on the target itself: what they took against the run, and so what the whole run would take."""

from __future__ import annotations

import math

import msgspec

from ft_insight.estimate.measured import Measured
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.transfer import TransferError
from ft_insight.stats import median

ALIKE = 0.05
"""Micro-batches whose slots differ by less are taken to be of one size."""
LEAST_SPREAD = 0.05
"""80% half-width, in logarithms, that stays however many steps a probe has: its few sizes stand for all."""


class Scale(msgspec.Struct, frozen=True):
    """A factor on the time of a micro-batch, its 80% half-width in logarithms, and what it rests on."""

    factor: float
    spread: float
    basis: str


def rescaled(measured: Measured, probe: Measured) -> Scale | TransferError:
    """Return how much longer a micro-batch takes on the probe's device than on the run's.

    Each of the probe's micro-batches is held against what the run took for as many slots: by its step-time model,
    or without one by those of its micro-batches that were as large.
    """
    ratios = []
    for micro in probe.view.micro:
        if micro.slots and micro.compute_s and micro.compute_s > 0:
            here = _seconds_here(measured, micro.slots)
            if here:
                ratios.append(math.log(micro.compute_s / here))
    middle = median(ratios)
    if middle is None:
        return TransferError("no micro-batch of the probe is of a size that the run has seen")
    # the median of n values scatters by 1.25 times their standard deviation over sqrt(n); 1.28 of it are 80%
    deviation = 1.4826 * (median([abs(r - middle) for r in ratios]) or 0.0)
    scatter = 1.2816 * 1.25 * deviation / math.sqrt(len(ratios)) if len(ratios) > 2 else 0.2
    return Scale(
        math.exp(middle), math.hypot(scatter, LEAST_SPREAD), f"probe of {len(ratios)} micro-batches on {_name(probe)}"
    )


def _name(probe: Measured) -> str:
    return probe.here.name if probe.here else probe.view.device


def _seconds_here(measured: Measured, slots: int) -> float | None:
    if measured.on_gpu and not isinstance(measured.step_time, NotIdentifiable):
        return measured.step_time.predict(float(slots))[0]
    alike = [m.compute_s for m in measured.view.micro if m.slots and m.compute_s and abs(m.slots / slots - 1) < ALIKE]
    return median(alike)
