"""The dozen lines that a run ends with."""

from __future__ import annotations

from ft_insight import units
from ft_insight.estimate.memory import room_here
from ft_insight.layer_times import MOE_KINDS, KindTime, by_kind
from ft_insight.memory_words import room_text
from ft_insight.records import Projection
from ft_insight.run_view import RunView
from ft_insight.verdict import findings
from ft_insight.words import clean, fit_text, headline, hours_text, row_text, shares, usd_text

INDENT = 18


def summary_lines(view: RunView, path: str | None = None) -> list[str]:
    """Return at most twelve lines: verdict, evidence, next step, and how to ask for more."""
    lines = [f"ft-insight  {headline(view)}"]
    lines += _row("where time went", _where(view))
    lines += _row("layers", _layers(view))
    lines += _row("experts", _experts(view))
    lines += _row("throughput", _throughput(view))
    lines += _row("fit", fit_text(view.fit) if view.fit else None)
    lines += _row("room", _room(view))
    lines += [line for f in findings(view)[:3] for line in _row("next", clean(f.text, 300) if f.step else None)]
    lines += _row("whole job", _job(view.projection))
    lines += _row("cost of this", _own_cost(view))
    if path is not None:
        lines.append(f"  ft-insight watch|report|project {clean(path, 1000)}")
    return lines[:12]


def _row(name: str, text: str | None) -> list[str]:
    return [f"  {name:<{INDENT - 2}}{text}"] if text else []


def _where(view: RunView) -> str | None:
    if not view.phases:
        return "no step was finished"
    text = shares(view.phases)
    if view.idle_at_most is not None:
        text += f"  (the GPU idle at most {units.share(view.idle_at_most)})"
    apart = shares(tuple(p for p in view.outside if p.name in ("baseline", "evaluation", "saving")))
    return f"{text}  (of the run: {apart})" if apart else text


def _layers(view: RunView) -> str | None:
    kinds = by_kind(view.layers)
    if not kinds:
        return None
    moe = sum(k.share for k in kinds if k.kind in MOE_KINDS)
    parts = [f"MoE {units.share(moe)} (experts {units.share(_share(kinds, 'experts'))})"] if moe else []
    parts += [f"{clean(k.words, 40)} {units.share(k.share)}" for k in kinds if k.kind not in MOE_KINDS]
    return "  ".join(parts[:5])


def _share(kinds: tuple[KindTime, ...], name: str) -> float:
    return next((k.share for k in kinds if k.kind == name), 0.0)


def _experts(view: RunView) -> str | None:
    if not view.experts:
        return None
    worst = max(view.experts, key=lambda load: load.max_over_mean)
    text = (
        f"{clean(worst.layer)}: expert {worst.worst} takes {units.share(max(worst.shares))} of tokens "
        f"(even: {units.share(worst.ideal)}), the most uneven of {len(view.experts)} layers"
    )
    change = view.load_change
    if change is None or change.rows is None or change.model_start is None or change.model_end is None:
        return text
    before, after = (units.significant(load.variance_n) for load in (change.model_start, change.model_end))
    return f"{text}; variance {before} -> {after} on {change.basis}"


def _throughput(view: RunView) -> str | None:
    rates = view.rates
    if view.totals.steps == 0:
        return None
    text = f"{units.rate(rates.queries_per_s, 'queries')}, {units.rate(rates.real_tokens_per_s, 'tokens')}"
    padding = view.totals.padding_share
    if padding is not None:
        text += f" (slots {units.rate(rates.slots_per_s)}: {units.share(padding)} padding)"
    return text


def _room(view: RunView) -> str | None:
    found = room_here(view)
    return None if isinstance(found, str) else room_text(found)


def _job(projection: Projection | None) -> str | None:
    if projection is None or not projection.rows:
        return None
    here, *others = projection.rows
    text = f"{clean(projection.job or '')}: {hours_text(here.hours)} here"
    if here.usd is not None:
        text += f", {usd_text(here.usd)}"
    cheapest = min((r for r in others if r.usd is not None), key=lambda r: r.usd[0] if r.usd else 0.0, default=None)
    if cheapest is not None and cheapest.usd_per_hour is not None:
        text += f" · {row_text(cheapest)} at {units.money(cheapest.usd_per_hour)}/h (estimate)"
    return text


def _own_cost(view: RunView) -> str | None:
    return None if view.self_share is None else f"ft-insight took {units.share(view.self_share)} of step time"
