"""The sentences that readers share: a run's headline, its fit and its projection in words, plain text only."""

from __future__ import annotations

import re

from ft_insight import units
from ft_insight.records import Fit, Projection, ProjectionRow
from ft_insight.run_view import RunView, Share

PHASE_WORDS = {"data_wait": "data"}
_ESCAPE_CODE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_CONTROL = re.compile(
    # C0, DEL, C1; marks and overrides of writing direction; line and paragraph separators; surrogates
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str, limit: int = 200) -> str:
    """Make text from a log safe to print: no control characters, no escape codes, of bounded length."""
    plain = _CONTROL.sub(" ", _ESCAPE_CODE.sub("", text[: 4 * limit]))
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def headline(view: RunView) -> str:
    """Run, model, method, device, steps, time, money so far, on one line."""
    header = view.header
    parts = [
        clean(header.run_id) if header else "",
        clean(view.title),
        clean(view.device),
        f"{units.count(view.step)} step{'s' if view.step != 1 else ''}",
        units.duration(view.elapsed_s),
    ]
    if view.usd_so_far is not None:
        parts.append(units.money(view.usd_so_far))
    return " · ".join(p for p in parts if p)


def phase_word(name: str) -> str:
    """Return what a phase of the ledger is called where there is little room."""
    return clean(PHASE_WORDS.get(name, name), 40)


def shares(parts: tuple[Share, ...], least: float = 0.0005) -> str:
    """Return ``data 0.4%  forward 22% ...``, without what is next to nothing."""
    return "  ".join(f"{phase_word(p.name)} {units.share(p.share)}" for p in parts if p.share >= least)


def fit_text(fit: Fit | None) -> str:
    """Return the fitted step-time model as a formula with its error, or why there is none."""
    if fit is None:
        return "not fitted yet"
    if not fit.identifiable or fit.fixed_s is None or fit.per_slot_s is None:
        return clean(fit.reason or "not identifiable", 300)
    h, c = units.significant(fit.fixed_s), units.significant(fit.per_slot_s * 1e3)
    if fit.exponent == 1:
        formula = f"{h} + {c}·kslots"
    elif fit.exponent == 2:
        formula = f"sqrt({h}² + ({c}·kslots)²)"
    else:
        n = f"{fit.exponent:g}"
        formula = f"({h}^{n} + ({c}·kslots)^{n})^(1/{n})"
    low, high = fit.slots_range or (0, 0)
    error = f", ±{units.share(fit.error)}" if fit.error is not None else ""
    return f"T = {formula} s a micro-batch{error} over {low:,}-{high:,} slots"


def estimate(triple: tuple[float, float, float] | None, show: object = units.significant) -> str:
    """Return ``4.90 [4.30-5.50]``, or n/a."""
    if triple is None:
        return units.NA
    middle, low, high = triple
    text = show(middle) if callable(show) else str(middle)
    return text if low == high else f"{text} {units.interval(low, high)}"


def batch_text(row: ProjectionRow) -> str:
    """Return ``4``, or ``4 x 8`` where micro-batches are accumulated: what a row's figures are of; or n/a."""
    if row.batch is None:
        return units.NA
    return f"{row.batch:,} x {row.accumulation:g}" if row.accumulation and row.accumulation > 1 else f"{row.batch:,}"


def largest_text(row: ProjectionRow) -> str:
    """Return ``18 [16-19]``, queries per micro-batch of the longest rows with their interval, or n/a."""
    if row.largest_batch is None or row.largest_interval is None or len(set(row.largest_interval)) == 1:
        return units.count(row.largest_batch)
    low, high = row.largest_interval
    return f"{units.count(row.largest_batch)} [{units.count(low)}-{units.count(high)}]"


def hours_text(triple: tuple[float, float, float] | None) -> str:
    """Return hours with their interval, all in one unit: ``8.5 h [7.6-9.6]``, ``3.2 min [2.9-3.5]``, ``2.00 d``."""
    if triple is None:
        return units.NA
    factor, unit = next(((f, u) for least, f, u in _TIME_UNITS if triple[0] >= least), (3600.0, "s"))
    middle, low, high = (t * factor for t in triple)
    text = f"{units.significant(middle)} {unit}"
    return text if low == high else f"{text} {units.interval(low, high)}"


_TIME_UNITS = ((240.0, 1 / 24, "d"), (1.0, 1.0, "h"), (1 / 60, 60.0, "min"))


def usd_text(triple: tuple[float, float, float] | None) -> str:
    """Return dollars with their interval: ``$17.90 [$16-$20]``."""
    if triple is None:
        return units.NA
    middle, low, high = triple
    return units.money(middle) if low == high else f"{units.money(middle)} [{units.money(low)}-{units.money(high)}]"


def row_name(row: ProjectionRow) -> str:
    """Return what a projection's row is of: ``A40``, ``8x H100-80GB-SXM``."""
    return f"{row.gpus}x {clean(row.gpu, 40)}" if row.gpus and row.gpus > 1 else clean(row.gpu, 40)


def row_text(row: ProjectionRow) -> str:
    """Return a projection's row as part of a sentence."""
    text = f"{row_name(row)} {hours_text(row.hours)}"
    return text if row.usd is None else f"{text}, {usd_text(row.usd)}"


def reasons(projection: Projection) -> list[str]:
    """Say once for each field what cannot be known and why, with the GPUs that it is said of."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in projection.rows:
        for field, why in row.unknown.items():
            by_reason.setdefault((field, why), []).append(row_name(row))
    everything = len(projection.rows)
    names = {"queries_per_s": "throughput", "largest_batch": "largest batch", "usd": "dollars"}
    return [
        f"{names.get(field, field)}{'' if len(gpus) == everything else ' on ' + ', '.join(gpus)}: {why}"
        for (field, why), gpus in by_reason.items()
    ]
