"""Observed steps that are done to measure: FtInsightCallback, told that this is no training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerState

from ft_insight import records as r
from ft_insight.callbacks import FtInsightCallback
from ft_insight.callbacks.facts import attempt, train_facts
from ft_insight.callbacks.session import Study
from ft_insight.sweeping.progress import Progress
from ft_insight.sweeping.question import SweepError
from ft_insight.sweeping.trials import Bench


class StudyCallback(FtInsightCallback):
    """Writes the log of a study, with no summary at its end; ``path`` is where, once it has begun."""

    def __init__(self, path: str | os.PathLike[str] | None, study: Study, **options: Any) -> None:
        super().__init__(path, **options)
        self._options = dataclasses.replace(self._options, study=study)
        self.path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take up observation."""
        super().on_train_begin(args, state, control, model=model, **kwargs)
        session = self._session
        self.path = session.place.path if session is not None and session.place is not None else None

    def leave(self, error: BaseException) -> None:
        """Close the log, whose session does not hear of what is raised between the calls that it watches."""
        session, self._session = self._session, None
        if session is not None:
            session.guard.run("end", session.abort, error)


class _Ticks(TrainerCallback):  # type: ignore[misc]
    def __init__(self, progress: Progress, trainer: Any) -> None:
        self._progress = progress
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.tick(f"measuring batch {self._trainer._train_batch_size:,}")


def job_of(bench: Bench, batch: int) -> r.TrainFacts:
    """Return what the trainer is set to do, at a batch size; to be asked before a study changes its settings."""
    trainer, args = bench.trainer, bench.trainer.args

    def facts() -> r.TrainFacts:
        bench.set_batch(batch)
        state = TrainerState(train_batch_size=trainer._train_batch_size)
        planned = attempt(lambda: trainer.set_initial_training_values(args, trainer.get_train_dataloader()))
        if planned is not None:
            state.max_steps, state.num_train_epochs = planned[-1], planned[0]
            state.compute_steps(args, planned[-1])
        return train_facts(trainer, args, state, trainer.model)

    return bench.asked(facts)


def price_of(trainer: Any) -> float | None:
    """Return the price per hour that the user has told a callback of ours in this trainer."""
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, FtInsightCallback)]
    return next((c._options.price for c in ours if c._options.price is not None), None)


def observed(bench: Bench, callback: StudyCallback, steps: int, progress: Progress, **run: Any) -> Path:
    """Run the steps of a study; return its log, which has a last line however the steps ended."""
    progress.begin(steps)
    try:
        bench.run(steps, [callback, _Ticks(progress, bench.trainer)], **run)
    except BaseException as error:
        callback.leave(error)
        raise
    if callback.path is None:
        raise SweepError("the log could not be begun; the warning above says why")
    return callback.path
