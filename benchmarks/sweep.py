"""How well a sweep's curve tells a batch size that it did not measure.

    python benchmarks/sweep.py [--measured 1 2 4 8] [--asked 3 6] [--rounds 8]

Each round sweeps the demo's tiny Mixtral (LoRA, checkpointing) once, over all sizes: upwards and then downwards, so
that a machine that slows down or speeds up favours none of them. The sizes that are asked for are taken out of what
was measured, the curve is fitted to the others, and each micro-batch is compared with what it says at its slots: per
round the median error of each size, and over the rounds the median of these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback

from ft_insight import records as r
from ft_insight import sweep
from ft_insight.demo.rows import generate_rows
from ft_insight.demo.train import make_trainer
from ft_insight.estimate.step_time import StepTime, fit_step_time
from ft_insight.runlog import read_records

USUAL = 4
"""The batch that the trainer is set to."""


@dataclass
class Round:
    """One size in one round; medians over its micro-batches."""

    slots: float
    measured_s: float
    error: float


def trainer(folder: Path) -> Any:
    """Build the demo's trainer as its user would."""
    built = make_trainer(generate_rows(400), folder, callbacks=[], steps=None, batch=USUAL)
    built.remove_callback(PrinterCallback)
    return built


def measured(log: Path) -> dict[int, list[tuple[int, float]]]:
    """Return slots and seconds of a sweep's micro-batches by size; steps that warmed up or were looked at left out."""
    sizes: dict[int, list[tuple[int, float]]] = defaultdict(list)
    _, stream = read_records(log)
    steps = [record for record in stream if isinstance(record, r.Step)]
    for step in steps[1:]:
        if not step.profiled:
            sizes[step.other_batch or USUAL] += [(m.slots or 0, m.compute_s or 0.0) for m in step.micro]
    return sizes


def compared(sizes: dict[int, list[tuple[int, float]]], asked: set[int]) -> dict[int, Round]:
    """Fit the sizes that are not asked for, and compare each size's micro-batches with the curve at their slots."""
    known = [pair for size, pairs in sizes.items() if size not in asked for pair in pairs]
    curve = fit_step_time([float(slots) for slots, _ in known], [seconds for _, seconds in known])
    assert isinstance(curve, StepTime), curve
    median = statistics.median
    return {
        size: Round(
            median(slots for slots, _ in pairs),
            median(seconds for _, seconds in pairs),
            median(curve.predict(slots)[0] / seconds for slots, seconds in pairs) - 1,
        )
        for size, pairs in sizes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--asked", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="of the sweep, at each size")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    asked = set(arguments.asked)
    seen: dict[int, list[Round]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            log = folder / "sweep.jsonl"
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                sweep(lambda at=folder: trainer(at), [*arguments.measured, *asked], arguments.steps, path=log)
            for size, found in compared(measured(log), asked).items():
                seen[size].append(found)
            said = "  ".join(f"batch {b} {seen[b][-1].error:+.1%}" for b in sorted(seen))
            print(f"round {number + 1}: {said}", flush=True)
    report(seen, asked)


def report(seen: dict[int, list[Round]], asked: set[int]) -> None:
    print(f"\n{'batch':>6} {'slots':>6} {'measured':>11} {'curve: median error':>20} {'of rounds':>18}")
    for batch, rounds in sorted(seen.items()):
        errors = sorted(x.error for x in rounds)
        slots, seconds = (
            statistics.median(values) for values in zip(*((x.slots, x.measured_s) for x in rounds), strict=True)
        )
        mark = "  not in the fit" if batch in asked else ""
        spread = f"{errors[0]:+.1%} to {errors[-1]:+.1%}"
        print(
            f"{batch:>6} {slots:>6.0f} {seconds * 1e3:>8.0f} ms {statistics.median(errors):>+20.1%} {spread:>18}{mark}"
        )


if __name__ == "__main__":
    main()
