"""The largest batch by doubling and bisection. Knows nothing of trainers: it is told what one batch did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ft_insight import units

GAIN = 0.05
"""Queries per second that a doubling must add to count as faster."""
SLOW_DOUBLINGS = 2
"""Doublings in a row without that gain, after which larger batches are no faster: one may be a busy moment."""
LONGEST_STEP_S = 60.0
"""A step longer than this is not doubled: a sweep takes minutes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a batch of the longest rows did."""

    batch: int
    fits: bool
    slots: int | None = None
    """Positions of its micro-batch, padding included."""
    step_s: float | None = None
    """The faster of its steps; None where it ran out of memory."""
    peak_bytes: int | None = None
    """Highest that torch's allocator held on the device."""
    kept_bytes: int | None = None
    """What it held between steps."""


@dataclass(frozen=True, slots=True)
class Cap:
    """A batch size that is not exceeded, and why."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """Where a search ended. ``largest`` is 0 where not even one row fits."""

    largest: int
    reason: str
    trials: tuple[Trial, ...]
    by_memory: bool
    """The next larger batch ran out of memory."""


def find_largest(attempt: Callable[[int], Trial], cap: Cap | None, *, until_memory: bool) -> Found:
    """Double the batch until it does not fit, then halve the gap until the largest that fits is known exactly.

    Without ``until_memory`` it also ends where larger batches are no faster, for on a machine that swaps rather than
    fails, memory may never end.
    """
    trials: list[Trial] = []
    batch, slow, best = 1, 0, 0.0
    while True:
        trial = attempt(batch)
        trials.append(trial)
        if not trial.fits:
            return _bisected(attempt, trials, trials[-2].batch if len(trials) > 1 else 0, batch)
        if cap is not None and batch >= cap.batch:
            return Found(batch, cap.reason, tuple(trials), by_memory=False)
        step_s = trial.step_s or 0.0
        if step_s > LONGEST_STEP_S:
            reason = f"a step of {batch:,} rows already takes {units.duration(step_s)}"
            return Found(batch, reason, tuple(trials), by_memory=False)
        rate = batch / step_s if step_s else 0.0
        slow = 0 if rate > best * (1 + GAIN) else slow + 1
        best = max(best, rate)
        if slow >= SLOW_DOUBLINGS and not until_memory:
            reason = (
                f"beyond batch {batch >> SLOW_DOUBLINGS:,} a doubling adds less than {GAIN:.0%} of queries per second"
            )
            return Found(batch, reason, tuple(trials), by_memory=False)
        batch = 2 * batch if cap is None else min(2 * batch, cap.batch)


def _bisected(attempt: Callable[[int], Trial], trials: list[Trial], fits: int, fails: int) -> Found:
    while fails - fits > 1:
        middle = (fits + fails) // 2
        trial = attempt(middle)
        trials.append(trial)
        if trial.fits:
            fits = middle
        else:
            fails = middle
    return Found(fits, f"batch {fails:,} runs out of memory", tuple(trials), by_memory=True)


def sizes_to_measure(largest: int, working: int | None, most: int = 6) -> tuple[int, ...]:
    """Return a handful of sizes from 1 to ``largest``, evenly spaced by factors, and the working batch if it fits."""
    spaced = {round(largest ** (i / (most - 1))) for i in range(most)}
    if working is not None and 1 <= working <= largest:
        spaced.add(working)
    return tuple(sorted(spaced))
