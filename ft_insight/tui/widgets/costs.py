"""Cost: what the run costs here, what the whole job would cost elsewhere, and the fit that this rests on."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from ft_insight import units
from ft_insight.column_groups import grouped
from ft_insight.records import Fit, Projection, ProjectionRow
from ft_insight.tui.frame import Frame
from ft_insight.tui.what_if import AS_IT_WAS
from ft_insight.tui.widgets.cost_curve import batch_chart
from ft_insight.tui.widgets.plots import Axis, Layer, chart, tick
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    MARK,
    QUIET,
    STRONG,
    Cell,
    clean,
    cut,
    figure,
    flow,
    joined,
    table,
    words,
    wrap,
)
from ft_insight.words import batch_text, estimate, hours_text, largest_text, reasons, row_name, usd_text

LATER = "comes at the end of the run; or: ft-insight project RUN"
LEAST_SOURCE = 8
"""Columns that must be left for where a price comes from."""


def run_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the dollars of this run, at the price that its user stated."""
    view = frame.view
    price = view.header.price_usd_per_hour if view.header else None
    lines = [
        joined(
            [
                words(("so far ", ""), figure(units.money(view.usd_so_far))),
                words(
                    ("at its end ", ""),
                    figure(units.money(view.usd_so_far if frame.status.over else view.usd_at_end)),
                ),
                words(("price ", ""), figure(units.money(price)), " per hour" if price is not None else ""),
            ]
        )
    ]
    if price is None and view.header is not None:
        lines += wrap(f"{units.NA}: the price of this machine was not stated", width, QUIET)
    return lines


def projection_title(frame: Frame) -> Text:
    """Head the table with the job that it is of."""
    job = _job(frame)
    if job is None:
        return Text("the whole job")
    size = f"{units.count(job.queries)} rows x {units.NA if job.epochs is None else tick(job.epochs)} epochs"
    return words(("the whole job", ""), f" · {clean(job.job, 60) if job.job else size}")


def projection_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw time and dollars of the whole job on every GPU, each estimate with its interval."""
    job = _job(frame)
    asked = what_if_lines(frame, width)
    if job is None:
        refusal = frame.outlook.refusal if frame.outlook else None
        return [*asked, *wrap(f"{units.NA}: {refusal}" if refusal else LATER, width, QUIET)]
    lines = [cut(line, width) for line in _tables(job.rows, width)]
    for text in reasons(job):
        lines += wrap(f"{units.NA}: {clean(text)}", width, QUIET, most=2, indent=2)
    return [*asked, *lines, *_marks(job, width), Text("[ ] 80% interval · ◂ this run's GPU", QUIET)]


def _job(frame: Frame) -> Projection | None:
    """Return the projection of what is asked now; as it was, a finished run has its own in the log."""
    found = frame.outlook
    if found is None or (frame.what_if == AS_IT_WAS and frame.view.projection is not None):
        return frame.view.projection
    return found.projection


def what_if_lines(frame: Frame, width: int) -> list[Text]:
    """Say what is asked instead of what the run was, and by which keys."""
    asked = frame.what_if
    values = [
        ("g", "GPU", asked.gpu),
        ("e", "epochs", None if asked.epochs is None else tick(asked.epochs)),
        ("d", "dollars/h", None if asked.price is None else f"{asked.price:.2f}"),
        ("b", "batch", None if asked.batch is None else units.count(asked.batch)),
    ]
    if frame.view.header is not None and frame.view.header.model.experts:
        values.append(("t", "top-k", None if asked.top_k is None else units.count(asked.top_k)))
    parts = [
        words((key, f"bold {CURVE}"), f" {name}", (f" {clean(value, 24)}" if value else "", ATTENTION))
        for key, name, value in values
    ]
    back = [words(("0", f"bold {CURVE}"), " as it was")] if asked != AS_IT_WAS else []
    waiting = frame.outlook is not None and frame.outlook.asked != asked
    parts[0] = words("working it out: " if waiting else "what if: ", parts[0])
    return flow([*parts, *back, words("capitals go back")], width, most=4)


def _marks(job: Projection, width: int) -> list[Text]:
    """Name the rows that stand out, and what bounds them; on a table's row there is no room for it."""
    named = [
        words(
            f"{clean(', '.join(row.marks), 60)} ",
            (row_name(row), STRONG),
            f", bound by {clean(row.bound_by, 30)}" if row.bound_by else "",
        )
        for row in job.rows
        if row.marks
    ]
    return flow(named, width, most=3) if named else []


