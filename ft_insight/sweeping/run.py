"""``sweep``: the largest batch, and how long a step takes at a handful of sizes up to it, in one log."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from ft_insight import records as r
from ft_insight import units
from ft_insight.callbacks.memory_watch import FIRST_LOOK
from ft_insight.callbacks.oom import is_out_of_memory
from ft_insight.callbacks.session import Study
from ft_insight.sweeping.progress import Progress
from ft_insight.sweeping.question import SweepError, check_question
from ft_insight.sweeping.result import SweepResult
from ft_insight.sweeping.rows import LongestRows, longest_rows
from ft_insight.sweeping.search import Cap, Found, Trial, find_largest, sizes_to_measure
from ft_insight.sweeping.study import StudyCallback, job_of, observed, price_of
from ft_insight.sweeping.trials import Bench, Endless, check_trainer

Blocks = tuple[tuple[int, int], ...]
"""(batch size, optimizer steps at it), in the order in which they are done."""


def sweep(
    make_trainer: Callable[..., Any],
    batch_sizes: str | Iterable[int] = "auto",
    steps: int = 8,
    *,
    max_batch: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Find the largest batch that a trainer can be given, measure a handful of sizes up to it, and put all back.

    The largest batch is found on the longest rows of the training set, by doubling and bisection until memory ends,
    so that no epoch fails in its middle; on a CPU also where larger batches are no faster. What is then measured is
    typical rows, as the trainer draws them: ``steps`` micro-batches or more at each size, half of them on the way up
    and half on the way down, so that a machine that slows down tilts no curve. Nothing is saved, evaluated or
    reported in it, and callbacks hear nothing of it. Afterwards weights, random numbers, arguments, callbacks and
    state are what they were: the trainer may then train as if nothing had been.

    The log is one run at the trainer's own batch size, where it fits, with a curve fitted over all sizes:
    ``ft-insight project`` reads it.

    Args:
        make_trainer: Returns a ``Trainer`` or ``SFTTrainer``; called once, with the smallest size to be measured if
            it takes an argument. Sizes are set by ``per_device_train_batch_size`` on its arguments.
        batch_sizes: The sizes to measure, or ``"auto"``.
        steps: Micro-batches of each size to measure, at the least; whole optimizer steps are done.
        max_batch: The largest size that is of interest to ``"auto"``.
        path: Where the log goes, as ``path`` of :class:`~ft_insight.FtInsightCallback`.

    Raises:
        ValueError: With one line, for sizes or steps that are no whole numbers of 1 or more, a trainer of several
            processes, or where not even one row fits. What training itself raises goes on its way.
    """
    sizes = check_question(batch_sizes, steps, max_batch)
    if not callable(make_trainer):
        raise SweepError(f"make_trainer must be a function that returns a trainer, not {type(make_trainer).__name__}")
    sized = _takes_batch(make_trainer)
    trainer = make_trainer(sizes[0] if sizes else 1) if sized else make_trainer()
    check_trainer(trainer)
    return sweep_trainer(trainer, trainer.train, sizes, steps, max_batch=max_batch, path=path, working=not sized)


def sweep_trainer(
    trainer: Any,
    train: Callable[[], Any],
    sizes: tuple[int, ...] | None,
    steps: int,
    *,
    max_batch: int | None = None,
    path: str | os.PathLike[str] | None = None,
    working: bool = True,
) -> SweepResult:
    """Sweep a trainer that is there. ``working`` says that the batch size it is set to is the job's own."""
    with Bench(trainer, train) as bench, Progress() as progress:
        progress.now("looking for the longest rows")
        rows = longest_rows(trainer.train_dataset)
        if not rows.order:
            raise SweepError("the training set has no rows")
        own = bench.working_batch if working else None
        found = _search(bench, rows, sizes, max_batch, progress)
        if not found.largest:
            what = f"a row of {rows.longest:,} tokens" if rows.longest else "one row"
            raise SweepError(f"not even {what} fits into memory (the longest of {rows.basis})")
        progress.say(f"largest batch {found.largest:,} on the longest rows of {rows.basis}: {found.reason}")
        measured = sizes_to_measure(found.largest, own) if sizes is None else _fitting(sizes, found)
        usual = own if own in measured else measured[-1]
        blocks = plan(measured, usual, steps, trainer.args.gradient_accumulation_steps)
        tried = tuple(_record(t) for t in found.trials)
        callback = StudyCallback(
            path, Study("sweep", job_of(bench, usual), tried), price=price_of(trainer), layers_every=0
        )
        try:
            log = observed(bench, callback, sum(s for _, s in blocks), progress, prepare=_feed(bench, blocks, usual))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise SweepError(f"out of memory on typical rows: sweep with batch sizes below {found.largest:,}") from None
    reason = found.reason
    if own is not None and own > found.largest and found.by_memory:
        reason += f"; the trainer is set to {own:,}, which fails when its longest rows meet"
    return SweepResult(log, found.largest, reason, rows.longest, rows.basis, found.trials)


