"""The runs of the study: what each is, where it lies, whether it is done, and how none of them ends the others."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from study.worker import OUT_OF_MEMORY

from ft_insight.reader import read_run
from ft_insight.runlog import RunLogError

DENSE, SPARSE = 8, 2
"""Experts per token, of 8."""
PROFILED_STEP = 6
"""The step whose kernels are recorded, or the last one of a shorter run: the first ones warm up."""
EXAMPLES = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("worker.py")
KILLED = "killed, as the kernel does where the host's memory is out"
NO_MEMORY = (OUT_OF_MEMORY, KILLED)


class StudyError(ValueError):
    """A study that cannot go on; the message is one line."""


@dataclass(frozen=True)
class Run:
    """One run of an example's trainer. ``name`` is ``batch1`` or ``largest``, or that of a probe."""

    model: str
    top_k: int
    batch: int
    name: str
    folder: Path
    words: tuple[str, ...]
    """What the example is called with."""

    @property
    def kind(self) -> str:
        return "dense" if self.top_k == DENSE else "sparse"

    @property
    def title(self) -> str:
        return f"{self.model} {self.kind}, batch {self.batch}"

    @property
    def log(self) -> Path:
        return self.folder / "run.jsonl"

    @property
    def done(self) -> bool:
        """Whether its log is there and tells of an orderly end."""
        try:
            return read_run(self.log)[1].kind == "completed"
        except RunLogError:
            return False

    @property
    def outcome(self) -> str | None:
        """How it ended otherwise: ``out of memory``, or why it failed; None if it has not ended."""
        file = self.folder / "outcome.json"
        return json.loads(file.read_text(encoding="utf-8"))["outcome"] if file.exists() else None

    def say(self, outcome: str) -> None:
        """Note how it ended."""
        (self.folder / "outcome.json").write_text(json.dumps({"outcome": outcome}), encoding="utf-8")


class Plan:
    """Makes the runs of a study out of its settings."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder: Path = arguments.output.resolve()
        self.models = [m for m in ("mixtral", "blackmamba") if arguments.tiny or getattr(arguments, m)]

    def run(self, model: str, top_k: int, batch: int, name: str) -> Run:
        """Return one of the eight runs."""
        asked = self.arguments
        words: list[object] = []
        if name == "largest" and asked.epochs:
            words += ["--epochs", asked.epochs, "--eval-rows", asked.eval_rows]
        else:
            words += ["--steps", asked.steps, "--eval-rows", 0]
        if asked.dataset:
            words += ["--dataset", Path(asked.dataset).expanduser().resolve()]
        if asked.rows:
            words += ["--limit", asked.rows]
        profiled = PROFILED_STEP if name == "largest" and asked.epochs else min(PROFILED_STEP, asked.steps)
        return self._made(model, top_k, batch, name, [*words, "--profile", profiled])

    def probe(self, one: Run, batch: int, rows: Path) -> Run:
        """Return a run that shows whether a batch of the longest rows fits: two steps, the first makes the states."""
        words = ["--steps", 2, "--eval-rows", 0, "--dataset", rows, "--limit", 2 * batch]
        return self._made(one.model, one.top_k, batch, f"probe{batch}", words)

    def _made(self, model: str, top_k: int, batch: int, name: str, words: Sequence[object]) -> Run:
        kind = "dense" if top_k == DENSE else "sparse"
        folder = self.folder / f"{model}-{kind}-{name}"
        weights = ["--tiny"] if self.arguments.tiny else ["--model", getattr(self.arguments, model)]
        shape = ["--top-k", top_k, "--batch", batch, "--max-length", self.arguments.max_length]
        every = [*weights, *shape, *words, "--log", folder / "run.jsonl"]
        return Run(model, top_k, batch, name, folder, tuple(map(str, every)))


def execute(runs: Sequence[Run], *, together: bool = False) -> None:
    """Run what is not done yet. Each has a process of its own, whose end returns all memory that it took.

    ``together`` has one process do them in turn: right for tiny models, which take longer to start than to run.
    """
    pending = [run for run in runs if not run.done]
    for run in pending:
        run.folder.mkdir(parents=True, exist_ok=True)
        for left_over in (run.log, run.folder / "outcome.json"):
            left_over.unlink(missing_ok=True)
    while pending:
        some = pending if together else pending[:1]
        code = _work(some)
        ended = [run for run in some if run.done or run.outcome is not None]
        if len(ended) < len(some):  # the process is gone, and took the run with it that it was at
            broken = next(run for run in some if run not in ended)
            broken.say(KILLED if code == -signal.SIGKILL else f"its process ended with code {code}")
            print(f"{broken.title}: {broken.outcome}", flush=True)
            ended.append(broken)
        pending = [run for run in pending if run not in ended]


def _work(runs: Sequence[Run]) -> int:
    asked = [
        {"title": r.title, "script": str(EXAMPLES / r.model / "finetune.py"), "words": r.words, "folder": str(r.folder)}
        for r in runs
    ]
    command = [sys.executable, str(WORKER), json.dumps(asked)]
    # read by torch when it is loaded: threads that spin while they wait slow a shared CPU down
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode
