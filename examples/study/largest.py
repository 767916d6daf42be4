"""The largest batch that fits: by doubling and bisection on a GPU, a stated cap on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from study.runs import NO_MEMORY, Plan, Run, StudyError, execute

from ft_insight.demo.datasets import load_rows
from ft_insight.demo.train import text_of
from ft_insight.reader import read_run
from ft_insight.sweeping import search

CAP = 8
"""Taken for the largest batch where no GPU's memory ends it."""
A_CAP = "a cap, not a measured maximum"
LIMIT = 1024
"""Batches beyond this are not tried."""


@dataclass(frozen=True)
class Largest:
    """A batch, 0 if not even one row fits, and what makes it the largest."""

    batch: int
    basis: str
    measured: bool = False


def largest_batch(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest batch up to ``limit`` that fits, 0 if none does, for a ``fits`` that once false stays so."""
    cap = search.Cap(limit, f"more than {limit} are not tried")
    return search.find_largest(lambda batch: search.Trial(batch, fits(batch)), cap, until_memory=True).largest


def find_largest(plan: Plan, one: Run) -> Largest:
    """Find it for the model of ``one``, whose run at batch 1 tells on what device."""
    if not one.done:
        return Largest(0, f"not searched, as batch 1 failed: {one.outcome}")
    header = read_run(one.log)[0].header
    if header is None or all(device.kind == "cpu" for device in header.devices):
        return Largest(CAP, f"{A_CAP}: this is a CPU")
    rows = _longest_rows(plan)
    tried = 0

    def fits(batch: int) -> bool:
        nonlocal tried
        tried += 1
        probe = plan.probe(one, batch, rows)
        if probe.outcome not in NO_MEMORY:  # known from before the study was cut off
            execute([probe])
        if not probe.done and probe.outcome not in NO_MEMORY:
            raise StudyError(f"{probe.title}: {probe.outcome}")
        return probe.done

    try:
        batch = largest_batch(fits, LIMIT)
    except StudyError as error:
        return Largest(0, f"the search ended early: {error}")
    if batch == 0:
        return Largest(0, "not even one row fits, if it is the longest: out of memory", measured=True)
    how = f"{tried} batches of the longest row tried, doubling and bisection"
    return Largest(batch, how if batch < LIMIT else f"{how}; more than {LIMIT} were not tried", measured=True)


def _longest_rows(plan: Plan) -> Path:
    """Write a data set of the longest row alone: a batch of any rows takes no more memory than one of it."""
    asked = plan.arguments
    rows = load_rows(Path(asked.dataset).expanduser(), asked.rows or None).rows
    longest = max(rows, key=lambda row: len(text_of(row)))
    file = plan.folder / "longest.jsonl"
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(longest) + "\n" for _ in range(2 * LIMIT))
    return file
