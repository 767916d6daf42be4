"""A run as points for a joint fit with other runs: of other batches, densities or accumulations."""

from __future__ import annotations

from ft_insight.estimate.density import active_share
from ft_insight.estimate.models import Point
from ft_insight.run_view import RunView
from ft_insight.stats import median

BINS = 12


def points_of(view: RunView) -> list[Point]:
    """Return steps of up to twelve sizes: micro-batches of like slots as one point, with their median time.

    ``work`` is slots, ``seconds`` those of a whole optimizer step of such micro-batches. Empty where the run does not
    tell the slots of its micro-batches.
    """
    known = sorted((m.slots, m.compute_s) for m in view.micro if m.slots and m.compute_s)
    count = view.accumulation or 1.0
    rest = max(0.0, median(view.rest_s) or 0.0)
    points = []
    for i in range(BINS):
        alike = known[i * len(known) // BINS : (i + 1) * len(known) // BINS]
        seconds = median(s for _, s in alike)
        if seconds is not None:
            work = sum(slots for slots, _ in alike) / len(alike)
            points.append(Point(work, count * seconds + rest, active_share(view) or 1.0, accumulation=count))
    return points
