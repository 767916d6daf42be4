"""Checks as text: every prediction, then errors by method, source and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ft_insight import units
from ft_insight.report.layout import Section, to_text
from ft_insight.stats import median
from ft_insight.validate.checked import Checked
from ft_insight.words import clean

WIDE = 44
"""Characters of a source or label in the tables."""


def report_text(name: str, rows: int, checks: Sequence[Checked], left_out: Sequence[str]) -> str:
    """Return the report; the summaries come last, where a terminal shows them."""
    methods = dict.fromkeys(check.method for check in checks)
    sections = [_each(method, [c for c in checks if c.method == method]) for method in methods]
    sections.append(Section("Left out", tuple(clean(line, 2000) for line in left_out)))
    sections += [
        _by("By source", checks, lambda check: check.source),
        _by("By GPU", checks, lambda check: check.gpu),
        _overall(checks),
    ]
    return to_text(
        f"{clean(name)} · {rows:,} rows · {len(checks):,} predictions, none of which has seen itself", sections
    )


def _each(method: str, checks: Sequence[Checked]) -> Section:
    table: list[tuple[str, ...]] = [("which", "GPU", "measured", "predicted", "80%", "", "error")]
    for check in checks:
        measured, predicted = (
            f"{units.significant(value)} {check.unit}" for value in (check.measured, check.predicted)
        )
        inside = {True: "holds it", False: "misses it", None: ""}[check.covered]
        table.append(
            (
                clean(check.label, 100),
                clean(check.gpu, 40),
                measured,
                predicted,
                units.interval(check.low, check.high) if check.covered is not None else "",
                inside,
                f"{check.error:+.1%}",
            )
        )
    return Section(f"{method[:1].upper()}{method[1:]}", table=tuple(table))


def _by(title: str, checks: Sequence[Checked], of: Callable[[Checked], str]) -> Section:
    groups: dict[tuple[str, str], list[Checked]] = {}
    for check in checks:
        groups.setdefault((of(check), check.method), []).append(check)
    head = (title[3:].capitalize() if title != "By GPU" else "GPU", "method", "predictions", *STATISTICS)
    body = [(clean(key, WIDE), method, f"{len(group)}", *_figures(group)) for (key, method), group in groups.items()]
    return Section(title, table=(head, *body))


def _overall(checks: Sequence[Checked]) -> Section:
    """One line for each method. For sweeps each counts as much as another, however many points it has."""
    table: list[tuple[str, ...]] = [("method", "predictions", *STATISTICS, "mean over sweeps")]
    for method in dict.fromkeys(check.method for check in checks):
        group = [c for c in checks if c.method == method]
        sweeps: dict[str, list[float]] = {}
        for check in group:
            sweeps.setdefault(check.label.rsplit(": ", 1)[0], []).append(abs(check.error))
        means = [sum(errors) / len(errors) for errors in sweeps.values()]
        over = f"{sum(means) / len(means):.1%} of {len(means)}" if method.startswith("leave-one-out") else ""
        table.append((method, f"{len(group)}", *_figures(group), over))
    return Section("All together", table=tuple(table))


STATISTICS = ("mean error", "median", "worst", "within 80%")


def _figures(checks: Sequence[Checked]) -> tuple[str, ...]:
    errors = [abs(check.error) for check in checks]
    held = [check.covered for check in checks if check.covered is not None]
    covered = f"{sum(held) / len(held):.0%}" if held else ""
    return f"{sum(errors) / len(errors):.1%}", f"{median(errors) or 0:.1%}", f"{max(errors):.1%}", covered
