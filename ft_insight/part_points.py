"""What parts of a step took against its slots: the points from which their fixed and per-slot times are fitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from ft_insight import records as r
from ft_insight.stats import EvenSample

RECENT = 64
"""Steps kept for layers' times that come later, and the other way round: a device is behind the host."""
KEPT = 512
EXPERT_KINDS = frozenset({"experts"})


class PartView(msgspec.Struct, frozen=True):
    """An even sample of the segment's steps, the first left out."""

    phases: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """(slots of all micro-batches of a step, seconds by phase)."""
    experts: tuple[tuple[float, float], ...] = ()
    """(mean slots of a micro-batch, mean seconds of its experts in all layers), of steps whose layers were timed."""


class PartTally:
    """Gathers :class:`PartView`."""

    def __init__(self) -> None:
        self._phases: EvenSample[tuple[int, Mapping[str, float]]] = EvenSample(KEPT)
        self._experts: EvenSample[tuple[float, float]] = EvenSample(KEPT)
        self._steps: deque[tuple[r.Step, int]] = deque(maxlen=RECENT)
        self._layers: deque[r.Layers] = deque(maxlen=RECENT)

    def add_step(self, step: r.Step, slots: int | None) -> None:
        """Take in a step that is not the first, of so many slots in all its micro-batches."""
        if not slots:
            return
        self._phases.add((slots, step.phases_s))
        self._steps.append((step, slots))
        for layers in self._layers:
            if layers.step == step.step:
                self._pair(step, slots, layers)

    def add_layers(self, layers: r.Layers) -> None:
        """Take in what the layers of a step took."""
        self._layers.append(layers)
        for step, slots in self._steps:
            if step.step == layers.step:
                self._pair(step, slots, layers)

    def view(self) -> PartView:
        """Return the points."""
        return PartView(self._phases.items(), self._experts.items())

    def _pair(self, step: r.Step, slots: int, layers: r.Layers) -> None:
        count = len(step.micro)
        columns = zip(layers.kinds, layers.forward_s, layers.recompute_s, layers.backward_s, strict=False)
        seconds = sum(sum(times) for kind, *times in columns if kind in EXPERT_KINDS)
        # where only some of the micro-batches were timed, nobody knows how many slots those had
        if layers.micro_batches == count and seconds > 0:
            self._experts.add((slots / count, seconds / count))
