"""``ft-insight demo``: starts the training in a process of its own, shows it, and prints the report."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ft_insight.reader import read_run
from ft_insight.report import render
from ft_insight.runlog import LOG_NAME, LOG_VARIABLE, RUNS_FOLDER, RunLogError

NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "psutil")
LAST_WORDS_S = 30.0
"""How long a training that was asked to stop may take to write its end."""


def run_demo(folder: Path, *, steps: int, tui: bool) -> int:
    """Train, watch and report under ``folder``; return the exit code.

    Raises ``ValueError`` with one line if the training libraries are not installed. Leaving the dashboard, or Ctrl-C,
    ends the training early; the report then tells what was measured until then.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the demo trains a model and needs {', '.join(missing)}: pip install 'ft-insight[train]'")
    path = _free_log(folder)
    output = path.with_name("train.log")
    sys.stderr.write(f"training a tiny Mixtral for {steps} steps; log {os.path.relpath(path)}\n")
    with output.open("wb") as sink:
        training = subprocess.Popen(
            [sys.executable, "-m", "ft_insight.demo", "--steps", str(steps)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=_environment(path),
        )
        try:
            _show(path, training, tui=tui)
        except KeyboardInterrupt:
            sys.stderr.write("stopping the training\n")
        finally:
            _stop(training)
    return _tell(path, output, training.returncode)


def _environment(path: Path) -> dict[str, str]:
    # a core is left for the dashboard: two threads that wait for each other on a busy core train ten times slower
    threads = str(max(1, (os.cpu_count() or 2) - 1))
    own = {LOG_VARIABLE: str(path), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **os.environ, **own}


def _free_log(folder: Path) -> Path:
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    runs = folder / RUNS_FOLDER
    name, number = runs / f"{stamp}-demo", 1
    while True:
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            number += 1
            name = runs / f"{stamp}-demo-{number}"
        except OSError as error:
            raise ValueError(
                f"cannot write under {folder}: {error.strerror}; start the demo in another folder"
            ) from None
        else:
            return name / LOG_NAME


def _show(path: Path, training: subprocess.Popen[bytes], *, tui: bool) -> None:
    if tui:
        from ft_insight.tui.app import watch

        message = watch(path, until=lambda: training.poll() is not None)
        if message:
            sys.stderr.write(f"ft-insight: {message}\n")
        return
    training.wait()


def _stop(training: subprocess.Popen[bytes]) -> None:
    """Ask a training that still runs to end in an orderly way, then insist."""
    if training.poll() is None:
        training.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        training.wait(LAST_WORDS_S)
        return
    training.kill()
    training.wait()


def _tell(path: Path, output: Path, code: int) -> int:
    try:
        view, status = read_run(path)
    except RunLogError:
        tail = output.read_text(errors="replace").strip().splitlines()[-5:]
        raise ValueError(
            f"the training ended before its first record; the end of {output}: " + " | ".join(tail)
        ) from None
    print(render(view, status))  # noqa: T201 - the report is what this command is for
    where = os.path.relpath(path)
    print(f"\nAsk again: ft-insight project {where} --gpu all    Look again: ft-insight watch {where}")  # noqa: T201
    if status.kind == "failed":
        sys.stderr.write(f"the training failed; its output is in {output}\n")
        return 1
    return 0 if code in (0, -signal.SIGINT, 130) or status.kind == "interrupted" else 1
