"""How well a sweep's curve tells a batch size that it did not measure.

    python benchmarks/sweep.py [--measured 1 2 4 8] [--asked 3 6] [--rounds 6]

Each round sweeps the demo's tiny Mixtral (LoRA, checkpointing) at some sizes, as a user would, and trains every size
for itself with a trainer of its own, in random order; every other round the sweep comes last, so that a machine that
slows down favours neither. Compared are a round's micro-batches with what the curve of its own sweep says at their
slots: per round the median error of each size, and over the rounds the median of these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback

from ft_insight import FtInsightCallback, RunState, sweep
from ft_insight.demo.rows import generate_rows
from ft_insight.demo.train import make_trainer
from ft_insight.estimate import measure
from ft_insight.estimate.step_time import StepTime
from ft_insight.runlog import read_records

STEPS = 9
"""Of a round at one size; the first warms up."""


def trainer_at(batch: int, folder: Path, log: Path | None) -> Any:
    """Build the demo's trainer as its user would, at one batch size."""
    callbacks = [] if log is None else [FtInsightCallback(log, layers_every=0)]
    trainer = make_trainer(
        generate_rows(400), folder, callbacks=callbacks, steps=STEPS if log else None, batch=batch, seed=batch
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def curve_of(log: Path) -> StepTime:
    """Fit a log."""
    _, stream = read_records(log)
    model = measure(RunState().replay(stream)).step_time
    assert isinstance(model, StepTime), model
    return model


def micro_batches(log: Path) -> list[tuple[int, float]]:
    """Return slots and seconds of the micro-batches of a run, the first step's left out."""
    _, stream = read_records(log)
    view = RunState().replay(stream)
    return [(m.slots or 0, m.compute_s or 0.0) for m in view.micro]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--asked", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="of the sweep, at each size")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    sizes = [*arguments.measured, *arguments.asked]
    seen: dict[int, list[Round]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            random.Random(number).shuffle(sizes)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                parts = [lambda at: train_each(sizes, at), lambda at: swept(arguments, at)]
                for part in parts if number % 2 else reversed(parts):
                    part(folder)
            curve = curve_of(folder / "sweep.jsonl")
            for batch in sizes:
                seen[batch].append(compared(curve, micro_batches(folder / f"{batch}.jsonl")))
            print(f"round {number + 1}: " + "  ".join(f"batch {b} {seen[b][-1].error:+.1%}" for b in sorted(seen)))
    report(seen, set(arguments.asked))


@dataclass
class Round:
    """One size in one round; medians over its micro-batches."""

    slots: float
    measured_s: float
    error: float


def compared(curve: StepTime, done: list[tuple[int, float]]) -> Round:
    """Compare each micro-batch with the curve at its own slots."""
    median = statistics.median
    return Round(
        median(s for s, _ in done), median(t for _, t in done), median(curve.predict(s)[0] / t for s, t in done) - 1
    )


def train_each(sizes: list[int], folder: Path) -> None:
    for batch in sizes:
        trainer_at(batch, folder, folder / f"{batch}.jsonl").train()


def swept(arguments: argparse.Namespace, folder: Path) -> None:
    sweep(lambda: trainer_at(4, folder, None), arguments.measured, arguments.steps, path=folder / "sweep.jsonl")


def report(seen: dict[int, list[Round]], asked: set[int]) -> None:
    print(f"\n{'batch':>6} {'slots':>6} {'measured':>11} {'curve: median error':>20} {'of rounds':>18}")
    for batch, rounds in sorted(seen.items()):
        errors = sorted(x.error for x in rounds)
        slots, seconds = (
            statistics.median(values) for values in zip(*((x.slots, x.measured_s) for x in rounds), strict=True)
        )
        mark = "  not in the sweep" if batch in asked else ""
        spread = f"{errors[0]:+.1%} to {errors[-1]:+.1%}"
        print(
            f"{batch:>6} {slots:>6.0f} {seconds * 1e3:>8.0f} ms {statistics.median(errors):>+20.1%} {spread:>18}{mark}"
        )


if __name__ == "__main__":
    main()
