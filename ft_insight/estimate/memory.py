"""Largest batch from measured memory: peak against the most slots that a micro-batch has held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ft_insight.catalog import Gpu

CONTEXT_BYTES = 700 << 20
"""CUDA context and libraries, which torch's allocator does not count: 0.4 to 0.7 GiB on current drivers."""
FRAGMENTATION = 0.04
"""Share of the card that the caching allocator cannot use for lack of a contiguous piece."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """``peak = fixed_bytes + bytes_per_slot * slots``, of one process on one GPU."""

    fixed_bytes: float
    bytes_per_slot: float
    shapes: int
    """Distinct sizes of the largest micro-batch that it rests on."""

    def largest_batch(self, gpu: Gpu, longest: int | None) -> tuple[int | None, str | None]:
        """Return (queries per micro-batch that fit, None), or (None, why that cannot be said).

        At the longest row of the data set: a batch that fits only typical rows fails in the middle of an epoch.
        """
        if not longest:
            return None, "the lengths of the rows are not known; add --seq-len L"
        room = gpu.usable_memory_bytes * (1 - FRAGMENTATION) - CONTEXT_BYTES - self.fixed_bytes
        if room < self.bytes_per_slot * longest:
            return 0, None
        return math.floor(room / (self.bytes_per_slot * longest)), None


def fit_peak(points: Sequence[tuple[int, int, int]]) -> PeakMemory | str:
    """Fit (most slots so far, peak bytes so far, bytes allocated between steps); a string says why not.

    The peak is torch's own, never reset, so that it only grows, with the largest micro-batch so far. With one such
    size the fixed part is taken to be what stays allocated between steps.
    """
    if not points:
        return "no GPU memory was measured in this run"
    slots, peaks, kept = (list(column) for column in zip(*points, strict=True))
    if len(set(slots)) == 1 or max(peaks) == min(peaks):
        above = peaks[-1] - kept[-1]
        if above <= 0 or slots[-1] <= 0:
            return "the peak of this run lies outside of its steps"
        return PeakMemory(kept[-1], above / slots[-1], 1)
    mean_x, mean_y = sum(slots) / len(slots), sum(peaks) / len(peaks)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(slots, peaks, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in slots)
    if slope <= 0:
        return "the peak of this run does not grow with its micro-batches"
    return PeakMemory(max(mean_y - slope * mean_x, min(kept)), slope, len(set(slots)))
