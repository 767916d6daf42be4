"""``probe``: a few steps of a job on the machine that it is to run on, to scale projections from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_insight.callbacks.oom import is_out_of_memory
from ft_insight.callbacks.session import Study
from ft_insight.estimate import measure
from ft_insight.reader import read_run
from ft_insight.summary import summary_lines
from ft_insight.sweeping.progress import Progress
from ft_insight.sweeping.question import SweepError
from ft_insight.sweeping.study import StudyCallback, job_of, observed, price_of
from ft_insight.sweeping.trials import Bench
from ft_insight.words import clean

STEPS = 20


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Where a probe's log is."""

    path: Path

    def text(self) -> str:
        """Tell what was measured, and what to ask next."""
        view, _ = read_run(self.path)
        where = clean(os.path.relpath(self.path), 1000)
        here = measure(view).here
        following = (
            f"ft-insight project RUN --gpu {here.name} --probe {where}, RUN being the log of a run or sweep elsewhere"
            if here is not None
            else f"nothing is scaled by {where}: {clean(view.device)} is no GPU of the catalogue"
        )
        return "\n".join([*summary_lines(view), f"  {'next':<16}{following}"])


def probe_trainer(trainer: Any, train: Callable[[], Any]) -> ProbeResult:
    """Do ``STEPS`` optimizer steps at the trainer's own batch, recorded as a probe, and put the trainer back.

    Nothing is saved, evaluated or reported. Raises :class:`SweepError` where the batch does not fit.
    """
    with Bench(trainer, train) as bench, Progress() as progress:
        batch = bench.working_batch
        callback = StudyCallback(None, Study("probe", job_of(bench, batch)), price=price_of(trainer))
        try:
            return ProbeResult(observed(bench, callback, STEPS, progress))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise SweepError(
                f"batch {batch:,} does not fit into this machine's memory: lower per_device_train_batch_size"
            ) from None
