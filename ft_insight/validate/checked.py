"""What every comparison of a prediction with a published measurement comes down to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """One prediction beside what was measured, in the same unit."""

    method: str
    """``leave-one-out``, ``cross-GPU`` or ``peak memory``."""
    source: str
    gpu: str
    label: str
    """Which row of the table, in words."""
    measured: float
    predicted: float
    unit: str
    low: float | None = None
    high: float | None = None
    """80% interval of the prediction, where one is given."""

    @property
    def error(self) -> float:
        """Relative error of the prediction, signed."""
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool | None:
        """Whether the interval holds the measured value; None where no interval is given."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high
