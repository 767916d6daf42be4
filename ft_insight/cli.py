"""The verbs of ``ft-insight``. Each imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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

    ncu = verbs.add_parser("import-ncu", help="fill SM and memory use per role from Nsight Compute's CSV export")
    ncu.add_argument("csv", metavar="REPORT.csv", help="as written by ncu --csv --page details (or raw)")
    ncu.add_argument("run_name", nargs="?", metavar="RUN", help=WHICH_RUN)
    ncu.set_defaults(run=_import_ncu)

    demo = verbs.add_parser("demo", help="a real run on a CPU: tiny Mixtral, generated rows, under two minutes")
    demo.add_argument("--no-tui", action="store_true", help="print the report only")
    demo.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


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


def _import_ncu(arguments: argparse.Namespace) -> int:
    from ft_insight.ncu import import_into
    from ft_insight.runlog import find_run

    print(import_into(find_run(arguments.run_name), Path(arguments.csv)))
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from ft_insight.demo.launch import run_demo

    if arguments.steps < 2:
        raise ValueError("--steps must be at least 2")
    return run_demo(Path.cwd(), steps=arguments.steps, tui=not arguments.no_tui and sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
