"""The whole job as a table: what each GPU holds, how fast it is, what it takes and costs, and what bounds it."""

from __future__ import annotations

from ft_insight import units
from ft_insight.records import Projection, ProjectionRow
from ft_insight.report.layout import Section
from ft_insight.words import clean, estimate, hours_text, largest_text, reasons, usd_text

HEAD = (
    "GPU",
    "memory",
    "largest batch",
    "batch",
    "queries/s",
    "at the run's batch",
    "time",
    "$/h",
    "dollars",
    "bound by",
    "",
    "basis",
)
MOST_SOURCES = 8


def projection_sections(projection: Projection, *, verbose: bool = False) -> list[Section]:
    """Return the table of GPUs, the prices it rests on, and what cannot be known."""
    rows = (HEAD, *(_row(row) for row in projection.rows))
    prices = clean(projection.prices or "as in the log", 300)
    after = [f"intervals 80%, of the largest batch 90%; prices, of all GPUs of a row together: {prices}"]
    after += [
        f"{_name(row)}: a step holds {_changed(projection, row)}" for row in projection.rows if _grown(projection, row)
    ]
    sources = {clean(r.gpu): clean(r.price_source) for r in projection.rows if r.price_source}
    if verbose or len(sources) <= MOST_SOURCES:
        after += [f"{gpu}: {source}" for gpu, source in sources.items()]
    else:
        after.append("the source and date of each price: --verbose")
    return [
        Section(f"The whole job: {clean(projection.job or 'unknown')}", table=rows, after=tuple(after)),
        Section("Not known from this run", tuple(clean(r, 300) for r in reasons(projection))),
    ]


def _own_global(projection: Projection) -> float | None:
    return next((row.global_batch for row in projection.rows if row.here), None)


def _grown(projection: Projection, row: ProjectionRow) -> bool:
    """Whether a row trains with another global batch than the run did."""
    own = _own_global(projection)
    return bool(own and row.global_batch and abs(row.global_batch / own - 1) > 0.02)


def _changed(projection: Projection, row: ProjectionRow) -> str:
    return f"{row.global_batch:g} queries there, {_own_global(projection):g} in this run; --batch N sets another"


def _name(row: ProjectionRow) -> str:
    times = f"{row.gpus}x " if row.gpus and row.gpus > 1 else ""
    return times + clean(row.gpu, 40)


def _row(row: ProjectionRow) -> tuple[str, ...]:
    return (
        _name(row) + (" (here)" if row.here else ""),
        f"{row.memory_gb:g} GB" if row.memory_gb else units.NA,
        largest_text(row),
        _batch(row),
        estimate(row.queries_per_s),
        estimate(row.present_queries_per_s),
        hours_text(row.hours),
        units.NA if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}",
        usd_text(row.usd),
        clean(row.bound_by or units.NA, 20),
        ("◂ " + ", ".join(clean(mark, 20) for mark in row.marks)) if row.marks else "",
        clean(row.basis or "", 80),
    )


def _batch(row: ProjectionRow) -> str:
    if row.batch is None:
        return units.NA
    return f"{row.batch} x {row.accumulation:g}" if row.accumulation and row.accumulation > 1 else str(row.batch)
