"""The step ledger: every moment of training belongs to exactly one bucket.

A stack of buckets: time belongs to the innermost one. A step opens at its first request for data and closes when
its gradients are zeroed; what lies between two steps is kept apart. On a device with a clock of its own, the
transitions of a step carry events, and its phases are told once the device has passed the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ft_insight.callbacks.clock import Event, HostClock

MAX_PENDING = 64
"""Steps whose events may be outstanding; beyond that the oldest is told by the host's clock, never waited for."""


@dataclass(slots=True)
class Stretch:
    """A piece of a step that belongs to one bucket, up to ``end``."""

    bucket: str
    micro: int
    host_s: float
    end: Event | None


@dataclass(slots=True)
class ClosedStep:
    """A step that the host has left and the device may still be working on."""

    begin_s: float
    end_s: float
    begin: Event | None
    stretches: list[Stretch]
    before_s: dict[str, float]
    self_s: float = 0.0
    facts: object = None

    @property
    def timed_by_device(self) -> bool:
        """All transitions carry an event."""
        return self.begin is not None and all(s.end is not None for s in self.stretches)

    def ready(self) -> bool:
        """The device has passed the end of this step."""
        return not self.timed_by_device or not self.stretches or bool(self.stretches[-1].end.query())  # type: ignore[union-attr]


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step: by bucket, and by micro-batch for what is computed."""

    phases_s: dict[str, float]
    micro_s: dict[int, float]
    clock: str
    host_s: dict[str, float] = field(default_factory=dict)
    """The same phases by the host's clock: how long it took to ask for the work, or waited."""
    idle_at_most_s: float | None = None
    """Where a device has a clock of its own: how long it can have been without work in this step."""
    micro_begin_s: dict[int, float] = field(default_factory=dict)
    """When each micro-batch began, since the step did, by ``clock``."""
    optimizer_begin_s: float | None = None
    lag_s: float | None = None
    """Where a device has a clock of its own: how far it was behind the host when the step began."""
    confirmed: bool = True
    """The device has passed this step, so that what it counted on the way has arrived."""


@dataclass
class _Open:
    begin_s: float
    begin: Event | None
    before_s: dict[str, float]
    stretches: list[Stretch] = field(default_factory=list)
    micro: int = -1


COMPUTE = ("forward", "loss", "recompute", "backward")


class Ledger:
    """Keeps the time of one training run; ``on_step`` gets each closed step once its times can be told."""

    def __init__(self, clock: HostClock, on_step: Callable[[ClosedStep, StepTimes], None]) -> None:
        self.clock = clock
        self._on_step = on_step
        self._stack = ["startup"]
        self._last_s = clock.now()
        self._between: dict[str, float] = {}
        self._step: _Open | None = None
        self._pending: deque[ClosedStep] = deque()

    @property
    def in_step(self) -> bool:
        """Between a step's first request for data and its end."""
        return self._step is not None

    @property
    def bucket(self) -> str:
        """The innermost bucket that is open."""
        return self._stack[-1]

    @property
    def depth(self) -> int:
        """How many buckets are open, for :meth:`unwind`."""
        return len(self._stack)

    def _settle(self) -> float:
        """Charge the time since the last transition to the innermost bucket."""
        now = self.clock.now()
        bucket = self._stack[-1]
        if self._step is None:
            self._between[bucket] = self._between.get(bucket, 0.0) + now - self._last_s
        else:
            self._step.stretches.append(Stretch(bucket, self._step.micro, now - self._last_s, self.clock.event()))
        self._last_s = now
        return now

    def enter(self, bucket: str) -> None:
        """Time belongs to ``bucket`` until :meth:`leave`, but for what is entered within."""
        self._settle()
        self._stack.append(bucket)

    def leave(self) -> float:
        """Close the innermost bucket; return when."""
        now = self._settle()
        if len(self._stack) > 1:
            self._stack.pop()
        return now

    def switch(self, bucket: str) -> None:
        """Rename the innermost bucket from now on."""
        if self._stack[-1] != bucket:
            self._settle()
            self._stack[-1] = bucket

    def unwind(self, depth: int) -> None:
        """Close all buckets opened beyond ``depth``: an exception may have skipped their ends."""
        while len(self._stack) > max(depth, 1):
            self.leave()

    def take_outside(self, kind: str) -> float:
        """Remove and return the seconds of a kind that gets a record of its own."""
        return self._between.pop(kind, 0.0)

    def open_step(self) -> None:
        """A new step begins; one that was begun and never ended is counted as time between steps."""
        if self._step is not None:
            self.drop_step()
        self._settle()
        before = self._between
        self._between = {}
        self._stack = ["other"]
        self._step = _Open(self._last_s, self.clock.event(), before)

    def begin_micro(self, index: int) -> None:
        """What is computed from now on belongs to this micro-batch."""
        if self._step is not None:
            self._settle()
            self._step.micro = index

    def close_step(self, self_s: float, facts: object) -> None:
        """The step has ended; ``facts`` comes back with its times."""
        if self._step is None:
            return
        end = self._settle()
        step = self._step
        self._step = None
        self._stack = ["between"]
        self._pending.append(ClosedStep(step.begin_s, end, step.begin, step.stretches, step.before_s, self_s, facts))
        self.resolve()

    def drop_step(self) -> None:
        """The step came to nothing: no data was left, or training stopped inside it."""
        if self._step is None:
            return
        self._settle()
        step, self._step = self._step, None
        self._stack = ["between"]
        self._between = step.before_s
        lost = sum(s.host_s for s in step.stretches)
        self._between["between"] = self._between.get("between", 0.0) + lost
        self.clock.recycle([step.begin, *(s.end for s in step.stretches)])

    def resolve(self, *, wait: bool = False) -> None:
        """Tell all steps that the device has passed; with ``wait``, at the end of training, all of them."""
        while self._pending:
            step = self._pending[0]
            overdue = len(self._pending) > MAX_PENDING
            if wait and step.timed_by_device and step.stretches:
                step.stretches[-1].end.synchronize()  # type: ignore[union-attr]
            if not step.ready() and not overdue:
                return
            self._pending.popleft()
            ready = step.ready()
            times = _times(step, self.clock.name if ready else "host")
            times.confirmed = ready and (step.timed_by_device or self.clock.name == "host")
            self.clock.recycle([step.begin, *(s.end for s in step.stretches)])
            self._on_step(step, times)

    def remaining(self) -> dict[str, float]:
        """Seconds since the last step, by kind, up to now."""
        self._settle()
        between, self._between = self._between, {}
        return between


