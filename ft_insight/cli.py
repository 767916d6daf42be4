"""The verbs of ``ft-insight``. Each imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ft_insight import __version__

WHICH_RUN = "a run.jsonl, or a folder of runs (default: the newest run under ft_insight_runs/)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code. What a user can cause ends in one line on stderr and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ValueError as error:  # each of our own errors is a ValueError with a message of one line
        print(f"ft-insight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (head, less) has left; without this the interpreter complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
        "--price", type=float, metavar="USD", help="dollars per hour, of the one --gpu, or of the run's own machine"
    )
    project.add_argument("--json", action="store_true", help="as JSON")
    project.add_argument("--verbose", action="store_true", help="the source and date of every price")
    project.set_defaults(run=_project)

    demo = verbs.add_parser("demo", help="a real run on a CPU: tiny Mixtral, generated rows, under two minutes")
    demo.add_argument("--no-tui", action="store_true", help="print the report only")
    demo.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: %(default)s)")
    demo.set_defaults(run=_demo)
    return parser


def _watch(arguments: argparse.Namespace) -> int:
    from ft_insight.runlog import find_run
    from ft_insight.tui import watch

    path = find_run(arguments.run_name, may_be_missing=True)
    if not sys.stdout.isatty():
        raise ValueError("watch needs a terminal; `ft-insight report` prints the same as text")
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

    print(project_text(arguments.run_name, _question(arguments), as_json=arguments.json, verbose=arguments.verbose))
    return 0


def _question(arguments: argparse.Namespace) -> dict[str, object]:
    for name in ("queries", "epochs", "seq_len"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    if arguments.price is not None and not arguments.price >= 0:
        raise ValueError(f"--price must be 0 or more, not {arguments.price:g}")
    return {name: getattr(arguments, name) for name in ("gpu", "queries", "epochs", "seq_len", "price")}


def _demo(arguments: argparse.Namespace) -> int:
    from ft_insight.demo.launch import run_demo

    if arguments.steps < 2:
        raise ValueError("--steps must be at least 2")
    return run_demo(Path.cwd(), steps=arguments.steps, tui=not arguments.no_tui and sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