def _tables(rows: tuple[ProjectionRow, ...], width: int) -> list[Text]:
    """Set what is asked first in front; what ``width`` is too small for stands below, beside the names again."""
    names: list[Cell] = ["GPU", *(_name(row) for row in rows)]
    columns: list[list[Cell]] = [
        names,
        _merged("queries/s", [_rate(row) for row in rows]),
        _merged("time", [_parted(hours_text(row.hours)) for row in rows]),
        _merged("dollars", [_parted(usd_text(row.usd)) for row in rows]),
        ["$/h", *(figure(units.money(row.usd_per_hour), "") for row in rows)],
        ["memory", *(figure(units.NA if row.memory_gb is None else f"{tick(row.memory_gb)} GB", "") for row in rows)],
        ["largest batch", *(figure(largest_text(row), "") for row in rows)],
        ["batch", *(figure(batch_text(row), "") for row in rows)],
        ["price", *(clean(row.price_source or units.NA, 30) for row in rows)],
    ]
    gap = 1 if width < 120 else 2
    widths = [max(cell.cell_len if isinstance(cell, Text) else cell_len(cell) for cell in column) for column in columns]
    widths[-1] = min(widths[-1], LEAST_SOURCE)  # the rest of a source may be cut off
    lines: list[Text] = []
    for group in grouped(widths, width, gap):
        lines += [Text()] if lines else []
        chosen = [columns[i] for i in (0, *group)]
        align = "<" + "".join(_ALIGN[i] for i in group)
        lines += table(list(zip(*chosen, strict=True)), align, gap)
    return lines


_ALIGN = "<<<<>>>><"


def _merged(head: str, pairs: list[list[Cell]]) -> list[Cell]:
    """Make one column of figures and their intervals, with the figures aligned."""
    return [head, *table(pairs, "><", gap=1)]


def _name(row: ProjectionRow) -> Text:
    return words((clean(row_name(row), 22), STRONG if row.here else ""), (" ◂" if row.here else "", CURVE))


def _rate(row: ProjectionRow) -> list[Cell]:
    value, ends = _parted(estimate(row.queries_per_s))
    return [value, "measured" if row.queries_per_s is not None and not ends else ends]


def _parted(text: str) -> list[Cell]:
    """Part a figure from its interval, to align the one and to set the other quietly."""
    value, bracket, ends = text.partition(" [")
    return [figure(value), f"[{ends}" if bracket else ""]


def fit_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the step-time model with its intervals, and throughput by batch, or else the fitted micro-batches."""
    fit = _fit(frame)
    nothing = units.NA if frame.status.over else LATER
    lines = wrap(nothing, width, QUIET) if fit is None else _fit_facts(fit, width)
    drawn = batch_chart(frame, width, max(8, height - len(lines)))
    if drawn:
        return [*lines, *drawn]
    points = tuple(
        (float(m.slots), m.compute_s) for m in frame.view.micro if m.slots is not None and m.compute_s is not None
    )
    if len(points) < 3 or width < 24:
        return lines
    layers = [Layer(points, CURVE, joined=False)]
    if fit is not None and fit.identifiable:
        layers.append(Layer(_model(fit, max(x for x, _ in points)), MARK))
    axes = Axis(lambda s: f"{tick(s)} s", low=0.0), Axis(lambda n: f"{units.count(n)} slots", low=0.0)
    return [*lines, *chart(layers, width, max(7, height - len(lines)), *axes)]


def fit_title(frame: Frame) -> Text:
    """Head the model."""
    if frame.outlook is not None and frame.outlook.curve:
        return words(("throughput by batch", ""), " · by the fitted time of a micro-batch")
    fit = _fit(frame)
    drawn = (("  ━", MARK), " fit") if fit is not None and fit.identifiable else ()
    return words(("seconds of a micro-batch, by its slots", ""), *drawn)


def _fit(frame: Frame) -> Fit | None:
    """Return the fit in the log; that of a live run is worked out while one looks."""
    return frame.view.fit or (frame.outlook.fit if frame.outlook is not None else None)


def _fit_facts(fit: Fit, width: int) -> list[Text]:
    if not fit.identifiable:
        return wrap(f"{units.NA}: {clean(fit.reason or 'the run does not identify the model')}", width, QUIET)
    number = units.NA if fit.exponent is None else tick(fit.exponent)
    spread = units.NA
    if fit.slots_range is not None:
        spread = f"{units.count(fit.slots_range[0])}-{units.count(fit.slots_range[1])}"
    formula = words(
        *(("seconds = (fixed", ""), "^n", (" + (per slot x slots)", ""), "^n", (")", ""), "^1/n"),
        *("  n ", figure(number)),
    )
    facts = [
        words(("fixed ", ""), figure(units.duration(fit.fixed_s)), _within(fit.fixed_interval_s)),
        words(("per slot ", ""), figure(units.duration(fit.per_slot_s)), _within(fit.per_slot_interval_s)),
        words(("rest of a step ", ""), figure(units.duration(fit.rest_s))),
        words(("median error ", ""), figure(units.share(fit.error))),
        words(f"{units.count(fit.points)} micro-batches of {spread} slots"),
    ]
    return [cut(formula, width), *flow(facts, width, most=3)]


def _within(ends: tuple[float, float] | None) -> str:
    return f" [{units.duration(ends[0])}-{units.duration(ends[1])}]" if ends else ""


def _model(fit: Fit, most: float) -> tuple[tuple[float, float], ...]:
    fixed, slope, n = fit.fixed_s or 0.0, fit.per_slot_s or 0.0, fit.exponent or 1.0
    steps = [most * i / 80 for i in range(81)]
    return tuple((x, (fixed**n + (slope * x) ** n) ** (1 / n)) for x in steps)
