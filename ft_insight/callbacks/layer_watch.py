"""Layers over a run: which steps are looked at, and what becomes of their marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ft_insight.callbacks.clock import HostClock
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.layers import LayerTimer, Mark
from ft_insight.callbacks.modules import Part
from ft_insight.callbacks.replay import layer_record
from ft_insight.callbacks.sampling import Sampling
from ft_insight.records import Layers


@dataclass
class Look:
    """The marks of one sampled step."""

    step: int
    marks: list[Mark]


class LayerWatch:
    """Times layers on sampled steps. All its methods run behind the guard, as ``layers``."""

    def __init__(self, parts: list[Part], clock: HostClock, guard: Guard, every: int | None) -> None:
        self.timer = LayerTimer(parts, clock, guard)
        self._clock = clock
        self._guard = guard
        self._sampling = Sampling(every)
        self._spent_s = 0.0

    def step_begins(self) -> None:
        """Take a close look at this step, if it is due."""
        if self._sampling.due():
            self._spent_s = self._guard.spent_s
            self.timer.install()

    def step_ends(self, step: int, wall_s: float) -> Look | None:
        """Take the hooks out again; return what was seen."""
        if not self.timer.installed:
            return None
        self.timer.remove()
        self._sampling.cost(self._guard.spent_s - self._spent_s, wall_s)
        return Look(step, self.timer.take())

    def tell(self, look: Look, put: Callable[[Layers], None], t_s: float, *, arrived: bool) -> None:
        """Work out what the marks mean, once the device has passed them, and give their events back."""
        if arrived:
            record = layer_record(look.marks, self.timer.parts, self._clock, look.step, t_s)
            if record is not None:
                put(record)
        self._clock.recycle([mark.event for mark in look.marks])


def can_time(model: nn.Module, parts: list[Part], *, compiled: bool, devices: int) -> str | None:
    """Return why layers cannot be timed in this run, or None if they can."""
    if compiled:
        return "the model is compiled, and hooks would break its graphs: phases only"
    if not parts:
        return "no decoder layers were found in this model: phases only"
    if devices > 1:
        return "the model is spread over several devices, whose clocks cannot be compared: phases only"
    return None
