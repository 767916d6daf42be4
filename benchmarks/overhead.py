"""What ft-insight costs: the same steps without it, with it, and with layers at every step, in turns in one process.

    python benchmarks/overhead.py [--model tiny|medium] [--steps 60] [--other sync]

One trainer for each mode, each in a thread, of which only one runs at a time: it makes one step and hands over to the
next, in random order, so that a step and the step that it is compared with, on the same rows, lie seconds apart and a
machine that is slow for a while is slow for both. Printed are the median of the ratios and its 95% interval by
bootstrap, of wall time and of the process's CPU time, and what the callback says of itself. ``sync`` is a profiler
that times every module and synchronises in each of its hooks, as profilers that only support that do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import statistics
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # each trainer has a thread of its own, and torch counts for each thread

import torch
from datasets import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight.demo.tiny import build_tokenizer, lora_config
from ft_insight.demo.train import checkpointing_options
from ft_insight.reader import read_run

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "rows": 256, "batch": 4},
    "medium": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "rows": 256, "batch": 1},
}
WARM_UP = 2


class Stopwatch(TrainerCallback):
    """Wall and CPU seconds from the end of one step to the end of the next, all that callbacks do included."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.go_on()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wall.append(time.perf_counter() - self._since[0])
        self.cpu.append(time.process_time() - self._since[1])
        self.go_on()

    def go_on(self) -> None:
        self._since = time.perf_counter(), time.process_time()


class Baton:
    """Lets one of several trainers run at a time, each for one step, in another order at each step."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._turns: list[str] = []
        self._changed = threading.Condition()
        self._random = random.Random(0)
        self._deal()

    def _deal(self) -> None:
        self._turns = self._random.sample(self._names, len(self._names))

    def wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turns[0] == name)

    def hand_over(self) -> None:
        with self._changed:
            self._turns.pop(0)
            if not self._turns:
                self._deal()
            self._changed.notify_all()


class Turn(Stopwatch):
    """Times a trainer's steps, each of which begins when the baton comes. The last of its callbacks."""

    def __init__(self, name: str, baton: Baton, steps: int) -> None:
        super().__init__()
        self._name, self._baton, self._left = name, baton, steps

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._baton.wait(self._name)
        self.go_on()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_step_end(*args, **kwargs)
        self._left -= 1
        self._baton.hand_over()
        if self._left:
            self._baton.wait(self._name)
        self.go_on()


class SynchronisingProfiler(TrainerCallback):
    """Times every module with hooks that synchronise, forward and backward."""

    def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        self.times: dict[str, float] = {}
        self.handles = []
        sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

        def stamp(key: str) -> Any:
            def hook(*_: Any) -> None:
                sync()
                self.times[key] = time.perf_counter()

            return hook

        for name, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(stamp(name + ">")),
                module.register_forward_hook(stamp(name + "<")),
                module.register_full_backward_pre_hook(stamp(name + ">b")),
                module.register_full_backward_hook(stamp(name + "<b")),
            ]

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        for handle in self.handles:
            handle.remove()


def make_model(size: dict[str, int], vocabulary: int) -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=vocabulary,
            hidden_size=size["hidden_size"],
            intermediate_size=size["intermediate_size"],
            num_hidden_layers=size["num_hidden_layers"],
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    )


def make_trainer(model: str, steps: int, folder: str) -> SFTTrainer:
    """Build a trainer, the same each time: LoRA on a random Mixtral, checkpointing, rows of 40 to 200 tokens."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    size = SIZES[model]
    tokenizer = build_tokenizer(["one two three"], vocab_size=1000)
    lengths = random.Random(0).choices(range(40, 200), k=size["rows"])
    rows = [[random.Random(i).randrange(10, len(tokenizer)) for _ in range(n)] for i, n in enumerate(lengths)]
    config = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=size["batch"],
        max_steps=steps,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **checkpointing_options(SFTConfig),
    )
    return SFTTrainer(
        model=make_model(size, len(tokenizer)),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        processing_class=tokenizer,
        peft_config=lora_config(),
    )


def measure(trainer: Any, callback: Any, steps: int) -> tuple[list[float], list[float]]:
    """Train some steps with a callback; return the wall and CPU seconds of each step but the first ones.

    For benchmarks that train in turns, one after the other.
    """
    watch = Stopwatch()
    extra = [c for c in (callback, watch) if c is not None]
    for item in extra:
        trainer.add_callback(item)
    trainer.args.max_steps = steps
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
    for item in extra:
        trainer.pop_callback(type(item))
    return watch.wall[WARM_UP:], watch.cpu[WARM_UP:]


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95% interval by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--other", choices=["sync"], nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        modes: dict[str, Any] = {
            "without": lambda: None,
            "default": lambda: FtInsightCallback(Path(folder) / "default.jsonl"),
            "layers every step": lambda: FtInsightCallback(Path(folder) / "layers.jsonl", layers_every=1),
        }
        if "sync" in arguments.other:
            modes["synchronising profiler"] = SynchronisingProfiler
        baton = Baton(list(modes))
        turns = {name: Turn(name, baton, arguments.steps) for name in modes}
        threads = []
        for name, make in modes.items():
            trainer = make_trainer(arguments.model, arguments.steps, f"{folder}/{name}")
            for callback in (make(), turns[name]):
                if callback is not None:
                    trainer.add_callback(callback)
            threads.append(threading.Thread(target=trainer.train))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        own = {name: read_run(Path(folder) / f"{file}.jsonl")[0].self_share for name, file in LOGS.items()}
    report(turns, own, arguments)


LOGS = {"default": "default", "layers every step": "layers"}


def report(turns: dict[str, Turn], own: dict[str, float | None], arguments: argparse.Namespace) -> None:
    base = turns["without"]
    wall = statistics.median(base.wall[WARM_UP:])
    print(f"{arguments.model} Mixtral, LoRA, checkpointing, 1 thread; without: {wall * 1e3:.0f} ms a step")
    print(f"{arguments.steps - WARM_UP} pairs of the same step; all {arguments.steps} steps together in brackets")
    for name, turn in turns.items():
        if name == "without":
            continue
        for what in ("wall", "cpu"):
            pairs = list(zip(getattr(turn, what), getattr(base, what), strict=True))
            ratio, low, high = median_interval([x / y for x, y in pairs[WARM_UP:]])
            all_steps = sum(x for x, _ in pairs) / sum(y for _, y in pairs)
            print(f"{name:>24} {what:>4} x{ratio:.3f} [{low:.3f}, {high:.3f}] (x{all_steps:.3f})")
        if own.get(name) is not None:
            print(f"{name:>24} says of itself: {own[name]:.2%} of step time")


if __name__ == "__main__":
    main()
