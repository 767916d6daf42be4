"""The paper's study on your machine: two models, dense and sparse, batch 1 and the largest, beside what it published.

    python examples/study/run.py --tiny                                      # random weights, any CPU, a few minutes
    python examples/study/run.py --mixtral mistralai/Mixtral-8x7B-v0.1 \
        --blackmamba Zyphra/BlackMamba-2.8B --dataset FILE.jsonl             # real weights, one GPU
    python examples/study/run.py ... --epochs 10                             # with accuracy per epoch

Each run is the example's own trainer with ``FtInsightCallback``, and leaves a ``run.jsonl`` that ``ft-insight report``
reads. Cut off, the same command goes on where it stopped. ``study.md`` in the output folder holds the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this file
sys.path.append(str(Path(__file__).resolve().parents[2]))  # ft_insight of this clone, should it not be installed

from study.largest import A_CAP, CAP, Largest, find_largest
from study.measured import measure
from study.report import write_study
from study.runs import DENSE, SPARSE, Plan, Run, StudyError, execute

from ft_insight.demo.datasets import DatasetError, load_rows

TINY: dict[str, Any] = {"steps": 8, "epochs": 2.0, "rows": 48, "eval_rows": 8, "max_length": 128}
REAL: dict[str, Any] = {"steps": 30, "epochs": 0.0, "rows": 0, "eval_rows": 64, "max_length": 1024}
LEAST_STEPS = 3
"""The first step warms up, the last one is recorded by the profiler: one at least has to lie between."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiny", action="store_true", help="tiny random models, fit for a CPU, instead of real weights")
    add("--mixtral", metavar="NAME_OR_PATH", help="real weights of a Mixtral: a hub name or a local folder")
    add("--blackmamba", metavar="NAME_OR_PATH", help="real weights of a BlackMamba")
    add("--dataset", metavar="FILE", help="JSON or JSONL (--tiny: rows are made up if left out)")
    add("--output", type=Path, default=Path("ft_insight_study"), metavar="DIR", help="default %(default)s")
    add("--steps", type=int, help=f"steps of a run, {LEAST_STEPS} or more ({REAL['steps']}, --tiny {TINY['steps']})")
    add("--epochs", type=float, help="epochs of the runs at the largest batch, with accuracy after each (0: --steps)")
    add("--rows", type=int, help=f"use only the first so many rows (all, --tiny {TINY['rows']})")
    add("--eval-rows", type=int, help=f"held-out rows to answer after each epoch ({REAL['eval_rows']})")
    add("--max-length", type=int, help=f"tokens at which rows are cut ({REAL['max_length']}, --tiny less)")
    add("--largest", type=int, metavar="BATCH", help=f"take this for the largest batch; on a CPU {CAP}, else searched")
    arguments = parser.parse_args(words)
    for name, value in (TINY if arguments.tiny else REAL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    real = arguments.mixtral or arguments.blackmamba
    if bool(arguments.tiny) == bool(real):
        parser.error("say either --tiny, or --mixtral and --blackmamba (or one of them)")
    if real and not arguments.dataset:
        parser.error("real weights need --dataset")
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps must be {LEAST_STEPS} or more, not {arguments.steps}")
    for name, least in (("epochs", 0), ("rows", 0), ("eval_rows", 0), ("max_length", 1), ("largest", 1)):
        if (value := getattr(arguments, name)) is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if arguments.dataset:
        try:
            load_rows(Path(arguments.dataset).expanduser(), 1)
        except DatasetError as error:
            parser.error(str(error))


def claim(folder: Path, arguments: argparse.Namespace) -> None:
    """Note what a folder's runs were set to, so that runs of other settings are never mixed with them."""
    settings = {k: v for k, v in vars(arguments).items() if k != "output"}
    file = folder / "study.json"
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        other = sorted(name for name in settings if settings[name] != before.get(name))
        if other:
            options = ", ".join(f"--{name.replace('_', '-')} {before.get(name)}" for name in other)
            raise StudyError(f"{folder} holds a study with {options}: choose another --output")
        return
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def study(arguments: argparse.Namespace) -> int:
    """Run what has not been run yet, and write the comparison; return how many runs did not end well."""
    claim(arguments.output, arguments)
    plan = Plan(arguments)
    small = [plan.run(model, top_k, 1, "batch1") for model in plan.models for top_k in (DENSE, SPARSE)]
    found: dict[Run, Largest] = {}
    if arguments.tiny or arguments.largest:
        cap = Largest(arguments.largest or CAP, A_CAP)
        runs = [run for one in small for run in (one, plan.run(one.model, one.top_k, cap.batch, "largest"))]
        found = {run: cap for run in runs if run.name == "largest"}
        execute(runs, together=arguments.tiny)
    else:
        runs = []
        for one in small:
            execute([one])
            largest = find_largest(plan, one)
            # where not even one row fits there is no run, only the reason
            run = plan.run(one.model, one.top_k, max(1, largest.batch), "largest")
            execute([run] if largest.batch else [])
            runs += [one, run]
            found[run] = largest
    results = [measure(run, found.get(run)) for run in runs]
    print(f"\n{write_study(arguments.output, arguments, results)}")
    bad = [result for result in results if result.reason is not None]
    for result in bad:
        print(f"{result.run.title}: {result.reason}", file=sys.stderr)
    return len(bad)


def main() -> int:
    arguments = parse()
    try:
        return 1 if study(arguments) else 0
    except StudyError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
