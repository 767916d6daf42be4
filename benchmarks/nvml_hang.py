"""What a GPU driver that hangs costs a step: training beside a call that hangs for 5 s, and beside one that answers.

    python benchmarks/nvml_hang.py [--rounds 8] [--steps 14]

Needs a C compiler and no GPU: the real pynvml binds to the stand-in for NVIDIA's library of the tests. Each round
trains the same steps both ways, in random order, on the same model and rows; what is compared is each step with the
same step of the same round. Printed are the median of these ratios, its 95% interval by bootstrap, and the spread.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch
from overhead import WARM_UP, make_trainer, measure, median_interval

from ft_insight import FtInsightCallback
from ft_insight.callbacks import facts
from ft_insight.records import Device, Gpu
from ft_insight.runlog import read_records

FAKE = Path(__file__).parent.parent / "tests" / "fakes" / "nvml.c"
UUID = "22222222-2222-2222-2222-222222222222"
HANG_MS = 5000
Times = tuple[list[float], list[float]]
"""Wall and CPU seconds of each step."""


def load_stand_in(folder: Path) -> None:
    """Compile the stand-in and load it, so that pynvml finds it under NVIDIA's name."""
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(target), str(FAKE)],  # noqa: S607
        check=True,
    )
    ctypes.CDLL(str(target))
    facts.devices = lambda args, model: (Device(kind="cuda", name="a GPU", uuid=UUID),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["FAKE_NVML_HANG_MS"] = str(HANG_MS)
    measured: dict[str, list[Times]] = {"answers": [], "hangs": []}
    dropped = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_stand_in(folder)
        trainer = make_trainer("tiny", arguments.steps, name)
        for number in range(arguments.rounds):
            order = list(measured)
            random.Random(number).shuffle(order)
            for mode in order:
                os.environ["FAKE_NVML_FAULTS"] = "memory:hang" if mode == "hangs" else ""
                log = folder / f"{number}-{mode}.jsonl"
                measured[mode].append(measure(trainer, FtInsightCallback(log), arguments.steps))
                if mode == "hangs":
                    _, records = read_records(log)
                    dropped.append(sum(record.dropped for record in records if isinstance(record, Gpu)))
    report(measured, dropped)


def report(measured: dict[str, list[Times]], dropped: list[int]) -> None:
    step_ms = 1e3 * statistics.median(x for wall, _ in measured["answers"] for x in wall)
    print(f"steps of {step_ms:.0f} ms, the first {WARM_UP} of each run left out; a call that hangs for {HANG_MS} ms:")
    for column, what in enumerate(("wall", "CPU")):
        runs = zip(measured["hangs"], measured["answers"], strict=True)
        pairs = [zip(hung[column], answered[column], strict=True) for hung, answered in runs]
        ratios = [hung / answered for pair in pairs for hung, answered in pair]
        ratio, low, high = median_interval(ratios)
        deciles = statistics.quantiles(ratios, n=10)
        spread = f"80% of {len(ratios)} pairs within x{deciles[0]:.3f} to x{deciles[-1]:.3f}"
        print(f"{what:>6} x{ratio:.4f} [{low:.4f}, {high:.4f}], {spread}")
    print(f"readings dropped in each run that hung: {min(dropped)} to {max(dropped)}")


if __name__ == "__main__":
    main()
