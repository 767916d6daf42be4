"""What fits: the logs of two batch sizes give that of any other, and the allocator's replay says whether it fits.

Everything that a step allocates is constant or affine in the rows of the batch, so the size of each allocation at
any batch follows from two traces, and with it what the allocator makes of them on a given card, fragmentation
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ft_insight.catalog import Gpu
from ft_insight.estimate.memory import CONTEXT_BYTES
from ft_insight.estimate.plan.allocator import DeviceFullError, replay
from ft_insight.estimate.plan.trace import Log

ERROR = 0.05
"""More than 80% of the predictions for published runs were closer than this (`ft-insight validate`)."""
ERROR_RUNS = 66
"""So many published runs that rests on."""
MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Scaled:
    """Two logs of one and the same fine-tune, at batches ``low`` and ``high``."""

    low: int
    first: Log
    high: int
    second: Log

    def events(self, batch: int) -> Iterator[tuple[int, int]]:
        """Give the log at another batch; raises ValueError where the two do not go through the same steps."""
        share = (batch - self.low) / (self.high - self.low)
        for (key, one), (other, two) in zip(ordered(self.first), ordered(self.second), strict=True):
            if key != other or (one < 0) != (two < 0):
                raise ValueError("the steps differ between batches")
            yield key, one if one < 0 else max(0, round(one + (two - one) * share))

    @property
    def alike(self) -> bool:
        """Whether the two go through the same steps."""
        one, two = ordered(self.first), ordered(self.second)
        return len(one) == len(two) and all(
            a[0] == b[0] and (a[1] < 0) == (b[1] < 0) for a, b in zip(one, two, strict=True)
        )

    def affine(self) -> tuple[float, float]:
        """Return (bytes at no rows, bytes a row) of the peak that is allocated."""
        one, two = self.first.peak()[0], self.second.peak()[0]
        slope = (two - one) / (self.high - self.low)
        return one - slope * self.low, slope


def ordered(log: Log) -> list[tuple[int, int]]:
    """Return the events of a log with what is freed at one go in the order of its making.

    Python drops the tensors of a finished frame in any order, and not in the same one each time.
    """
    events: list[tuple[int, int]] = []
    freed: list[tuple[int, int]] = []
    for event in log.events:
        if event[1] < 0:
            freed.append(event)
            continue
        events += [*sorted(freed), event]
        freed = []
    return [*events, *sorted(freed)]


def room(gpu: Gpu) -> int:
    """Return what torch's allocator can have of a card: its memory without the CUDA context."""
    return gpu.usable_memory_bytes - CONTEXT_BYTES


def fits(events: Iterator[tuple[int, int]] | list[tuple[int, int]], gpu: Gpu) -> bool:
    """Return whether a log goes through on a card."""
    try:
        replay(events, room(gpu))
    except DeviceFullError:
        return False
    return True


def largest(scaled: Scaled, gpu: Gpu) -> tuple[int, int, int]:
    """Return (rows that fit, rows that fit if the method is off by its usual error either way)."""
    fixed, slope = scaled.affine()
    if slope <= 0:
        return MOST, MOST, MOST

    def at(share: float) -> int:
        return max(0, min(MOST, int((room(gpu) * share - fixed) / slope)))

    best = at(1.0)
    if scaled.alike:
        low, high = int(best * 0.7), best  # fragmentation takes some: between these, the replay decides
        while low < high:
            middle = (low + high + 1) // 2
            if fits(scaled.events(middle), gpu):
                low = middle
            else:
                high = middle - 1
        best = low
    taken = best / at(1.0) if at(1.0) else 0.0
    return best, int(at(1 - ERROR) * taken), max(best, int(at(1 + ERROR) * taken))
