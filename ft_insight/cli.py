"""The verbs of ``ft-insight``. Each imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ft_insight import __version__

WHICH_RUN = "a run.jsonl, or a folder of runs (default: the newest run under ft_insight_runs/)"

MOST_GPUS = 8
"""Of one machine: what joins machines is in no catalogue."""
PLAN_OPTIONS = (
    "method", "rank", "targets", "dataset", "seq_len", "batch", "accumulation", "optimizer", "dtype", "trainer",
)  # fmt: skip
MOST = 1e15
"""Nobody trains on more; numbers beyond it are typing errors, and end in infinite hours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code. What a user can cause ends in one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets a ?, not a traceback
    try:
        arguments = _parser().parse_args(argv)
        code = int(arguments.run(arguments))
        if sys.stdout is not None:  # as it is where the caller closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (head, less) has left; without this the interpreter complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:  # each of our own errors is a ValueError with a message of one line
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.strerror or error}: {error.filename or 'input or output'}")
    return code


def _refuse(message: str) -> int:
    from ft_insight.words import clean

    print(f"ft-insight: {clean(message, 1000)}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all of ft-insight does."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(_refuse(f"{message}; see {self.prog} --help"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ft-insight",
        description="Where a fine-tune's time, memory and money go. Add FtInsightCallback() to your trainer, then:",
    )
    parser.add_argument("--version", action="version", version=f"ft-insight {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    watch = verbs.add_parser("watch", help="a live dashboard of a run, in this terminal")
    watch.add_argument("run_name", nargs="?", metavar="RUN", help=WHICH_RUN)
    watch.set_defaults(run=_watch)

    report = verbs.add_parser("report", help="what a run did, as text, Markdown or JSON")
    report.add_argument("run_name", nargs="?", metavar="RUN", help=WHICH_RUN)
    report.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    report.set_defaults(run=_report)

    project = verbs.add_parser("project", help="hours and dollars of the whole job, here and on other GPUs")
    project.add_argument("run_names", nargs="*", metavar="RUN", help=f"{WHICH_RUN}; several of one model are pooled")
    project.add_argument("--gpu", nargs="+", action="extend", metavar="NAME", help="GPUs to project to, or 'all'")
    project.add_argument("--gpus", nargs="+", action="extend", metavar="N", help="how many of each (default: as run)")
    project.add_argument("--batch", type=int, metavar="N", help="queries per micro-batch (default: what fits)")
    project.add_argument("--queries", type=int, metavar="N", help="rows of the training set (default: as in the run)")
    project.add_argument("--epochs", type=float, metavar="E", help="(default: num_train_epochs of the run)")
    project.add_argument("--seq-len", type=int, metavar="L", help="tokens of every row (default: the run's lengths)")
    project.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="dollars per hour, of the one --gpu, or of the run's own machine",
    )
    project.add_argument("--prices", metavar="FILE", help="your own prices, CSV: gpu, usd_per_gpu_hour")
    project.add_argument("--top-k", type=int, metavar="K", help="experts per token (default: as in the run)")
    project.add_argument("--dataset", metavar="FILE", help="another data set, JSON or JSONL; --seq-len cuts it off")
    project.add_argument("--tokenizer", metavar="NAME", help="its tokenizer: a folder, a tokenizer.json, or a hub name")
    project.add_argument("--probe", metavar="RUN", help="a run of ft-insight probe on the one --gpu, to scale by")
    form = project.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as Markdown")
    form.add_argument("--json", action="store_true", help="as JSON")
    project.add_argument("--verbose", action="store_true", help="the source and date of every price")
    project.set_defaults(run=_project)

    compare = verbs.add_parser("compare", help="two runs side by side: speed, and the load of their experts")
    compare.add_argument("before", metavar="BEFORE", help=WHICH_RUN.split(" (")[0])
    compare.add_argument("after", metavar="AFTER", help=WHICH_RUN.split(" (")[0])
    compare.set_defaults(run=_compare)

    prices = verbs.add_parser("prices", help="what a GPU-hour costs, by provider, with date and source")
    prices.add_argument("gpus", nargs="*", metavar="GPU", help="all offers of these (default: one line for each GPU)")
    prices.add_argument("--refresh", action="store_true", help="ask providers through gpuhunt; kept for `project`")
    prices.add_argument("--prices", metavar="FILE", help="your own, CSV with the columns gpu and usd_per_gpu_hour")
    prices.add_argument("--json", action="store_true", help="as JSON")
    prices.set_defaults(run=_prices)

    ncu = verbs.add_parser("import-ncu", help="fill SM and memory use per role from Nsight Compute's CSV export")
    ncu.add_argument("csv", metavar="REPORT.csv", help="as written by ncu --csv --page details (or raw)")
    ncu.add_argument("run_name", nargs="?", metavar="RUN", help=WHICH_RUN)
    ncu.set_defaults(run=_import_ncu)

    sweep = verbs.add_parser("sweep", help="the largest batch of a training script, and the step time up to it")
    sweep.add_argument("--batch-sizes", default="auto", metavar="N,N", help="sizes to measure (default: %(default)s)")
    sweep.add_argument("--max-batch", type=int, metavar="N", help="the largest size to try")
    sweep.add_argument("--steps", type=int, default=8, metavar="N", help="micro-batches at each size (default: 8)")
    _takes_script(sweep, _sweep)

    probe = verbs.add_parser("probe", help="20 steps of a training script on this machine, to scale projections by")
    _takes_script(probe, _probe)

    plan = verbs.add_parser("plan", help="memory and largest batch of a fine-tune that has not run, without weights")
    plan.add_argument("--model", required=True, metavar="NAME", help="a known model, a config.json or its folder")
    plan.add_argument("--method", choices=("full", "lora", "qlora"), default="lora")
    plan.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapters (default: %(default)s)")
    plan.add_argument("--targets", nargs="+", metavar="MODULE", help="layers with adapters (default: PEFT's choice)")
    plan.add_argument("--dataset", metavar="FILE", help="rows as JSON or JSONL, whose longest counts")
    plan.add_argument("--seq-len", type=int, metavar="L", help="tokens of a row; with --dataset, where rows are cut")
    plan.add_argument("--batch", type=int, default=8, metavar="B", help="rows of a micro-batch (default: %(default)s)")
    plan.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches of a step")
    plan.add_argument("--grad-checkpointing", action=argparse.BooleanOptionalAction, help="(default: as the trainer)")
    plan.add_argument("--optimizer", default="adamw", metavar="NAME", help="adamw, adamw_8bit, paged_adamw_8bit, ...")
    plan.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights")
    plan.add_argument("--trainer", choices=("sft", "trainer"), default="sft", help="TRL's or transformers' own")
    plan.add_argument("--gpu", nargs="+", action="extend", metavar="NAME", help="GPUs to judge by, or 'all'")
    plan.add_argument("--json", action="store_true", help="as JSON")
    plan.set_defaults(run=_plan)

    validate = verbs.add_parser("validate", help="the estimator against a table of published measurements")
    validate.add_argument("csv", metavar="FILE.csv", help="one measurement a row")
    validate.add_argument("--fast", action="store_true", help="leave out peak memory, which takes minutes and torch")
    validate.set_defaults(run=_validate)

    demo = verbs.add_parser("demo", help="a real run on a CPU: tiny Mixtral, generated rows, under two minutes")
    demo.add_argument("--no-tui", action="store_true", help="print the report only")
    demo.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _takes_script(verb: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    verb.add_argument("script", metavar="SCRIPT.py", help="a script that trains; it runs up to its first train()")
    rest = verb.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="-- ARGS", help="what the script is called with"
    )
    rest.required = False  # or argparse asks for it where the script is missing
    verb.set_defaults(run=run)


def _watch(arguments: argparse.Namespace) -> int:
    from ft_insight.runlog import find_run

    path = find_run(arguments.run_name, may_be_missing=True)
    if not sys.stdout.isatty():
        raise ValueError("watch needs a terminal; `ft-insight report` prints the same as text")
    from ft_insight.tui.app import watch

    message = watch(path)
    if message:
        raise ValueError(message)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from ft_insight.reader import read_run
    from ft_insight.report import render
    from ft_insight.runlog import find_run

    view, status = read_run(find_run(arguments.run_name))
    print(render(view, status, arguments.format))
    return 0


def _project(arguments: argparse.Namespace) -> int:
    import gc

    gc.disable()  # the process ends with the answer, and the collector would walk over a long log many times
    from ft_insight.report.projection import project_text

    runs = [*arguments.run_names, *_paths_at_end(arguments.gpus), *_paths_at_end(arguments.gpu)]
    form = "json" if arguments.json else "markdown" if arguments.markdown else "text"
    print(project_text(runs, _question(arguments, runs), form=form, verbose=arguments.verbose))
    return 0


def _paths_at_end(values: list[str] | None) -> list[str]:
    """Take from the end of an option's values what argparse took for them: ``project --gpu h100 RUN``."""
    paths: list[str] = []
    while values and len(values) > 1 and os.path.exists(values[-1]):
        paths.insert(0, values.pop())
    return paths


def _question(arguments: argparse.Namespace, runs: list[str]) -> dict[str, object]:
    for name in ("queries", "epochs", "seq_len", "batch", "top_k"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= MOST:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most {MOST:g}, not {value}")
    if arguments.price is not None and not 0 <= arguments.price <= MOST:
        raise ValueError(f"--price must be 0 or more and at most {MOST:g}, not {arguments.price:g}")
    names = ("gpu", "queries", "epochs", "seq_len", "price", "prices", "batch", "top_k", "probe")
    question = {name: getattr(arguments, name) for name in names}
    return {**question, "counts": _counts(arguments.gpus), "lengths": _lengths(arguments, runs)}


def _counts(values: list[str] | None) -> tuple[int, ...]:
    given = [part for value in values or () for part in value.split(",")]
    wrong = next((value for value in given if not value.isdecimal() or not 0 < int(value) <= MOST_GPUS), None)
    if wrong is not None:
        raise ValueError(f"--gpus takes numbers from 1 to {MOST_GPUS}, not {wrong!r}")
    return tuple(dict.fromkeys(int(value) for value in given))


def _lengths(arguments: argparse.Namespace, runs: list[str]) -> object:
    """Read and tokenise another data set, cut off and packed as the run's."""
    if arguments.dataset is None and arguments.tokenizer is None:
        return None
    if arguments.dataset is None or arguments.tokenizer is None:
        raise ValueError("--dataset and --tokenizer go together")
    from ft_insight.reader import read_run
    from ft_insight.runlog import find_run
    from ft_insight.token_lengths import lengths_of

    view, _ = read_run(find_run(runs[0] if runs else None), thinned=True)
    train = view.header.train if view.header else None
    most = arguments.seq_len or (train.max_length if train else None)
    return lengths_of(Path(arguments.dataset), arguments.tokenizer, most, train.packing if train else None)


def _compare(arguments: argparse.Namespace) -> int:
    from ft_insight.compare import compare_sections
    from ft_insight.reader import read_run
    from ft_insight.report.layout import to_text
    from ft_insight.runlog import find_run
    from ft_insight.words import headline

    before, after = (read_run(find_run(name))[0] for name in (arguments.before, arguments.after))
    print(to_text(f"before  {headline(before)}\nafter   {headline(after)}", compare_sections(before, after)))
    return 0


def _prices(arguments: argparse.Namespace) -> int:
    from ft_insight.report.prices import prices_text

    print(prices_text(arguments.gpus, file=arguments.prices, refresh=arguments.refresh, as_json=arguments.json))
    return 0


def _import_ncu(arguments: argparse.Namespace) -> int:
    from ft_insight.ncu import import_into
    from ft_insight.runlog import find_run

    print(import_into(find_run(arguments.run_name), Path(arguments.csv)))
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from ft_insight.sweeping.question import check_question, sizes_of

    sizes = check_question(sizes_of(arguments.batch_sizes), arguments.steps, arguments.max_batch)

    def study(trainer: Any, train: Callable[[], Any]) -> Any:
        from ft_insight.sweeping.run import sweep_trainer

        return sweep_trainer(trainer, train, sizes, arguments.steps, max_batch=arguments.max_batch)

    return _measure_script(arguments, study)


def _probe(arguments: argparse.Namespace) -> int:
    def study(trainer: Any, train: Callable[[], Any]) -> Any:
        from ft_insight.sweeping.probe import probe_trainer

        return probe_trainer(trainer, train)

    return _measure_script(arguments, study)


def _measure_script(arguments: argparse.Namespace, study: Callable[[Any, Callable[[], Any]], Any]) -> int:
    from ft_insight.sweeping.script import ScriptFailed, in_script

    given = arguments.arguments[1:] if arguments.arguments[:1] == ["--"] else arguments.arguments
    try:
        result = in_script(arguments.script, given, study)
    except ScriptFailed as failed:
        return failed.code
    print(result.text())
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from ft_insight.report.plan import plan_text

    question = {name: getattr(arguments, name) for name in PLAN_OPTIONS}
    question |= {"checkpointing": arguments.grad_checkpointing, "gpus": arguments.gpu}
    print(plan_text(arguments.model, question, as_json=arguments.json))
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from ft_insight.validate import validate_text

    print(validate_text(Path(arguments.csv), fast=arguments.fast))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from ft_insight.demo.launch import run_demo

    if arguments.steps < 2:
        raise ValueError("--steps must be at least 2")
    return run_demo(Path.cwd(), steps=arguments.steps, tui=not arguments.no_tui and sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
