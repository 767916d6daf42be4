"""What-ifs of the Cost tab: another GPU, epochs, price, batch or top-k, and what the run says of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from datetime import date

from ft_insight.catalog import Gpu, Price, PriceBook, books, find_gpu, load_gpus
from ft_insight.estimate import DEFAULT_GPUS, Ask, fit_record, measure, project
from ft_insight.estimate.measured import Measured
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.workload import Workload, workload_of
from ft_insight.records import Fit, Projection, ProjectionRow
from ft_insight.run_view import Points, RunView

EPOCHS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
PRICE_STEP = 1.1
CURVE_POINTS = 48


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is asked instead of what the run was; None is as it was."""

    gpu: str | None = None
    epochs: float | None = None
    price: float | None = None
    """US dollars per hour: of ``gpu``, or without one of the run's own machine."""
    batch: int | None = None
    top_k: int | None = None


AS_IT_WAS = WhatIf()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run says of a what-if."""

    asked: WhatIf
    view: RunView
    measured: Measured | None = None
    projection: Projection | None = None
    fit: Fit | None = None
    curve: Points = ()
    """(queries per micro-batch, queries/s) on the run's own machine, by its model of step time."""
    low: Points = ()
    high: Points = ()
    """Ends of the 80% interval."""
    present: int | None = None
    refusal: str | None = None
    """Why there is nothing to be said; one line."""

    @property
    def here(self) -> ProjectionRow | None:
        """The run's own machine."""
        rows = self.projection.rows if self.projection else ()
        return next((row for row in rows if row.here), None)


def outlook(view: RunView, asked: WhatIf, measured: Measured | None = None) -> Outlook:
    """Ask a run. ``measured`` is what the same view has said before, to spare its fits."""
    if view.header is None or not view.totals.steps:
        return Outlook(asked, view, refusal="there is no finished step yet")
    measured = measured or measure(view)
    fit = fit_record(measured, view.clock_s)
    try:
        workload = workload_of(view, epochs=asked.epochs)
        found = _project(measured, asked, workload)
    except ValueError as error:
        return Outlook(asked, view, measured, fit=fit, refusal=str(error))
    own_top_k = view.header.model.experts_per_token
    # the model of step time is that of the run's own top-k
    told = asked.top_k is None or asked.top_k == own_top_k
    curve, low, high = _curve(measured, workload, found) if told else ((), (), ())
    return Outlook(asked, view, measured, found, fit, curve, low, high, measured.batch)


def _project(measured: Measured, asked: WhatIf, workload: Workload) -> Projection:
    """Project to the GPU that is asked for and the usual ones; a price is of that one, or of the own machine."""
    focus = (find_gpu(asked.gpu),) if asked.gpu else ()
    usual = tuple(gpu for gpu in map(find_gpu, DEFAULT_GPUS) if gpu not in focus)
    own = measured.here is not None and measured.here in focus
    given = () if asked.price is None or not focus or own else (_as_given(focus[0], asked.price / measured.gpu_count),)
    return project(
        measured,
        Ask(
            workload,
            (*focus, *usual),
            price=asked.price if own or not focus else None,
            price_here=True,
            batch=asked.batch,
            top_k=asked.top_k,
            prices=(*given, *books()),
        ),
    )


def _as_given(gpu: Gpu, usd_per_hour: float) -> PriceBook:
    offer = Price("as given", "", "", gpu.name, 1, usd_per_hour, None, date.today().isoformat(), "", "")
    return PriceBook("as given", offer.date, (offer,))


def _curve(measured: Measured, workload: Workload, found: Projection) -> tuple[Points, Points, Points]:
    """Return queries/s against the batch with its interval, up to what fits or twice the present batch."""
    model, batch = measured.step_time, measured.batch
    if isinstance(model, NotIdentifiable) or not batch:
        return (), (), ()
    largest = next((row.largest_batch for row in found.rows if row.here), None)
    last = max(batch, min(largest, 4 * batch) if largest else 2 * batch)
    times, work = measured.accumulation, measured.accumulation * measured.ranks
    rows: list[tuple[float, tuple[float, float, float]]] = []
    for b in sorted({max(1, round(1 + i * (last - 1) / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)}):
        slots = workload.slots(b)
        if slots is None:
            return (), (), ()
        queries = b * workload.queries_per_row * work
        middle, low, high = (queries / (times * s + (measured.rest_s or 0.0)) for s in model.predict(slots))
        rows.append((float(b), (middle, high, low)))
    middle_, low_, high_ = (tuple((b, triple[i]) for b, triple in rows) for i in range(3))
    return middle_, low_, high_


def turned(asked: WhatIf, name: str, by: int, now: Outlook | None) -> WhatIf:
    """Return the what-if with one of its values a step up or down."""
    here = now.here if now else None
    header = now.view.header if now else None
    if name == "gpu":
        return replace(asked, gpu=_turned_gpu(asked.gpu, by), price=None)
    if name == "epochs":
        planned = now.projection.epochs if now and now.projection else None
        return replace(asked, epochs=_step(EPOCHS, asked.epochs or planned or 1, by))
    if name == "batch":
        start = asked.batch or (now.present if now else None) or 1
        return replace(asked, batch=int(_step(BATCHES, start, by)))
    if name == "top_k":
        model = header.model if header else None
        if model is None or not model.experts or not model.experts_per_token:
            return asked
        wanted = (asked.top_k or model.experts_per_token) + by
        return replace(asked, top_k=min(model.experts, max(1, wanted)))
    rows = now.projection.rows if now and now.projection else ()
    focus = here if asked.gpu is None else next((row for row in rows if row.gpu == asked.gpu), None)
    price = asked.price or (focus.usd_per_hour if focus else None) or 1.0
    # at least a cent on, or small prices would not move
    moved = round(max(price * PRICE_STEP, price + 0.01) if by > 0 else min(price / PRICE_STEP, price - 0.01), 2)
    return replace(asked, price=max(0.01, moved))


def _turned_gpu(name: str | None, by: int) -> str | None:
    """Go through the catalogue by name; before its first and after its last stands none."""
    names: list[str | None] = [None, *sorted(gpu.name for gpu in load_gpus())]
    return names[(names.index(name) + by) % len(names)]


def _step(values: tuple[float, ...], value: float, by: int) -> float:
    """Return the next of some values above or below one that may lie between them."""
    at = bisect_right(values, value) if by > 0 else bisect_left(values, value) - 1
    return values[min(len(values) - 1, max(0, at))]
