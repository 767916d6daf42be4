"""How long ``ft-insight project`` takes on the log of a long run.

    python benchmarks/project.py [--steps 10000] [--rounds 7]

Two logs of the same run are made up: steps of four micro-batches of varying length, without and with a sample of the
GPU for each second. Each round starts the command anew on both and, beside them, an interpreter that only imports
numpy: what a machine needs for that is what all figures are to be held against.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30


def header(steps: int) -> dict[str, Any]:
    return {
        "type": "header",
        "schema": 1,
        "run_id": "made-up",
        "segment": 0,
        "wall_time_s": 1.75e9,
        "started_at": "2026-11-30T06:00:00+00:00",
        "host": "vm",
        "pid": 1,
        "model": {"name": "mixtral", "kind": "mixtral", "parameters": 46_700_000_000, "layers": 32, "hidden": 4096},
        "train": {"trainer": "SFTTrainer", "method": "qlora", "batch": 4, "accumulation": 4, "max_steps": steps},
        "dataset": {"queries": 150_000, "length_values": [100, 200, 400, 1024], "length_counts": [50, 60, 35, 5]},
        "devices": [{"kind": "cuda", "name": "NVIDIA A40", "memory_bytes": 47_695_611_822, "uuid": "GPU-1"}],
    }


def step(number: int, t_s: float, rng: random.Random) -> dict[str, Any]:
    lengths = [rng.choice([100, 200, 400, 1024]) for _ in range(4)]
    micro = [[4, 4 * n, 4 * n, 2 * n, (0.9 + 9e-4 * 4 * n) * rng.gauss(1, 0.03)] for n in lengths]
    computed = sum(float(m[4]) for m in micro)
    phases = {"data_wait": 0.05, "forward": computed / 3, "backward": computed * 2 / 3, "optimizer": 0.2, "other": 0.1}
    memory = {
        "allocated_bytes": 27 * GIB,
        "reserved_bytes": 38 * GIB,
        "peak_allocated_bytes": 33 * GIB,
        "rss_bytes": 3 * GIB,
        "base_bytes": 27 * GIB,
        "micro": [[27 * GIB + 4 * n * 800_000, False, 27 * GIB + n * 80_000] for n in lengths],
    }
    wall = computed + 0.35
    return {"type": "step", "step": number, "t_s": t_s, "wall_s": wall, "phases_s": phases, "clock": "cuda"} | {
        "micro": micro,
        "memory": memory,
        "self_s": 0.001,
    }


def sample(t_s: float) -> dict[str, Any]:
    figures = ("gpu_percent", "sm_percent", "tensor_percent", "dram_percent", "power_w", "temperature_c")
    told: dict[str, Any] = dict.fromkeys(figures, 60.0)
    told |= {"uuid": "GPU-1", "counters": "gpm", "window_s": [t_s - 0.5, t_s], "memory_used_bytes": 40 * GIB}
    return {"type": "gpu", "t_s": t_s, "samples": [told], "host": {"cpu_percent": 100.0, "rss_bytes": 3 * GIB}}


def records(steps: int, sampled: bool) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    yield header(steps)
    t_s, sampled_s = 0.0, 1.0
    for number in range(1, steps + 1):
        record = step(number, t_s, rng)
        t_s += record["wall_s"]
        yield record
        while sampled and sampled_s < t_s:
            yield sample(sampled_s)
            sampled_s += 1.0


def seconds_of(*words: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = {"python -c 'import numpy'": ("-c", "import numpy")}
        for name, sampled in (("no samples", False), ("a sample a second", True)):
            path = Path(folder, f"{sampled}.jsonl")
            with path.open("w") as file:
                file.writelines(json.dumps(r, separators=(",", ":")) + "\n" for r in records(arguments.steps, sampled))
            label = f"project, {arguments.steps:,} steps, {name} ({path.stat().st_size / 1e6:.0f} MB)"
            commands[label] = ("-m", "ft_insight.cli", "project", str(path), "--gpu", "h100")
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, words in commands.items():
                taken[name].append(seconds_of(*words))
    base = statistics.median(taken["python -c 'import numpy'"])
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        print(f"{name:>62}  {middle:.2f} s [{min(seconds):.2f}-{max(seconds):.2f}]  x{middle / base:.1f}")


if __name__ == "__main__":
    main()
