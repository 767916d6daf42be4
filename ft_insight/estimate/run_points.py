"""A run as points for a joint fit with other runs: of other batches, densities or accumulations."""

from __future__ import annotations

from collections.abc import Sequence

from ft_insight.estimate.density import active_share
from ft_insight.estimate.models import Point
from ft_insight.estimate.packing import is_packed
from ft_insight.records import MicroBatch
from ft_insight.run_view import RunView
from ft_insight.stats import median

BINS = 12
LEAST_ALIKE = 4


def micro_points(view: RunView) -> list[Point]:
    """Return micro-batches of up to twelve sizes, of like slots as one point; no step's rest is in them.

    Where all tell their queries, those of one batch make points of their own, whose ``length`` is slots per query; not
    where rows are packed, since then neither is how long a row of a batch is.
    """
    density = active_share(view) or 1.0
    known = [m for m in view.micro if m.slots and m.compute_s]
    batches = {m.queries for m in known}
    if len(batches) > 1:  # the last batch of an epoch is a smaller one, and tells little
        batches = {b for b in batches if sum(m.queries == b for m in known) >= LEAST_ALIKE}
    packed = view.header is not None and is_packed(view.header.train.packing)
    if packed or not all(batches) or len(batches) > BINS:
        return [Point(slots, seconds, density) for slots, seconds in _sizes(known)]
    return [
        Point(slots, seconds, density, slots / batch)
        for batch in sorted(b for b in batches if b)
        for slots, seconds in _sizes([m for m in known if m.queries == batch], max(1, BINS // len(batches)))
    ]


def _sizes(micro: Sequence[MicroBatch], bins: int = BINS) -> list[tuple[float, float]]:
    """Return (mean slots, median seconds) of micro-batches of like slots."""
    known = sorted((m.slots, m.compute_s) for m in micro if m.slots and m.compute_s)
    sizes = []
    for i in range(bins):
        alike = known[i * len(known) // bins : (i + 1) * len(known) // bins]
        seconds = median(s for _, s in alike)
        if seconds is not None:
            sizes.append((sum(slots for slots, _ in alike) / len(alike), seconds))
    return sizes
