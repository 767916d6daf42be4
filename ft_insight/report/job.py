"""The whole job as a table: what each GPU holds, how fast it is, what it takes and costs, and what bounds it."""

from __future__ import annotations

from ft_insight import units
from ft_insight.records import Projection, ProjectionRow
from ft_insight.report.layout import Section
from ft_insight.words import batch_text, clean, estimate, hours_text, largest_text, reasons, row_name, usd_text

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
    together = ", of all GPUs of a row together" if any((row.gpus or 1) > 1 for row in projection.rows) else ""
    after = [f"intervals 80%, of the largest batch 90%; prices{together}: {prices}"]
    after += [
        f"{row_name(row)}: a step holds {_changed(projection, row)}"
        for row in projection.rows
        if _grown(projection, row)
    ]
    # several numbers of one GPU may share a source; a dict keeps the order
    sources = dict.fromkeys((clean(r.gpu), clean(r.price_source)) for r in projection.rows if r.price_source)
    if verbose or len(sources) <= MOST_SOURCES:
        after += [f"{gpu}: {source}" for gpu, source in sources]
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


def _row(row: ProjectionRow) -> tuple[str, ...]:
    return (
        row_name(row) + (" (here)" if row.here else ""),
        f"{row.memory_gb:g} GB" if row.memory_gb else units.NA,
        largest_text(row),
        batch_text(row),
        estimate(row.queries_per_s),
        estimate(row.present_queries_per_s),
        hours_text(row.hours),
        units.NA if row.usd_per_hour is None else f"{row.usd_per_hour:.2f}",
        usd_text(row.usd),
        clean(row.bound_by or units.NA, 20),
        ("◂ " + ", ".join(clean(mark, 20) for mark in row.marks)) if row.marks else "",
        clean(row.basis or "", 80),
    )
