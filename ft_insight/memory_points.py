"""What a run tells of its memory, folded in constant memory: peaks against slots, what filled it, and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from ft_insight import records as r
from ft_insight.stats import EvenSample, median

KEPT_POINTS = 256
RECENT = 33
MOMENTS = ("between", "forward", "backward", "peak", "optimizer")
IN_STEP = frozenset(r.STEP_PHASES)


class MemoryPoint(msgspec.Struct, frozen=True):
    """The peak of one micro-batch, as far as it is known, in bytes of the allocator."""

    slots: int
    low_bytes: int
    """It was no lower."""
    high_bytes: int | None
    """It was no higher; None where memory ended."""
    base_bytes: int | None = None
    """Allocated when its step began, before any micro-batch; None where the peak does not depend on that."""
    seen_bytes: int | None = None
    """The most that was read within it."""

    @property
    def exact(self) -> bool:
        """The peak itself is known."""
        return self.low_bytes == self.high_bytes


class MemoryView(msgspec.Struct, frozen=True):
    """All that is known of a run's memory."""

    points: tuple[MemoryPoint, ...] = ()
    """An even sample, those of failures last; as if all optimizer states had been there from the first step on."""
    base_bytes: int | None = None
    """What is allocated when a step begins, once the optimizer's states are there."""
    moments: tuple[r.MemoryMoment, ...] = ()
    """What filled memory, in the order of ``MOMENTS``: the latest of each."""
    method: str | None = None
    latest: r.MemoryParts | None = None
    failures: tuple[r.OutOfMemory, ...] = ()
    """Of all segments: a retry knows what failed before."""
    fits_slots: int | None = None
    """The largest micro-batch that was computed."""
    fails_slots: int | None = None
    """The smallest that memory was too small for, where it is larger than those that were computed."""

    def joined(self, *others: MemoryView) -> MemoryView:
        """Return the peaks of several runs of the same kind as one's."""
        fits = [v.fits_slots for v in (self, *others) if v.fits_slots]
        fails = [v.fails_slots for v in (self, *others) if v.fails_slots and v.fails_slots > max(fits, default=0)]
        return msgspec.structs.replace(
            self,
            points=tuple(p for v in (self, *others) for p in v.points),
            fits_slots=max(fits, default=None),
            fails_slots=min(fails, default=None),
        )

    def moment(self, name: str) -> r.MemoryMoment | None:
        """Return one moment."""
        return next((m for m in self.moments if m.name == name), None)


class MemoryTally:
    """Folds the records of one log that speak of memory."""

    def __init__(self) -> None:
        self._failures: list[r.OutOfMemory] = []
        self._fits = 0
        self.start_segment()

    def start_segment(self) -> None:
        """A resumed or retried run is another process: only what failed, and what did not, is kept."""
        self._exact: EvenSample[MemoryPoint] = EvenSample(KEPT_POINTS)
        self._bounds: EvenSample[MemoryPoint] = EvenSample(KEPT_POINTS)
        self._bases: deque[int] = deque(maxlen=RECENT)
        self._between: int | None = None
        self._steps = 0
        self._peak = 0
        self._moments: dict[str, r.MemoryMoment] = {}
        self._latest: r.MemoryParts | None = None

    def add_step(self, step: r.Step) -> None:
        """Take in a step's micro-batches."""
        self._steps += 1
        slots = [m.slots for m in step.micro if m.slots is not None]
        self._fits = max(self._fits, max(slots, default=0))
        memory = step.memory
        if memory is None:
            return
        self._between = memory.allocated_bytes if memory.allocated_bytes is not None else memory.base_bytes
        if memory.base_bytes is not None and self._steps > 1:
            self._bases.append(memory.base_bytes)
        if memory.micro:
            self._by_micro_batch(step, memory)
            return
        for point in self._by_step(slots, memory):
            (self._exact if point.exact else self._bounds).add(point)

    def _by_micro_batch(self, step: r.Step, memory: r.Memory) -> None:
        """Take in the peaks of a step's micro-batches; under accumulation the first lacks the others' gradients."""
        skipped = len(step.micro) > 1 and len(memory.micro) > 1
        if not any(told.exact for told in memory.micro) and self._bounds.passes(len(memory.micro) - skipped):
            return
        for micro, told in zip(step.micro[skipped:], memory.micro[skipped:], strict=False):
            high = told.peak_bytes
            low = high if told.exact else told.seen_bytes
            if not micro.slots or low is None or high is None:
                continue
            sample = self._exact if low >= high else self._bounds
            if sample.wants():  # a point is made only where it is kept: logs are long
                sample.take(MemoryPoint(micro.slots, min(low, high), high, memory.base_bytes, told.seen_bytes))

    def _by_step(self, slots: list[int], memory: r.Memory) -> Iterator[MemoryPoint]:
        """Without figures of micro-batches, the largest one is taken to make the peak, if the peak rose."""
        peak, allocated = memory.peak_allocated_bytes, memory.allocated_bytes
        if peak is None or allocated is None or not slots:
            return
        # the optimizer's states appear during the first step: its peak says nothing of the later ones
        if self._steps > 1:
            rose = peak > self._peak
            yield MemoryPoint(max(slots), peak if rose else min(allocated, peak), peak)
        self._peak = max(self._peak, peak)

    def add_trial(self, trial: r.Tried) -> None:
        """Take in a batch that a sweep tried."""
        peak = trial.peak_allocated_bytes
        if trial.fits and trial.slots:
            self._fits = max(self._fits, trial.slots)
            if peak is not None:
                self._exact.add(MemoryPoint(trial.slots, peak, peak, trial.allocated_bytes))

    def add_parts(self, parts: r.MemoryParts) -> None:
        """Take in what filled memory."""
        self._latest = parts
        self._moments.update((m.name, m) for m in parts.moments if m.name in MOMENTS)

    def add_failure(self, failure: r.OutOfMemory) -> None:
        """Take in that memory ended."""
        self._failures.append(failure)

    def view(self) -> MemoryView:
        """Return what is known now."""
        settled = median(self._bases)
        base = self._between if settled is None else int(settled)
        failed = [f for f in self._failures if f.slots and f.phase in IN_STEP]
        fails = min((f.slots for f in failed if f.slots and f.slots > self._fits), default=None)
        points = [_settled(p, base) for p in (*self._exact.items(), *self._bounds.items())]
        points += [p for f in failed for p in _of_failure(f)]
        return MemoryView(
            points=tuple(points),
            base_bytes=base,
            moments=tuple(self._moments[name] for name in MOMENTS if name in self._moments),
            method=self._latest.method if self._latest else None,
            latest=self._latest,
            failures=tuple(self._failures),
            fits_slots=self._fits or None,
            fails_slots=fails,
        )


def _settled(point: MemoryPoint, base: int | None) -> MemoryPoint:
    """Return a peak as if the step had begun with all that later steps begin with."""
    if point.base_bytes is None or base is None:
        return point
    more = base - point.base_bytes
    high = None if point.high_bytes is None else point.high_bytes + more
    seen = None if point.seen_bytes is None else point.seen_bytes + more
    return MemoryPoint(point.slots, point.low_bytes + more, high, base, seen)


def _of_failure(failure: r.OutOfMemory) -> Iterator[MemoryPoint]:
    """Yield the bound that a failure is: its micro-batch needed what was there and what could not be had."""
    if failure.slots and failure.allocated_bytes is not None:
        yield MemoryPoint(failure.slots, failure.allocated_bytes + (failure.requested_bytes or 0), None)
