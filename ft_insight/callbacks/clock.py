"""Host and device time: what the clock says now, and events whose distance is read later.

On a GPU the host runs ahead of the device, so a phase is the distance between two events on the device's own
timeline. Events are recorded where the host passes and resolved once the device has, which ``ready`` asks without
ever waiting.
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol, cast

import torch

MAX_EVENTS = 8192


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used here."""

    def record(self) -> None:
        """Mark this place on the current stream."""

    def query(self) -> bool:
        """Tell whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def elapsed_time(self, other: Event) -> float:
        """Return the distance to a later event, in milliseconds."""


class HostClock:
    """Time where host and device are one: marks are plain times."""

    name = "host"

    def now(self) -> float:
        """Return monotonic seconds."""
        return perf_counter()

    def event(self) -> Event | None:
        """Return an event recorded now, or None where the host's clock tells it all."""
        return None

    def recycle(self, events: list[Event | None]) -> None:
        """Take back events that nobody needs any more."""

    def wait(self) -> None:
        """Wait for the device; only ever at the end of training."""


class CudaClock(HostClock):
    """Time on a CUDA device; events come from a pool, for creating them is not free."""

    name = "cuda"

    def __init__(self) -> None:
        self._pool: list[Event] = []
        self._made = 0

    def event(self) -> Event | None:
        """Record an event on the current stream; None if none is left, and the host's clock tells the step."""
        if self._pool:
            event = self._pool.pop()
        elif self._made < MAX_EVENTS:
            event = cast("Event", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._made += 1
        else:
            return None
        event.record()
        return event

    def recycle(self, events: list[Event | None]) -> None:
        """Take back events that nobody needs any more."""
        self._pool.extend(e for e in events if e is not None)

    def wait(self) -> None:
        """Wait for the device; only ever at the end of training."""
        torch.cuda.synchronize()


class Counts:
    """Small integer tensors on their way to the host, without a synchronisation.

    On a GPU they are copied into pinned memory behind the work that computes them, so that they are there when an
    event recorded later has passed. Elsewhere they are there at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._host = host
        else:
            self._host = tensor.clone()

    def values(self) -> list[int]:
        """Return the integers; only once an event recorded after this was made has passed."""
        result: list[int] = self._host.tolist()
        return result

    def table(self) -> list[list[int]]:
        """Return the integers of a 2-D tensor, as :meth:`values` does."""
        result: list[list[int]] = self._host.tolist()
        return result
