"""What counting tokens per expert costs, alone: no step ledger, no layers, no log.

    python benchmarks/routers.py [--model tiny medium] [--rounds 12] [--steps 14] [--threads 1]

Two figures for each model, over the same steps in turns, as ``overhead.py`` takes them. *In the hooks*: seconds spent
in everything that counting runs, by ``perf_counter`` around it, over the step's wall time; exact to a few microseconds
a call, but blind to what a hook costs torch itself. *Paired*: each step's wall time over that of the same step without,
which holds all, and the noise of the machine. Medians, with 95% intervals by bootstrap over steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from overhead import SIZES, WARM_UP, make_trainer, measure, median_interval
from transformers import TrainerCallback

from ft_insight.callbacks.expert_watch import ExpertWatch
from ft_insight.callbacks.guard import Guard, Hook
from ft_insight.callbacks.seams import Seams

LIMIT = 0.005


class OnlyCounting(TrainerCallback):
    """Counts as a session does: hooks on the routers and the root, counts read from time to time, all guarded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.guard = Guard(lambda collector, reason: None)
        self.watch = ExpertWatch(model)
        assert self.watch.counter is not None
        self.seams, self.spent, self.records = Seams(), [], []
        self.router_chose = self.watch.counter.count
        for index, router in enumerate(self.watch.counter.routers):
            self.seams.hook_router(self, index, router.tap)  # type: ignore[arg-type]

        def begins(module: Any, args: Any, arguments: dict[str, Any]) -> None:
            mode = "train" if module.training and torch.is_grad_enabled() else None
            self.watch.forward_begins(mode, arguments.get("attention_mask"))

        self.root = model.register_forward_pre_hook(Hook(self.guard, "experts", begins), with_kwargs=True)
        self.before_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.guard.run("experts", self._take, state.global_step)
        self.spent.append(self.guard.spent_s - self.before_s)
        self.before_s = self.guard.spent_s

    def _take(self, step: int) -> None:
        now = time.perf_counter()
        self.watch.tell(self.watch.take(now), self.records.append, step, now, arrived=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.root.remove()
        self.seams.remove()
        self.watch.finish(self.records.append, 0, 0.0)
        assert self.records, "nothing was counted"


def bench(model: str, arguments: argparse.Namespace) -> None:
    walls: list[float] = []
    ratios: list[float] = []
    inside: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, arguments.steps, folder)
        for number in range(arguments.rounds):
            counting, times = OnlyCounting(), {}
            order = [counting, None]
            random.Random(number).shuffle(order)
            for callback in order:
                times[callback], _ = measure(trainer, callback, arguments.steps)
            walls += times[None]
            ratios += [x / y for x, y in zip(times[counting], times[None], strict=True)]
            # the stopwatch starts at the end of the first step
            inside += [s / x for s, x in zip(counting.spent[1 + WARM_UP :], times[counting], strict=True)]
    size = SIZES[model]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    layers, hidden = size["num_hidden_layers"], size["hidden_size"]
    print(f"{model}: {parameters / 1e6:.1f}M parameters, {layers} layers of 8 experts, hidden {hidden}", end="; ")
    print(f"{statistics.median(walls) * 1e3:.0f} ms a step, {len(walls)} pairs of steps")
    middle, low, high = (f"{x:.3%}" for x in median_interval(inside))
    print(f"  in the hooks  {middle} of a step [{low}, {high}]", end="")
    print(f"  (95 of 100 steps below {statistics.quantiles(inside, n=20)[-1]:.3%})")
    middle, low, high = (f"{x:.3f}" for x in median_interval(ratios))
    print(f"  paired        x{middle} [{low}, {high}]")
    if median_interval(inside)[2] >= LIMIT:
        print(f"  above the limit of {LIMIT:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for model in arguments.model:
        bench(model, arguments)


if __name__ == "__main__":
    main()
