"""One GPU and what can be read of it: each reading on its own, given up on its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ft_insight.callbacks.gpu_calls import LIMIT_S, DriverThread, Missing
from ft_insight.records import GpuSample

Values = dict[str, Any]
MOST_STUCK = 3
"""Calls of one GPU that may hang at a time: it is left in peace until one of them returns."""
MOST_HANGS = 3
MOST_FAILURES = 5
NO_ANSWER = f"the driver did not answer within {LIMIT_S:g} s"


class NotOffered(Exception):  # noqa: N818 - the absence of a figure, not an error
    """This GPU, its driver or this user's rights do not give the figure: it is asked for no more."""


class NotNow(Exception):  # noqa: N818 - as above
    """There is no figure at the moment, for a reason that is no fault."""


class GpuLost(Exception):  # noqa: N818 - as above
    """The driver has lost the GPU."""


class Partly(Values):
    """An answer that lacks some of its fields, with the reasons by field."""

    def __init__(self, values: Values, reasons: dict[str, str]) -> None:
        super().__init__(values)
        self.reasons = reasons


class Reading:
    """Something to be read at each moment. ``read`` may raise, and may hang."""

    def __init__(self, name: str, fields: Sequence[str], read: Callable[[], Values]) -> None:
        self.name = name
        """For people."""
        self.fields = tuple(fields)
        self.stuck = False
        self.hangs = 0
        self.failures = 0
        self._read = read

    def __call__(self) -> Values:
        """Return values of ``GpuSample``'s fields."""
        return self._read()

    def left(self) -> None:
        """A call hangs."""
        self.stuck = True

    def late(self) -> None:
        """It has returned after all."""
        self.stuck = False


class Backend(Protocol):
    """What knows GPUs of one maker."""

    def open(self) -> tuple[list[Card], list[str]]:
        """Return the GPUs of this process and what is to be told; raises where there is nothing to be had."""

    def close(self) -> None:
        """Undo it."""


class Card:
    """A GPU by what can be read of it."""

    def __init__(self, uuid: str, readings: Sequence[Reading]) -> None:
        self.uuid = uuid
        self.readings = list(readings)
        self.lost = False
        self.news: list[tuple[str, str]] = []
        """Names of readings that ended or hung at the latest sample, each with its reason."""
        self._unknown: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def sample(self, thread: DriverThread, stop: threading.Event) -> tuple[GpuSample, int]:
        """Read all that can be read now; return it, and how many readings are missing for want of an answer."""
        self.news = []
        values: Values = {}
        waiting = [reading for reading in self.readings if not reading.stuck]
        dropped = len(self.readings) - len(waiting)
        answers = thread.run(waiting, stop, MOST_STUCK - dropped)
        for reading, answer in zip(waiting, answers, strict=True):
            dropped += isinstance(answer, Missing)
            self._take(reading, answer, values)
        return GpuSample(uuid=self.uuid, lost=self.lost or None, unknown=self._changes(), **values), dropped

    def _take(self, reading: Reading, answer: Any, values: Values) -> None:
        if isinstance(answer, Missing):
            self._missing(reading, hung=answer is Missing.HUNG)
        elif isinstance(answer, GpuLost):
            self.lost = True
        elif isinstance(answer, NotOffered):
            self._end(reading, str(answer))
        elif isinstance(answer, NotNow):
            self._mark(reading, str(answer))
        elif isinstance(answer, Exception):
            reading.failures += 1
            reason = f"{type(answer).__name__}: {answer}".splitlines()[0]
            self._mark(reading, reason)
            if reading.failures >= MOST_FAILURES:
                self._end(reading, reason)
        else:
            reading.failures = 0
            self._know(reading, answer, values)

    def _missing(self, reading: Reading, *, hung: bool) -> None:
        self._mark(reading, NO_ANSWER)
        reading.hangs += hung
        if hung and reading.hangs >= MOST_HANGS:
            self._end(reading, f"{NO_ANSWER}, {MOST_HANGS} times: it is asked no more")
        elif hung and reading.hangs == 1:
            self.news.append((reading.name, NO_ANSWER))

    def _know(self, reading: Reading, answer: Values, values: Values) -> None:
        values.update(answer)
        reasons = answer.reasons if isinstance(answer, Partly) else {}
        for field in reading.fields:
            if field in reasons:
                self._unknown[field] = reasons[field]
            elif field in answer:
                self._unknown.pop(field, None)

    def _mark(self, reading: Reading, reason: str) -> None:
        self._unknown.update(dict.fromkeys(reading.fields, reason))

    def _end(self, reading: Reading, reason: str) -> None:
        self.readings.remove(reading)
        self._mark(reading, reason)
        self.news.append((reading.name, reason))

    def _changes(self) -> dict[str, str]:
        changed = {f: why for f, why in self._unknown.items() if self._told.get(f) != why}
        changed.update({f: "" for f in self._told if f not in self._unknown})
        self._told = dict(self._unknown)
        return changed
