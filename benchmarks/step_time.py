"""How well one sparse run tells other batches and the dense model: predictions against real runs on this machine.

    python benchmarks/step_time.py [--rounds 3] [--batch 4] [--steps 50]

In each round the tiny demo model (Mixtral, 8 experts, LoRA, checkpointing) trains on rows of varying length: a run at
``--batch`` with 2 experts per token, from whose log everything is predicted, and around it short runs at twice and
half the batch and with all 8 experts. The prediction of each is the fitted time at the slots that the run's own
``Workload`` expects of its batches, plus what a step takes besides its micro-batches; what it is held against is the
mean time of the other run's steps, the first two left out. Printed is the median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ft_insight import FtInsightCallback
from ft_insight.demo.rows import generate_rows
from ft_insight.demo.train import make_trainer
from ft_insight.estimate.density import DensityTime, predict_density
from ft_insight.estimate.measured import measure
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.workload import workload_of
from ft_insight.reader import read_run
from ft_insight.run_view import RunView

WARM_UP = 2
EXPERTS = 8


class Stopwatch(TrainerCallback):
    """Seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def mean_s(self) -> float:
        ends = self.ends[WARM_UP:]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def train(folder: Path, batch: int, steps: int, callback: Any, top_k: int = 2, seed: int = 0) -> None:
    rows = generate_rows(max(256, batch * steps), seed=seed)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = make_trainer(rows, folder, callbacks=[callback], steps=steps, batch=batch, top_k=top_k, seed=seed)
        trainer.train()


def observed(folder: Path, arguments: argparse.Namespace, seed: int) -> RunView:
    """Train the run that everything is predicted from; return what its log says."""
    path = folder / f"base_{seed}.jsonl"
    train(
        folder,
        arguments.batch,
        arguments.steps,
        FtInsightCallback(path, layers_every=arguments.layers_every),
        seed=seed,
    )
    return read_run(path)[0]


def watched(folder: Path, arguments: argparse.Namespace, seed: int, batch: int, top_k: int = 2) -> float:
    watch = Stopwatch()
    train(folder, batch, arguments.short, watch, top_k, seed)
    return watch.mean_s


def predicted(view: RunView, batch: int, density: float) -> float:
    """Return seconds of a step, from the run's log alone."""
    slots = workload_of(view).slots(batch)
    assert slots is not None
    rest = measure(view).rest_s or 0.0
    if density != 2 / EXPERTS:
        found = predict_density(view, density, slots)
        assert isinstance(found, DensityTime), found
        middle, low, high = (round(seconds * 1e3) for seconds in found.micro_s)
        print(f"    dense: {middle} [{low}-{high}] ms, {found.basis}")
        return found.micro_s[0] + rest
    model = measure(view).step_time
    assert not isinstance(model, NotIdentifiable), model
    return model.predict(slots)[0] + rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="of the run that is fitted")
    parser.add_argument("--short", type=int, default=16, help="steps of the runs that are predicted")
    parser.add_argument("--layers-every", type=int, default=2, help="steps between those whose layers are timed")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    batch = arguments.batch
    cases = {
        f"same batch ({batch})": (batch, 2),
        f"2x batch ({2 * batch})": (2 * batch, 2),
        f"0.5x batch ({batch // 2})": (batch // 2, 2),
        f"dense, top-{EXPERTS}": (batch, EXPERTS),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            names = list(cases)[number % 2 :: 2] + list(cases)[1 - number % 2 :: 2]
            before = {name: watched(Path(folder), arguments, number, *cases[name]) for name in names[:2]}
            view = observed(Path(folder), arguments, number)
            after = {name: watched(Path(folder), arguments, number, *cases[name]) for name in names[2:]}
            for name, seconds in {**before, **after}.items():
                size, top_k = cases[name]
                results[name].append((predicted(view, size, top_k / EXPERTS), seconds))
    print(f"tiny Mixtral, LoRA, {arguments.threads} thread(s), {arguments.rounds} rounds: seconds of a step, medians")
    for name, pairs in results.items():
        said, seen = (statistics.median(column) for column in zip(*pairs, strict=True))
        errors = [p / s - 1 for p, s in pairs]
        each = " ".join(f"{error:+.1%}" for error in errors)
        print(
            f"{name:>20}  predicted {said:.3f}  measured {seen:.3f}  error {statistics.median(errors):+.1%}  ({each})"
        )


if __name__ == "__main__":
    main()
