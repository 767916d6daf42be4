"""ft-insight beside TraceML: the same training without either, with the one, with the other, in turns.

    python -m venv traceml && traceml/bin/pip install traceml-ai ".[train]"
    python benchmarks/beside_traceml.py --python traceml/bin/python [--rounds 8]

TraceML starts its own launcher, so that each measurement is a process of its own; a round holds one of each kind, in
random order, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("without", "ft-insight", "traceml")


def train(model: str, steps: int) -> None:
    """The training itself, in a process of its own; what to measure with comes by the environment."""
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    from overhead import WARM_UP, Stopwatch, make_trainer

    kind = os.environ["BESIDE_KIND"]
    if kind == "traceml":
        from traceml_ai.integrations import huggingface

        huggingface.init()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, steps, folder)
        if kind == "ft-insight":
            from ft_insight import FtInsightCallback

            trainer.add_callback(FtInsightCallback(Path(folder) / "run.jsonl"))
        if kind == "traceml":
            trainer.add_callback(huggingface.TraceMLTrainerCallback())
        watch = Stopwatch()
        trainer.add_callback(watch)
        trainer.train()
    result = {"wall": statistics.median(watch.wall[WARM_UP:]), "cpu": statistics.median(watch.cpu[WARM_UP:])}
    Path(os.environ["BESIDE_RESULT"]).write_text(json.dumps(result))


def run(python: str, kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = ["--train", "--model", arguments.model, "--steps", str(arguments.steps)]
        command = [python, __file__, *words]
        if kind == "traceml":
            launcher = str(Path(python).parent / "traceml")
            command = [launcher, "run", "--mode", "summary", "--logs-dir", folder, __file__, "--args", *words]
        subprocess.run(
            command,
            env={
                **os.environ,
                "BESIDE_KIND": kind,
                "BESIDE_RESULT": str(result),
                "PYTHONPATH": str(Path(__file__).parent.parent),
            },
            cwd=folder,
            check=True,
            capture_output=True,
        )
        measured: dict[str, float] = json.loads(result.read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--python", default=sys.executable, help="interpreter with traceml-ai")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.model, arguments.steps)
        return
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    for number in range(arguments.rounds):
        random.Random(number).shuffle(order)
        for kind in order:
            results[kind].append(run(arguments.python, kind, arguments))
    base = results["without"]
    print(f"{arguments.model} Mixtral, {arguments.rounds} rounds; without: {base[0]['wall'] * 1e3:.0f} ms a step")
    for kind in KINDS[1:]:
        for what in ("wall", "cpu"):
            ratios = sorted(m[what] / b[what] for m, b in zip(results[kind], base, strict=True))
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            print(f"{kind:>12} {what:>4} x{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
