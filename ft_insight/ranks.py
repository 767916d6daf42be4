"""The ranks of one run as one: what each of them logged, merged."""

from __future__ import annotations

import msgspec

from ft_insight import records as r
from ft_insight.experts import ExpertTally, LayerLoad, ModelLoad, model_load
from ft_insight.run_view import Points, Rates, RunView, Totals
from ft_insight.step_sums import COUNTS


def combine(views: list[RunView]) -> RunView:
    """Merge the views of one run's ranks: rank 0 leads, work and expert counts are summed, GPUs stand side by side."""
    lead, *others = views
    missing = _missing_ranks(lead.header, len(views))
    if not others:
        return msgspec.structs.replace(lead, notices=(*lead.notices, *missing)) if missing else lead
    gpus_of = views
    views = _with_different_data(views)
    # a rank whose pass failed must not make two different sets of rows of before and after
    passed = [v for v in views if v.same_rows] or views
    return msgspec.structs.replace(
        lead,
        ranks=len(gpus_of),
        data_ranks=len(views),
        totals=Totals(lead.totals.steps, *(_sum_known([v.totals for v in views], name) for name in COUNTS)),
        rates=_sum_rates([v.rates for v in views]),
        recent=_sum_rates([v.recent for v in views]),
        gpus=tuple(gpu for v in gpus_of for gpu in v.gpus),
        gpu_dropped=sum(v.gpu_dropped for v in gpus_of),
        experts=ExpertTally.merged([v.experts for v in views]),
        experts_start=ExpertTally.merged([v.experts_start for v in views]),
        experts_end=ExpertTally.merged([v.experts_end for v in views]),
        expert_load=_sum_loads([v.expert_load for v in views], [v.experts for v in views]),
        load_start=_sum_loads([v.load_start for v in views], [v.experts_start for v in views]),
        load_end=_sum_loads([v.load_end for v in views], [v.experts_end for v in views]),
        experts_before=ExpertTally.merged([v.experts_before for v in passed]),
        experts_after=ExpertTally.merged([v.experts_after for v in passed]),
        load_before=_sum_loads([v.load_before for v in passed], [v.experts_before for v in passed]),
        load_after=_sum_loads([v.load_after for v in passed], [v.experts_after for v in passed]),
        rows_before=_sum_rows([v.rows_before for v in passed]),
        rows_after=_sum_rows([v.rows_after for v in passed]),
        notices=(*{(n.collector, n.text): n for v in gpus_of for n in v.notices}.values(), *missing),
        unknown_lines=sum(v.unknown_lines for v in views),
        malformed_lines=sum(v.malformed_lines for v in views),
        curves={**lead.curves, **_sum_rate_curves(views)},
    )


def _missing_ranks(header: r.Header | None, found: int) -> tuple[r.Notice, ...]:
    if header is None or found >= header.world_size:
        return ()
    text = f"logs of {found} of {header.world_size} ranks were found: rates and totals are of those"
    return (r.Notice(t_s=0.0, collector="ranks", text=text),)


def _with_different_data(views: list[RunView]) -> list[RunView]:
    """Return one view for each share of the data: ranks that share theirs must not count it twice.

    Those are neighbours, for tensor and context parallelism are the innermost dimensions of a device mesh.
    """
    header = views[0].header
    if header is None or not header.data_parallel_size:
        return views
    together = max(1, header.world_size // header.data_parallel_size)
    return [v for v in views if v.header is None or v.header.rank % together == 0] or views[:1]


def _sum_rate_curves(views: list[RunView]) -> dict[str, Points]:
    """Sum the ranks' curves step by step; a rank that lags behind may have thinned its curve less than others."""
    summed: dict[str, Points] = {}
    for name in ("queries_per_s", "real_tokens_per_s"):
        first, *others = [v.curves.get(name, ()) for v in views]
        by_step = [dict(curve) for curve in others]
        summed[name] = tuple(
            (x, y + sum(curve[x] for curve in by_step)) for x, y in first if all(x in curve for curve in by_step)
        )
    return summed


def _sum_known(items: list[Totals], name: str) -> int | None:
    values = [getattr(item, name) for item in items]
    return None if None in values else sum(values)


def _sum_rows(rows: list[int | None]) -> int | None:
    return sum(known) if (known := [n for n in rows if n is not None]) else None


def _sum_rates(rates: list[Rates]) -> Rates:
    def total(name: str) -> float | None:
        values = [getattr(rate, name) for rate in rates]
        return None if None in values else sum(values)

    return Rates(*(total(name) for name in Rates.__struct_fields__))


def _sum_loads(loads: list[ModelLoad | None], layers: list[tuple[LayerLoad, ...]]) -> ModelLoad | None:
    queries = [load.queries for load in loads if load is not None]
    return model_load(ExpertTally.merged(layers), sum(queries)) if len(queries) == len(loads) else None
