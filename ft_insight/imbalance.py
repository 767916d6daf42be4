"""What uneven load of the experts costs in time, from the layers of one run alone.

All layers of a model have experts of one shape and route the same tokens in the same steps, so that what differs
between the times of their experts is what differs in their load. That is why layers are compared here, each with its
mean time over the steps that were timed and its counts over the whole segment, and not flushes of counts with steps:
those differ in tokens and padding too, and a timed step and a flush are hardly ever of the same tokens. Counts and
times are then both means of the segment, the one of all steps, the other of a sample spread over it.

The model is ``time = a + b * share of the busiest expert``. Its slope is the median of the slopes of all pairs of
layers (Theil and Sen: https://doi.org/10.1080/01621459.1968.10480934), with Sen's interval from the distribution of
Kendall's rank correlation: neither assumes a distribution of the errors, and a layer that was held up once, or whose
backward pass is shorter for lack of anything to train before it, cannot decide alone. The cost of a layer is ``b``
times what its busiest expert has beyond the even share. Load that is uneven from batch to batch, and even over the
run, counts as even.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from ft_insight.experts import LayerLoad
from ft_insight.layer_times import LayerTime
from ft_insight.stats import median

LEAST_LAYERS = 12
"""With fewer, a relation is only found where chance overstates it, and its interval misses the truth too often."""
SURE = 2.576
"""Standard errors of Kendall's correlation from which on it is none by chance: once in 200 runs without a relation."""
WIDTH = 1.645
"""Standard errors at both sides of an interval of 90%."""
REACH = 1.0
"""How far below the most even layer the even load may lie, in units of the range of loads that was seen."""


class ImbalanceCost(msgspec.Struct, frozen=True):
    """Seconds per micro-batch beyond those of even load, as (estimate, low, high) with an interval of 90%."""

    total_s: tuple[float, float, float]
    """All layers together."""
    layer_s: dict[str, tuple[float, float, float]]
    """By the layer's name in ``LayerLoad``."""


def cost_of_imbalance(loads: Sequence[LayerLoad], times: Sequence[LayerTime]) -> ImbalanceCost | str:
    """Return what uneven load costs, or in words why that cannot be told from this run."""
    pairs = _joined(loads, times)
    if isinstance(pairs, str):
        return pairs
    busiest = [load.max_over_mean for load, _ in pairs]
    if min(busiest) - 1 > REACH * (max(busiest) - min(busiest)):
        return "all layers are about as uneven, so that none tells what even load would take"
    slope = _slope(busiest, [seconds for _, seconds in pairs])
    if slope is None:
        return "the time of the experts does not rise with the load of the busiest one"
    layers = {load.layer: _times(load.max_over_mean - 1, slope) for load, _ in pairs}
    return ImbalanceCost(_times(sum(x - 1 for x in busiest), slope), layers)


def _times(factor: float, slope: tuple[float, float, float]) -> tuple[float, float, float]:
    middle, low, high = slope
    return factor * middle, factor * low, factor * high


def _joined(loads: Sequence[LayerLoad], times: Sequence[LayerTime]) -> list[tuple[LayerLoad, float]] | str:
    """Return each layer's load and the mean seconds of its experts per micro-batch."""
    seconds = {time.layer: time.total_s for time in times if time.kind == "experts" and time.layer is not None}
    if not seconds:
        return "the experts' time was not measured"
    numbers = [_number(load.layer) for load in loads]
    if len(set(numbers)) < len(numbers) or None in numbers:
        return "routers and timed layers cannot be told to belong together"
    pairs = [(load, seconds[n]) for load, n in zip(loads, numbers, strict=True) if n in seconds and any(load.counts)]
    if len(pairs) < LEAST_LAYERS:
        return f"{len(pairs)} layers with experts were timed, and {LEAST_LAYERS} are needed"
    if len({len(load.counts) for load, _ in pairs}) > 1 or len({load.tokens for load, _ in pairs}) > 1:
        return "the layers differ in experts or tokens, and so in more than their load"
    return pairs


def _number(name: str) -> int | None:
    """Return the number of the decoder layer that a router is in: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the median slope of all pairs with its interval; None where ``y`` does not surely rise with ``x``."""
    n = len(x)
    slopes, score = [], 0
    for i in range(n):
        for j in range(i):
            dx, dy = x[i] - x[j], y[i] - y[j]
            if dx:
                slopes.append(dy / dx)
                score += (dy / dx > 0) - (dy / dx < 0)
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    if (score - 1) / spread < SURE:
        return None
    slopes.sort()
    cut = (len(slopes) - WIDTH * spread) / 2
    low, high = max(0, math.floor(cut)), min(len(slopes) - 1, len(slopes) - 1 - math.floor(cut))
    middle = median(slopes)
    return None if middle is None else (middle, slopes[low], slopes[high])
