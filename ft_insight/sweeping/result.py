"""What a sweep found, read back from its log, and how it is told."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ft_insight import records as r
from ft_insight import units
from ft_insight.reader import read_run
from ft_insight.report.layout import Section, to_text
from ft_insight.runlog import read_records
from ft_insight.stats import median
from ft_insight.step_sums import work_of
from ft_insight.sweeping.search import Trial
from ft_insight.words import clean, fit_text, headline


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch size on typical rows; medians over its steps."""

    batch: int
    micro_batches: int
    slots: float | None
    """Positions of a micro-batch, padding included."""
    micro_batch_s: float | None
    """Forward, loss, recomputation and backward of a micro-batch."""
    queries_per_s: float | None
    """Of this process, over whole optimizer steps."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Where a sweep's log is, the largest batch, and why it is not larger."""

    path: Path
    largest: int
    reason: str
    longest: int | None
    """Tokens of the longest row."""
    basis: str
    """Which rows the largest batch was found on."""
    trials: tuple[Trial, ...]

    def sizes(self) -> tuple[Measured, ...]:
        """Return what each size took; steps that warmed up, or took longer for being looked at, are left out."""
        _, stream = read_records(self.path)
        header: r.Header | None = None
        steps: dict[int, list[r.Step]] = defaultdict(list)
        warm = False
        for record in stream:
            if isinstance(record, r.Header):
                header, warm = record, False
                steps.clear()
            elif isinstance(record, r.Step):
                batch = record.other_batch or (header.train.batch if header else None)
                if warm and batch is not None and not record.profiled:
                    steps[batch].append(record)
                warm = True
        return tuple(_measured(batch, steps[batch]) for batch in sorted(steps))

    def text(self) -> str:
        """Tell what was found, for a terminal."""
        view, _ = read_run(self.path)
        rows = f"{self.longest:,} tokens, " if self.longest else ""
        table: list[tuple[str, ...]] = [("batch", "slots", "micro-batch", "queries/s")]
        table += [_line(size) for size in self.sizes()]
        where = clean(os.path.relpath(self.path), 1000)
        sections = [
            Section(
                "Largest batch", (f"{self.largest:,}, on the longest rows ({rows}of {self.basis}): {self.reason}",)
            ),
            Section("Batch sizes, on typical rows", table=tuple(table)),
            Section("Step time", (fit_text(view.fit),)),
            Section("Next", (f"ft-insight project {where} --gpu all",)),
        ]
        return to_text(headline(view), sections)


def _measured(batch: int, steps: list[r.Step]) -> Measured:
    micro = [m for step in steps for m in step.micro]
    rates = []
    for step in steps:
        queries = work_of(step)[0]
        if queries is not None and step.wall_s > 0:
            rates.append(queries / step.wall_s)
    return Measured(
        batch,
        len(micro),
        median([m.slots for m in micro if m.slots is not None]),
        median([m.compute_s for m in micro if m.compute_s is not None]),
        median(rates),
    )


def _line(size: Measured) -> tuple[str, ...]:
    rate = units.NA if size.queries_per_s is None else units.significant(size.queries_per_s)
    return f"{size.batch:,}", units.count(size.slots), units.duration(size.micro_batch_s), rate
