"""The verbs of ``ft-insight``. Each imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ft_insight import __version__

WHICH_RUN = "a run.jsonl, or a folder of runs (default: the newest run under ft_insight_runs/)"

MOST = 1e15
"""Nobody trains on more; numbers beyond it are typing errors, and end in infinite hours."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code. What a user can cause ends in one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets a ?, not a traceback
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
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
    project.add_argument("run_name", nargs="?", metavar="RUN", help=WHICH_RUN)
    project.add_argument("--gpu", nargs="+", action="extend", metavar="NAME", help="GPUs to project to, or 'all'")
    project.add_argument("--queries", type=int, metavar="N", help="rows of the training set (default: as in the run)")
    project.add_argument("--epochs", type=float, metavar="E", help="(default: num_train_epochs of the run)")
    project.add_argument("--seq-len", type=int, metavar="L", help="tokens of every row (default: the run's lengths)")
    project.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="dollars per hour, of the one --gpu, or of the run's own machine",
    )
    project.add_argument("--json", action="store_true", help="as JSON")
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

    demo = verbs.add_parser("demo", help="a real run on a CPU: tiny Mixtral, generated rows, under two minutes")
    demo.add_argument("--no-tui", action="store_true", help="print the report only")
    demo.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _takes_script(verb: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    verb.add_argument("script", metavar="SCRIPT.py", help="a script that trains; it runs up to its first train()")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGS", help="what the script is called with")
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
    from ft_insight.report.projection import project_text

    run_name, gpus = arguments.run_name, arguments.gpu
    if run_name is None and gpus and len(gpus) > 1 and os.path.exists(gpus[-1]):
        run_name = gpus.pop()  # `project --gpu h100 RUN`: argparse takes the run for one more GPU
    print(project_text(run_name, _question(arguments), as_json=arguments.json, verbose=arguments.verbose))
    return 0


def _question(arguments: argparse.Namespace) -> dict[str, object]:
    for name in ("queries", "epochs", "seq_len"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= MOST:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 and at most {MOST:g}, not {value}")
    if arguments.price is not None and not 0 <= arguments.price < math.inf:
        raise ValueError(f"--price must be 0 or more, not {arguments.price:g}")
    return {name: getattr(arguments, name) for name in ("gpu", "queries", "epochs", "seq_len", "price")}


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


def _demo(arguments: argparse.Namespace) -> int:
    from ft_insight.demo.launch import run_demo

    if arguments.steps < 2:
        raise ValueError("--steps must be at least 2")
    return run_demo(Path.cwd(), steps=arguments.steps, tui=not arguments.no_tui and sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
