"""Calls into a driver, on a thread that is left behind when one of them hangs.

Python cannot end a call into a C library. So the calls of a moment are made in a row on a thread of their own, and
somebody else looks at the time: where one takes too long, its thread is left to it and the rest are made on a new
one. A call that returns after all is told so, its answer thrown away, and its thread ends.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

LIMIT_S = 0.25
"""How long a call may take: PCIe traffic, the slowest of them, is measured over twice 20 ms."""


class Call(Protocol):
    """Something to ask of a driver."""

    def __call__(self) -> Any:
        """Return the answer, or raise."""

    def left(self) -> None:
        """It takes too long, and is left behind."""

    def late(self) -> None:
        """It was left behind, and has returned now."""


class Missing(Enum):
    """What stands for an answer that is none."""

    HUNG = "the call took too long"
    SKIPPED = "it was not made"


class Round:
    """Some calls in a row, and how far they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.done = threading.Event()
        self.answers: list[Any] = []
        """What the calls returned or raised, in their order, as far as they got."""
        self._calls = calls
        self._lock = threading.Lock()
        self._since = monotonic()
        self._left_behind = False

    def work(self) -> bool:
        """Make the calls; False if one was left behind, and nobody waits for the rest."""
        for call in self._calls:
            with self._lock:
                self._since = monotonic()
            try:
                answer = call()
            except Exception as error:  # noqa: BLE001 - whatever a driver does is an answer
                answer = error
            with self._lock:
                if self._left_behind:
                    call.late()
                    return False
                self.answers.append(answer)
        self.done.set()
        return True

    def leave_if_older(self, limit_s: float) -> bool:
        """Leave the call behind that runs now, if it has for longer than ``limit_s``."""
        with self._lock:
            finished = len(self.answers) == len(self._calls)
            self._left_behind = not finished and monotonic() - self._since >= limit_s
            if self._left_behind:
                self._calls[len(self.answers)].left()
            return self._left_behind


class DriverThread:
    """The thread that calls, replaced when it is left behind. Only ever used by one thread."""

    limit_s = LIMIT_S

    def __init__(self) -> None:
        self._queue: SimpleQueue[Round | None] | None = None

    def begin(self, calls: Sequence[Call]) -> Round:
        """Have calls made, and return at once."""
        if self._queue is None:
            self._queue = SimpleQueue()
            # a daemon: an interpreter does not wait for it, whatever it hangs in
            threading.Thread(target=_serve, args=(self._queue,), name="ft-insight-driver", daemon=True).start()
        begun = Round(calls)
        self._queue.put(begun)
        return begun

    def run(self, calls: Sequence[Call], stop: threading.Event, most_hung: int = 1) -> list[Any]:
        """Have calls made and return all answers, ``Missing.HUNG`` for one that took longer than ``limit_s``.

        After ``most_hung`` of those, or once ``stop`` is set, the rest are skipped.
        """
        answers: list[Any] = []
        while len(answers) < len(calls):
            if stop.is_set() or answers.count(Missing.HUNG) >= most_hung:
                return answers + [Missing.SKIPPED] * (len(calls) - len(answers))
            begun = self.begin(calls[len(answers) :])
            while not begun.done.wait(min(self.limit_s, 0.05)):
                if begun.leave_if_older(0.0 if stop.is_set() else self.limit_s):
                    self.leave()
                    break
            answers += begun.answers
            if len(answers) < len(calls):
                answers.append(Missing.HUNG)
        return answers

    def leave(self) -> None:
        """Let the thread end, when it can; the next call has a new one."""
        if self._queue is not None:
            self._queue.put(None)
        self._queue = None


def _serve(queue: SimpleQueue[Round | None]) -> None:
    while (begun := queue.get()) is not None:
        if not begun.work():
            return
