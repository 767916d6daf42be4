"""A run as points for a joint fit with other runs: of other batches, densities or accumulations."""

from __future__ import annotations

from ft_insight.estimate.density import active_share
from ft_insight.estimate.models import Point
from ft_insight.run_view import RunView
from ft_insight.stats import median

BINS = 12


def micro_points(view: RunView) -> list[Point]:
    """Return micro-batches of up to twelve sizes, of like slots as one point; no step's rest is in them."""
    return [Point(slots, seconds, active_share(view) or 1.0) for slots, seconds in _sizes(view)]


def points_of(view: RunView) -> list[Point]:
    """Return steps of up to twelve sizes: micro-batches of like slots as one point, with their median time.

    ``work`` is slots, ``seconds`` those of a whole optimizer step of such micro-batches. Empty where the run does not
    tell the slots of its micro-batches.
    """
    count = view.accumulation or 1.0
    rest = max(0.0, median(view.rest_s) or 0.0)
    density = active_share(view) or 1.0
    return [Point(slots, count * seconds + rest, density, accumulation=count) for slots, seconds in _sizes(view)]


def _sizes(view: RunView) -> list[tuple[float, float]]:
    """Return (mean slots, median seconds) of micro-batches of like slots."""
    known = sorted((m.slots, m.compute_s) for m in view.micro if m.slots and m.compute_s)
    sizes = []
    for i in range(BINS):
        alike = known[i * len(known) // BINS : (i + 1) * len(known) // BINS]
        seconds = median(s for _, s in alike)
        if seconds is not None:
            sizes.append((sum(slots for slots, _ in alike) / len(alike), seconds))
    return sizes
