"""Equations (1) and (2) of "Understanding the Performance and Estimating the Cost of LLM Fine-Tuning".

As the paper prints them, and as its own figures need them; where the two differ, both are here by name. Its figures
come from the artifact stsxxx/finetune at 728a01b (MIT), folder ``analytical_model``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ft_insight.estimate.models import Array


@dataclass(frozen=True, slots=True)
class BatchCoefficients:
    """Coefficients of equation (1) for one model."""

    c0: float
    c1: float
    model_memory_gb: float
    """Weights alone, by arithmetic: 46.7 B parameters at half a byte, or 2.8 B at two."""


PRINTED = {"Mixtral": BatchCoefficients(82, 0.95, 23.35), "BlackMamba": BatchCoefficients(83, 0.88, 5.6)}
"""As section V-A prints them."""
NEEDED = {"Mixtral": BatchCoefficients(62, 0.89, 23.35), "BlackMamba": BatchCoefficients(83, 0.88, 5.6)}
"""With which equation (1) gives the batches that the artifact's sweeps reach, at the longest padded row."""
MEDIAN_LENGTH = {"CS": 79, "MATH": 174}
"""Tokens of the median row: what section V-A says that ``seq_len`` is."""
LONGEST_LENGTH = {"CS": 512, "MATH": 1024}
"""Tokens of the longest padded row, MATH cut off at 1,024: what its tables need."""
CODED_C3 = {"Mixtral": 1.8, "BlackMamba": 2.5}
"""C3 as the artifact fixes it; beside a free C2 it changes nothing."""


def raw_max_batch(coefficients: BatchCoefficients, gpu_memory_gb: float, length: int, sparsity: float) -> float:
    """Return equation (1) before it is made whole: ``C0 (GPU - model) / (length ((1 - C1) + C1 sparsity))``.

    ``sparsity`` is the share of experts that are active: 2 of 8 is 0.25, dense is 1.
    """
    room = gpu_memory_gb - coefficients.model_memory_gb
    return coefficients.c0 * room / (length * ((1 - coefficients.c1) + coefficients.c1 * sparsity))


def max_batch(coefficients: BatchCoefficients, gpu_memory_gb: float, length: int, sparsity: float) -> int:
    """Return the largest batch by equation (1), rounded down as printed; 0 where the model itself does not fit."""
    return max(0, math.floor(raw_max_batch(coefficients, gpu_memory_gb, length, sparsity)))


def one_line_meets(maxima: Mapping[float, int]) -> bool:
    """Whether equation (1) with any C0, C1 and model memory gives these batches by GPU memory in GB.

    For one model, length and sparsity it is a line in the memory; made whole by floor, its value at each memory
    lies in an interval of width 1, and rounding moves all those intervals by a half. A line exists if the least
    slope that any pair asks for is below the largest that any pair allows, in every pair of pairs.
    """
    memories = sorted(maxima)
    pairs = [(a, b) for i, a in enumerate(memories) for b in memories[i + 1 :]]
    least = max(((maxima[b] - maxima[a] - 1) / (b - a) for a, b in pairs), default=0.0)
    most = min(((maxima[b] - maxima[a] + 1) / (b - a) for a, b in pairs), default=math.inf)
    return least < most


@dataclass(frozen=True, slots=True)
class Eq2:
    """Equation (2) fitted to throughputs; ``c3`` is given, for no throughputs can tell it from the others."""

    coded: bool
    c2: float
    c3: float
    c4: float
    rmse: float
    """Queries per second, over what it was fitted to."""

    def throughput(self, batch: float, sparsity: float) -> float:
        """Return queries per second: as printed ``C2 log(b / (s C3)) + C4``, as coded ``C2 log(b) / (s C3) + C4``."""
        return float(
            self.c2 * _logarithm(np.array([batch]), np.array([sparsity]), self.c3, coded=self.coded)[0] + self.c4
        )


def _logarithm(batch: Array, sparsity: Array, c3: float, *, coded: bool) -> Array:
    result: Array = np.log(batch) / (sparsity * c3) if coded else np.log(batch / (sparsity * c3))
    return result


def fit_eq2(
    batch: Sequence[float], sparsity: Sequence[float], throughput: Sequence[float], *, coded: bool, c3: float = 1.0
) -> Eq2:
    """Fit equation (2) by least squares in queries per second, as the artifact does with scipy's ``curve_fit``.

    Needs two points that differ; it is linear in C2 and C4, so that the fit is exact.
    """
    x = _logarithm(np.array(batch, float), np.array(sparsity, float), c3, coded=coded)
    measured = np.array(throughput, float)
    design = np.column_stack([x, np.ones_like(x)])
    c2, c4 = np.linalg.lstsq(design, measured, rcond=None)[0]
    misses = design @ np.array([c2, c4]) - measured
    return Eq2(coded, float(c2), c3, float(c4), float(np.sqrt(np.mean(misses**2))))


def cost_usd(queries: int, epochs: float, throughput: float, usd_per_hour: float) -> float:
    """Return what Table IV says a fine-tune costs: measured throughput in, so that it is no prediction."""
    return queries * epochs / throughput / 3600 * usd_per_hour
