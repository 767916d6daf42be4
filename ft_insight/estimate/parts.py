"""Phases of a step, each fitted against the step's slots: what of it is fixed (optimizer, host) and what is work."""

from __future__ import annotations

from ft_insight.estimate.step_time import NotIdentifiable, fit_affine
from ft_insight.records import STEP_PHASES, PhaseFit
from ft_insight.run_view import RunView
from ft_insight.stats import median


def phase_fits(view: RunView) -> dict[str, PhaseFit]:
    """Return the phases of ``view`` in their order, those that took no time left out.

    The optimizer's fixed time is all of it but for chance; that of forward and backward is launches and the reading
    of weights; what data wait and ``other`` take is the host's.
    """
    found = {}
    for name in STEP_PHASES:
        points = [(float(slots), seconds[name]) for slots, seconds in view.parts.phases if seconds.get(name)]
        typical = median(seconds for _, seconds in points)
        if typical is None:
            continue
        fit = fit_affine([x for x, _ in points], [y for _, y in points])
        if isinstance(fit, NotIdentifiable):
            found[name] = PhaseFit(median_s=typical)
        else:
            found[name] = PhaseFit(median_s=typical, fixed_s=fit.fixed_s, per_slot_s=fit.per_slot_s)
    return found
