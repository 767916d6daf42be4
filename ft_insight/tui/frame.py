"""One moment of the dashboard: all that a drawing may depend on, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ft_insight.reader import Status
from ft_insight.run_view import RunView
from ft_insight.tui.what_if import AS_IT_WAS, Outlook, WhatIf

_WAITING = Status("waiting", "waiting")


@dataclass(frozen=True, slots=True)
class Frame:
    """A snapshot of the run, and how its user wants to see it."""

    view: RunView = field(default_factory=RunView)
    status: Status = _WAITING
    path: Path = Path()
    elapsed_s: float = 0.0
    """The run's elapsed time now: the view's, moved on by the dashboard's clock while the run is live."""
    paused: bool = False
    by_imbalance: bool = False
    """Layers of experts are sorted by imbalance instead of by their place in the model."""
    since_start: bool = False
    """Experts are shown by the change of their shares since the start of the run."""
    layer: str | None = None
    """The layer of experts that is shown in detail, by its full name; None: the least even one."""
    what_if: WhatIf = AS_IT_WAS
    """What the Cost tab is asked."""
    outlook: Outlook | None = None
    """What the run says of a what-if, which may be the one before while the newest is being worked out."""

    @property
    def waiting(self) -> bool:
        """There is nothing of a run to be shown yet."""
        return self.view.header is None
