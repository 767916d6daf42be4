"""Which steps are looked at closely: as many as a budget of the run's time allows, by what looking has cost so far."""

from __future__ import annotations

BUDGET = 0.005
"""Share of the run's time that close looks may take: half of the 1% that all of ft-insight may."""
FIRST_STEP = 3
"""The first steps warm up."""
FIRST_INTERVAL = 10
LONGEST_INTERVAL = 1000
HOOK_FACTOR = 2.0
"""What a hook costs beyond our own code: torch leaves a module's fast path and packs arguments."""


class Sampling:
    """Decides for each step; ``every`` fixes the interval, None lets the budget decide, 0 looks at none."""

    def __init__(self, every: int | None = None, first: int = FIRST_STEP) -> None:
        self._fixed = every
        self.interval = FIRST_INTERVAL if every is None else every
        self._next = first if every is None else 1
        self._step = 0

    def due(self) -> bool:
        """Tell, once for each step, whether to look at it."""
        self._step += 1
        if self._fixed == 0 or self._step < self._next:
            return False
        self._next = self._step + self.interval
        return True

    def cost(self, spent_s: float, step_s: float) -> None:
        """Take in what a look took of our own code, and how long its step was; set the interval to fit the budget."""
        if self._fixed is not None or step_s <= 0:
            return
        wanted = spent_s * HOOK_FACTOR / (BUDGET * step_s)
        # one odd look must not decide alone
        self.interval = max(1, min(LONGEST_INTERVAL, round((self.interval + wanted) / 2)))
        self._next = self._step + self.interval
