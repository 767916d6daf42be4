"""Sums over the steps of a run, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from ft_insight import records as r
from ft_insight.run_view import Rates, Share, Totals

COUNTS = ("queries", "slots", "real_tokens", "loss_tokens")
Work = tuple[int | None, int | None, int | None, int | None]
"""What ``COUNTS`` names, in that order."""


def _plus(one: Work, other: Work) -> Work:
    """Add count by count; what is not known of one is not known of the sum."""
    a, b, c, d = one
    e, f, g, h = other
    return (
        None if a is None or e is None else a + e,
        None if b is None or f is None else b + f,
        None if c is None or g is None else c + g,
        None if d is None or h is None else d + h,
    )


def work_of(step: r.Step) -> Work:
    """Sum a step's micro-batches. It runs for every step of a log, so it is written for speed."""
    queries = slots = real = loss = 0
    try:
        for m in step.micro:
            queries += m.queries  # type: ignore[operator]
            slots += m.slots  # type: ignore[operator]
            real += m.real_tokens  # type: ignore[operator]
            loss += m.loss_tokens  # type: ignore[operator]
    except TypeError:  # one is not known, which is rare
        work: Work = (0, 0, 0, 0)
        for m in step.micro:
            work = _plus(work, (m.queries, m.slots, m.real_tokens, m.loss_tokens))
        return work
    return (queries, slots, real, loss) if step.micro else (None, None, None, None)


class StepSums:
    """Sums over steps. A count that one micro-batch lacks is unknown for all."""

    def __init__(self) -> None:
        self.steps = 0
        self.micro = 0
        self.wall_s = 0.0
        self.self_s: float | None = None
        self.idle_s: float | None = None
        self.phases: dict[str, float] = {}
        self._work: Work = (0, 0, 0, 0)

    @classmethod
    def of(cls, steps: Iterable[r.Step]) -> StepSums:
        """Sum some steps."""
        sums = cls()
        for step in steps:
            sums.add(step, work_of(step))
        return sums

    def add(self, step: r.Step, work: Work) -> None:
        """Take one more step in; ``work`` is what ``work_of`` says of it."""
        self.add_work(step, work)
        self.micro += len(step.micro)
        if step.self_s is not None:
            self.self_s = (self.self_s or 0.0) + step.self_s
        if step.idle_at_most_s is not None:
            self.idle_s = (self.idle_s or 0.0) + step.idle_at_most_s
        phases = self.phases
        for name, seconds in step.phases_s.items():
            phases[name] = phases.get(name, 0.0) + seconds

    def add_work(self, step: r.Step, work: Work) -> None:
        """Take in of a step what rates follow from, and no more."""
        self.steps += 1
        self.wall_s += step.wall_s
        self._work = _plus(self._work, work)

    def self_share(self) -> float | None:
        """Return what ft-insight itself took, as a fraction of the steps' wall time."""
        return self.self_s / self.wall_s if self.self_s is not None and self.wall_s else None

    def idle_share(self) -> float | None:
        """Return the most that the device can have idled, as a fraction of the steps' wall time."""
        return self.idle_s / self.wall_s if self.idle_s is not None and self.wall_s else None

    def gap(self) -> float | None:
        """Return (sum of all phases) / (sum of wall times) - 1."""
        return sum(self.phases.values()) / self.wall_s - 1 if self.wall_s else None

    def totals(self) -> Totals:
        """Return the work done, by its counts."""
        return Totals(self.steps, *self._work) if self.steps else Totals()


def rates_of(sums: StepSums) -> Rates:
    """Return the work per second of wall time."""
    totals = sums.totals()
    if not sums.wall_s:
        return Rates()

    def per_second(count: int | None) -> float | None:
        return None if count is None else count / sums.wall_s

    return Rates(
        per_second(totals.queries),
        per_second(totals.real_tokens),
        per_second(totals.loss_tokens),
        per_second(totals.slots),
    )


def shares_of(parts: dict[str, float], order: tuple[str, ...], whole: float | None = None) -> tuple[Share, ...]:
    """Return named seconds in order, each as a fraction of ``whole``, or of their sum."""
    whole = sum(parts.values()) if whole is None else whole
    names = [n for n in order if n in parts] + [n for n in parts if n not in order]
    return tuple(Share(n, parts[n], parts[n] / whole if whole else 0.0) for n in names)