def _times(step: ClosedStep, clock: str) -> StepTimes:
    clock = clock if step.timed_by_device else "host"
    phases: dict[str, float] = {}
    host: dict[str, float] = {}
    micro: dict[int, float] = {}
    begins: dict[int, float] = {}
    passed_s, optimizer_s = 0.0, None
    host_s = [s.host_s for s in step.stretches]
    device_s = _device_seconds(step) if clock != "host" else None
    for stretch, seconds in zip(step.stretches, device_s or host_s, strict=True):
        host[stretch.bucket] = host.get(stretch.bucket, 0.0) + stretch.host_s
        phases[stretch.bucket] = phases.get(stretch.bucket, 0.0) + seconds
        if stretch.bucket in COMPUTE and stretch.micro >= 0:
            micro[stretch.micro] = micro.get(stretch.micro, 0.0) + seconds
            begins.setdefault(stretch.micro, passed_s)
        elif stretch.bucket in ("clip", "optimizer") and optimizer_s is None:
            optimizer_s = passed_s
        passed_s += seconds
    times = StepTimes(phases, micro, clock, host, micro_begin_s=begins, optimizer_begin_s=optimizer_s)
    if device_s is not None:
        times.lag_s = least_lag(host_s, device_s)
        times.idle_at_most_s = idle_at_most(host_s, device_s)
    return times


def _device_seconds(step: ClosedStep) -> list[float]:
    before = step.begin
    seconds = []
    for stretch in step.stretches:
        seconds.append(before.elapsed_time(stretch.end) / 1e3)  # type: ignore[union-attr, arg-type]
        before = stretch.end
    return seconds


def least_lag(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """Return the least seconds that a device can have been behind the host when these stretches began.

    It is never ahead; a trainer waits for its device at least once in each step, where the lag is nothing, and so
    the least is what it was.
    """
    ahead = list(accumulate(h - d for h, d in zip(host_s, device_s, strict=True)))
    return max(0.0, *ahead) if ahead else 0.0


def idle_at_most(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """Bound from above how long a device had nothing to do, from the same stretches on both timelines.

    A device is behind the host by a lag: it passes each mark later than the host set it. Within a stretch it can
    idle only from when it has done all that was asked before the stretch, which is the lag after the stretch began,
    until the host has asked for the last of it, when the stretch ends. The least lag that the distances allow is
    taken. No synchronisation of our own is needed.
    """
    lag = least_lag(host_s, device_s)
    idle = 0.0
    for host, device in zip(host_s, device_s, strict=True):
        idle += min(max(0.0, host - lag), device)
        lag += device - host
    return idle
