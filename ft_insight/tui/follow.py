"""Following a run for the dashboard: a loop for a worker thread that hands over immutable snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ft_insight.reader import RunReader, Status
from ft_insight.run_view import RunView
from ft_insight.runlog import RunLogError

INTERVAL_S = 0.25
"""Snapshots are at least this far apart: more often than four times a second nobody reads them."""
STATUS_S = 1.0
"""A log without news is still asked this often whether its writer is alive."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of a run at one moment."""

    view: RunView
    status: Status
    origin_s: float
    """Monotonic time at which ``elapsed_s`` would have been 0: the run's clock goes on from there."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The log cannot be read; the message is one line that says why."""

    message: str


def follow(path: Path, post: Callable[[Snapshot | Unreadable], object], stop: threading.Event) -> None:
    """Read the log at ``path`` as it grows and post what is new, until ``stop`` is set or it is no log."""
    try:
        _Loop(path, post, stop).run()
    except RunLogError as error:
        post(Unreadable(str(error)))
    except OSError as error:
        post(Unreadable(f"{path} cannot be read: {error.strerror or error}"))


class _Loop:
    def __init__(self, path: Path, post: Callable[[Snapshot | Unreadable], object], stop: threading.Event) -> None:
        self._reader = RunReader(path)
        self._post = post
        self._stop = stop
        self._looked_at = 0.0
        self._last: Snapshot | None = None

    def run(self) -> None:
        while not self._stop.is_set():
            if self._read() or self._last is None:
                view = self._reader.view()
                self._hand_over(view, self._reader.status(view))
            elif time.monotonic() - self._looked_at >= STATUS_S:
                self._hand_over(self._last.view, self._reader.status(self._last.view))
            self._stop.wait(INTERVAL_S)

    def _read(self) -> bool:
        """Read all there is; a long log is shown in passing, so that the screen does not stay empty."""
        news = False
        shown_at = time.monotonic()
        while not self._stop.is_set() and self._reader.poll():
            news = True
            if time.monotonic() - shown_at > 2 * INTERVAL_S:
                self._hand_over(self._reader.view(), Status("reading", "reading the log"))
                shown_at = self._looked_at
        return news

    def _hand_over(self, view: RunView, status: Status) -> None:
        self._looked_at = time.monotonic()
        origin = self._looked_at - view.elapsed_s
        last = self._last
        if last is not None and last.view.segments == view.segments and last.view.header == view.header:
            origin = min(origin, last.origin_s)
        self._last = Snapshot(view, status, origin)
        if last is None or view is not last.view or status != last.status:
            self._post(self._last)
