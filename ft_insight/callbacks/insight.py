"""FtInsightCallback: the one object that a user adds to a trainer."""

from __future__ import annotations

import math
import os
import sys
import warnings
import weakref
from typing import Any

from transformers import TrainerCallback

from ft_insight.callbacks.baseline import AFTER, BEFORE, check_source
from ft_insight.callbacks.guard import FtInsightWarning
from ft_insight.callbacks.kernel_watch import DEFAULT_STEP
from ft_insight.callbacks.session import Options, Session, find_trainer


class FtInsightCallback(TrainerCallback):  # type: ignore[misc]
    """Records where the time, the memory and the tokens of a fine-tune go.

    Example::

        trainer = SFTTrainer(model, train_dataset=rows, callbacks=[FtInsightCallback()])
        trainer.train()

    It writes one log, ``ft_insight_runs/<time>-<model>/run.jsonl``, which ``ft-insight watch`` shows live and
    ``ft-insight report`` and ``ft-insight project`` read:

    ========== ===========================================================================================
    record     what it holds
    ========== ===========================================================================================
    header     model, method, precision, batch, data set, devices, versions
    step       phases in seconds, micro-batches (queries, slots, real and loss tokens), memory
    span       evaluations and saves
    logs       loss, gradient norm, learning rate and all else that the trainer logs
    experts    tokens per expert and layer, of training, of evaluations, and of ``before``
    layers     time per layer and kind of layer, on sampled steps
    kernels    operators and kernels of one step by role, on request
    gpu        what the driver tells of this process's GPUs, and its CPU time, twice a second
    fit        step time against slots, at the end
    projection hours and dollars of the whole job, here and on other GPUs
    tried      of a sweep: batches of the longest rows, and whether they fit
    ========== ===========================================================================================

    Nothing that goes wrong in here reaches the training: it becomes one warning and a notice in the log.

    Args:
        path: File to write to; a folder means a ``run.jsonl`` in it. Default: the environment variable
            ``FT_INSIGHT_LOG``, else a new folder under ``ft_insight_runs/``. An existing file is never
            overwritten: the same run, resumed, is appended; another one gets a new name.
        price: What this machine costs, in US dollars per hour, all its GPUs together.
        layers_every: Time layers on every so many steps: 1 is each step, 0 none. By default as often as a budget of
            half a percent of the run's time allows, by what it has cost so far.

        kernels: Record one step with torch's profiler and tell its kernels by role: True for an early step, a number
            for that step of the run. The step itself takes longer, and counts in no rate.
        trace: Keep that step's chrome trace beside the log.
        before: Rows that the model is shown before the first step and again after the last, to tell what
            fine-tuning did to the load of its experts: a data set, a list of rows, or a ``.json`` or ``.jsonl``
            file, raw or tokenised as the trainer takes them, of which at most 1,000 rows count. It costs two
            forward passes over them in batches of ``per_device_eval_batch_size``; weights, random numbers and
            losses stay what they are without. It is off where ranks hold parts of one another's weights.

    Raises:
        ValueError: If ``price`` is not a number of 0 or more, ``layers_every`` or ``kernels`` not such a whole
            number, or ``before`` neither rows nor such a file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        price: float | None = None,
        layers_every: int | None = None,
        kernels: bool | int = False,
        trace: bool = False,
        before: Any = None,
    ) -> None:
        if price is not None and not (isinstance(price, int | float) and math.isfinite(price) and price >= 0):
            raise ValueError(f"price must be US dollars per hour, 0 or more, not {price!r}")
        if layers_every is not None and not (isinstance(layers_every, int) and layers_every >= 0):
            raise ValueError(f"layers_every must be a whole number of steps, 0 or more, not {layers_every!r}")
        if not isinstance(kernels, int) or kernels < 0:
            raise ValueError(f"kernels must be True, False or the number of a step, not {kernels!r}")
        if before is not None:
            check_source(before)
        at = DEFAULT_STEP if kernels is True else int(kernels)
        self._options = Options(os.fspath(path) if path is not None else None, price, layers_every, at, trace, before)
        self._session: Session | None = None
        self._trainer: weakref.ref[Any] | None = None

    # the events of a Trainer; each does its work behind a guard

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take up observation."""
        session: Session | None = None
        try:
            retried = self._leave_earlier(args, state)
            session = Session(self._options)
            session.begin(args, state, model, retried)
        except Exception as error:  # noqa: BLE001 - a run is worth more than its record
            self._give_up(session, error)
            return
        self._session = session
        trainer = find_trainer()
        self._trainer = weakref.ref(trainer) if trainer is not None else None
        if session.rank == 0 and session.place is not None and session.options.study is None:
            _say([f"ft-insight  recording to {_short(session.place.path)}"])
        session.look(BEFORE)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what the trainer logs."""
        if self._session is not None:
            self._session.guard.run("logs", self._session.logged, state, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the fitted model and the projection, close the log, say the summary."""
        session, self._session = self._session, None
        if session is None:
            return
        session.look(AFTER)
        session.guard.run("end", session.end, "completed")
        if session.rank == 0 and session.options.study is None:
            session.guard.run("summary", _summarise, session)

    def _leave_earlier(self, args: Any, state: Any) -> Any:
        """End a session that nobody ended; return its place if this is a retry of the same run."""
        earlier, self._session = self._session, None
        if earlier is None:
            return None
        trainer = self._trainer() if self._trainer is not None else None
        earlier.guard.run("end", earlier.end, "failed", "training began anew without an end")
        same = trainer is not None and trainer is find_trainer()
        if same and getattr(args, "auto_find_batch_size", False) and state.global_step == 0:
            return earlier.place
        return None

    def _give_up(self, session: Session | None, error: Exception) -> None:
        if session is not None:
            session.guard.run("end", session.end, "failed", "could not begin")
        warnings.warn(
            f"ft-insight records nothing of this run ({type(error).__name__}: {error}); training goes on",
            FtInsightWarning,
            stacklevel=2,
        )


def _summarise(session: Session) -> None:
    from ft_insight.summary import summary_lines

    path = _short(session.place.path) if session.place is not None else None
    _say(summary_lines(session.output.state.view(), path))


def _say(lines: list[str]) -> None:
    sys.stderr.write("\n" + "\n".join(lines) + "\n")
    sys.stderr.flush()


def _short(path: os.PathLike[str]) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else os.fspath(path)
