"""What ft-insight costs: step times without it, with it, and with layers at every step, interleaved in one run.

    python benchmarks/overhead.py [--model tiny|medium] [--rounds 12] [--other sync]

Each round trains the same few steps in every mode, in random order, on the same model and rows; what is compared is
each step with the same step of the same round without, so that neither lengths nor a machine that slows down matter.
Printed are the median of these ratios and its 95% interval by bootstrap, of wall time and of the process's CPU time.
``sync`` is a profiler that times every module and synchronises in each of its hooks, as profilers that only support
that do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight.demo.tiny import build_tokenizer, lora_config
from ft_insight.demo.train import checkpointing_options

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "rows": 128, "batch": 4},
    "medium": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "rows": 256, "batch": 2},
}
WARM_UP = 1


class Stopwatch(TrainerCallback):
    """Wall and CPU seconds from the end of one step to the end of the next, all that callbacks do included."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.wall.append(now[0] - self._last[0])
            self.cpu.append(now[1] - self._last[1])
        self._last = now


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
    """Build the trainer that all modes share: LoRA on a random Mixtral, checkpointing, rows of 40 to 200 tokens."""
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
    """Train some steps with a callback; return the wall and CPU seconds of each step but the first."""
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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--other", choices=["sync"], nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments.model, arguments.steps, folder)
        log = iter(Path(folder) / f"{i}.jsonl" for i in range(10_000))
        modes: dict[str, Any] = {
            "without": lambda: None,
            "default": lambda: FtInsightCallback(next(log)),
            "layers every step": lambda: FtInsightCallback(next(log), layers_every=1),
        }
        if "sync" in arguments.other:
            modes["synchronising profiler"] = SynchronisingProfiler
        results: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in modes}
        order = list(modes)
        for number in range(arguments.rounds):
            random.Random(number).shuffle(order)
            for name in order:
                results[name].append(measure(trainer, modes[name](), arguments.steps))
    report(results, arguments)


def report(results: dict[str, list[tuple[list[float], list[float]]]], arguments: argparse.Namespace) -> None:
    base = results["without"]
    wall = statistics.median(seconds for walls, _ in base for seconds in walls)
    print(f"{arguments.model} Mixtral, LoRA, checkpointing, {arguments.threads} thread(s), {arguments.rounds} rounds")
    print(f"without: {wall * 1e3:.0f} ms a step, {sum(len(w) for w, _ in base)} steps of each kind")
    for name, measured in results.items():
        if name == "without":
            continue
        for column, what in enumerate(("wall", "CPU")):
            pairs = [zip(m[column], b[column], strict=True) for m, b in zip(measured, base, strict=True)]
            ratio, low, high = median_interval([x / y for pair in pairs for x, y in pair])
            print(f"{name:>24} {what:>4} x{ratio:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
