"""Kernels over a run: one step is recorded by the profiler, and told by role in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ft_insight.callbacks.kernels import KernelTrace, KernelWindow, summarise
from ft_insight.catalog import Gpu
from ft_insight.records import Kernels

DEFAULT_STEP = 6
"""Which step of the run is recorded unless another is asked for: the first ones warm up."""
PATIENCE_S = 60.0
"""How long the end of training may wait for a trace to be told."""


class KernelWatch:
    """Records one step. ``put`` gets the record; what fails in the thread is told to ``failed``."""

    def __init__(
        self,
        window: KernelWindow,
        step: int,
        gpu: Gpu | None,
        put: Callable[[Kernels], None],
        failed: Callable[[str], None],
    ) -> None:
        self._window = window
        self._at = step
        self._gpu = gpu
        self._put = put
        self._failed = failed
        self._seen = 0
        self._thread: threading.Thread | None = None

    def step_begins(self) -> bool:
        """Start recording if this is the step; True while it is recorded."""
        self._seen += 1
        if self._seen == self._at:
            self._window.open()
        return self._window.is_open

    def step_ends(self, step: int, t_s: float) -> bool:
        """Stop recording, and begin to tell what was; True if this step was recorded."""
        trace = self._window.close()
        if trace is None:
            return False
        trace.step, trace.t_s = step, t_s
        self._thread = threading.Thread(target=self._tell, args=(trace,), name="ft-insight-kernels", daemon=True)
        self._thread.start()
        return True

    def _tell(self, trace: KernelTrace) -> None:
        try:
            self._put(summarise(trace, gpu=self._gpu))
        except Exception as error:  # noqa: BLE001 - a thread of ours must not end in a traceback on a user's screen
            self._failed(f"the trace could not be told by role: {type(error).__name__}: {error}".splitlines()[0])

    def let_go(self) -> None:
        """Take everything out of the model, whatever happened. May always be called."""
        self._window.abandon()

    def finish(self) -> None:
        """Wait for the record; a run that ended before its step says so."""
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        elif self._seen < self._at:
            self._failed(f"the run ended before step {self._at}, whose kernels were to be recorded")


def trace_path(log: Path, step: int) -> Path:
    """Return where the chrome trace of a step goes: beside the log."""
    return log.with_name(f"{log.stem}.step{step}.trace.json")
