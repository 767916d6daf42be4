"""Reading one run: all ranks' logs followed together, one view, and whether the run is still alive."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ft_insight.ranks import combine
from ft_insight.run import RunState
from ft_insight.run_view import RunView
from ft_insight.runlog import SILENT_S, Follower, RunLogError, rank_files, writer_is_gone
from ft_insight.units import duration


class Status(msgspec.Struct, frozen=True):
    """How a run stands: ``kind`` for programs, ``text`` for people."""

    kind: str
    """``waiting``, ``live``, ``silent``, ``completed``, ``failed``, ``interrupted`` or ``stopped``."""
    text: str

    @property
    def over(self) -> bool:
        """Nothing more is to be expected of the log."""
        return self.kind in ("completed", "failed", "interrupted", "stopped")


class RunReader:
    """Follows the log at ``path`` and those of its sibling ranks, which may appear later.

    ``poll`` raises :class:`~ft_insight.runlog.RunLogError` for what is no run log. ``thinned`` as of
    :class:`~ft_insight.runlog.Follower`.
    """

    def __init__(self, path: Path, *, thinned: bool = False) -> None:
        self.path = path
        self._thinned = thinned
        self._logs: dict[Path, tuple[Follower, RunState]] = {}

    def poll(self) -> bool:
        """Read a few megabytes of what is new; True if anything was, and so there may be more at once."""
        news = [self._poll_one(file) for file in rank_files(self.path)]
        return any(news)  # of a list: every rank is to be read, not only up to the first with news

    def _poll_one(self, file: Path) -> bool:
        if file not in self._logs:
            self._logs[file] = (Follower(file, thinned=self._thinned), RunState())
        follower, state = self._logs[file]
        poll = follower.poll()
        if poll.restarted:
            state = RunState()
            self._logs[file] = (follower, state)
        for record in poll.records:
            state.fold(record)
        return poll.news or poll.restarted or poll.more

    def view(self) -> RunView:
        """Return what is known now, all ranks merged."""
        views = [
            msgspec.structs.replace(state.view(), unknown_lines=follower.unknown, malformed_lines=follower.malformed)
            for follower, state in self._logs.values()
        ]
        known = [(v.header, v) for v in views if v.header is not None]
        if not known:
            return RunView()
        known.sort(key=lambda pair: pair[0].rank)
        lead = known[0][0]
        # what a bigger run of the same name left behind is no rank of this one
        return combine(
            [v for h, v in known if h.run_id == lead.run_id and h.rank < max(1, lead.world_size)] or [known[0][1]]
        )

    def status(self, view: RunView) -> Status:
        """Say how the run stands, from its last record and from whether its process is there."""
        if view.header is None:
            return Status("waiting", f"waiting for {self.path}")
        if view.end is not None and view.end.status != "retried":
            reason = f": {view.end.reason}" if view.end.reason else ""
            return Status(view.end.status, f"{view.end.status}{reason}")
        modified_at = self._logs[self.path][0].modified_at if self.path in self._logs else None
        gone = writer_is_gone(view.header, modified_at)
        if gone:
            return Status("stopped", f"stopped without an end record, after step {view.step}")
        if gone is None and modified_at is not None:
            age = time.time() - modified_at
            if age > SILENT_S:
                return Status("silent", f"no end record, and silent for {duration(age)}, after step {view.step}")
        return Status("live", "live")


def read_run(path: Path, *, thinned: bool = False) -> tuple[RunView, Status]:
    """Read all that a run's logs hold now; ``thinned``: but not every sample of its GPUs.

    Raises :class:`~ft_insight.runlog.RunLogError` if that is nothing.
    """
    reader = RunReader(path, thinned=thinned)
    if not path.exists():
        raise RunLogError(f"{path} does not exist")
    while reader.poll():
        pass
    view = reader.view()
    if view.header is None:
        raise RunLogError(f"{path} holds no record yet: the run has not begun, or the file is empty")
    return view, reader.status(view)