def _takes_batch(make_trainer: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(make_trainer).parameters.values()
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _search(
    bench: Bench, rows: LongestRows, sizes: tuple[int, ...] | None, max_batch: int | None, progress: Progress
) -> Found:
    longest = f" of up to {rows.longest:,} tokens" if rows.longest else ""

    def attempt(batch: int) -> Trial:
        progress.now(f"trying batch {batch:,}")
        trial = bench.attempt(rows, batch)
        progress.say(f"batch {batch:,}{longest}: {_outcome(trial)}")
        return trial

    if sizes is None:
        return find_largest(attempt, _cap(rows, max_batch), until_memory=bench.on_cuda)
    if rows.count is not None and sizes[-1] > rows.count:
        raise SweepError(f"there is no batch of {sizes[-1]:,}: the training set has {rows.count:,} rows")
    trials: list[Trial] = []
    for size in sizes:
        trials.append(attempt(size))
        if not trials[-1].fits:
            break
    largest = max((t.batch for t in trials if t.fits), default=0)
    failed = not trials[-1].fits
    reason = f"batch {trials[-1].batch:,} runs out of memory" if failed else "larger ones were not asked for"
    return Found(largest, reason, tuple(trials), by_memory=failed)


def _outcome(trial: Trial) -> str:
    if not trial.fits:
        return "out of memory"
    memory = f", {units.size(trial.peak_bytes)}" if trial.peak_bytes is not None else ""
    return f"fits, {units.duration(trial.step_s)} a step{memory}"


def _cap(rows: LongestRows, max_batch: int | None) -> Cap | None:
    if max_batch is not None and (rows.count is None or max_batch <= rows.count):
        return Cap(max_batch, "larger ones were not asked for")
    return None if rows.count is None else Cap(rows.count, "the training set has no more rows")


def _fitting(sizes: tuple[int, ...], found: Found) -> tuple[int, ...]:
    return tuple(size for size in sizes if size <= found.largest)


def plan(sizes: tuple[int, ...], usual: int, micro_batches: int, accumulation: int) -> Blocks:
    """Return what is done at which size: steps to warm up, then all sizes upwards, then all of them downwards."""
    each = -(-micro_batches // accumulation)
    up = [(size, -(-each // 2)) for size in sizes]
    down = [(size, each // 2) for size in reversed(sizes)]
    return ((usual, FIRST_LOOK), *up, *(block for block in down if block[1]))


def _feed(bench: Bench, blocks: Blocks, usual: int) -> Callable[[], None]:
    """Have the trainer's own loader feed blocks of different sizes, one after the other."""

    def prepare() -> None:
        trainer = bench.trainer
        loader = trainer.get_train_dataloader
        bench.set_batch(usual)
        trainer.get_train_dataloader = lambda: _Fed(bench, loader, blocks)

    return prepare


class _Fed:
    """Batches of the sizes that a plan says. It has no length, so that ``max_steps`` alone rules."""

    def __init__(self, bench: Bench, loader: Callable[[], Iterable[Any]], blocks: Blocks) -> None:
        self._bench = bench
        self._loader = loader
        self._blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        accumulation = self._bench.trainer.args.gradient_accumulation_steps
        for epoch, (batch, steps) in enumerate(self._blocks):
            self._bench.set_batch(batch)
            loader = partial(self._bench.loader, self._loader, batch)
            yield from islice(Endless(loader, epoch=epoch), steps * accumulation)


def _record(trial: Trial) -> r.Tried:
    return r.Tried(
        t_s=0.0,
        batch=trial.batch,
        fits=trial.fits,
        slots=trial.slots,
        step_s=trial.step_s,
        peak_allocated_bytes=trial.peak_bytes,
        allocated_bytes=trial.kept_bytes,
    )
