"""What the sections of ``study.md`` share: labels, shares of ours above the paper's, and figures put aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from study import paper
from study.measured import OTHER, ROLES, Measured

from ft_insight import units
from ft_insight.report.layout import pipes

Row = tuple[str, ...]
Shares = Mapping[str, float]
Published = Callable[[str, str, str], Shares]


def compared(
    ready: Sequence[Measured],
    ours: Callable[[Measured], Shares],
    theirs: Published | None,
    last: tuple[str, Callable[[Measured], float | None]] | None = None,
) -> tuple[str, dict[str, Shares]]:
    """Return a table of shares with the paper's rows below ours, and the same as bars."""
    bars: dict[str, Shares] = {}
    ends: dict[str, str] = {}
    for one in ready:
        bars[one.run.title] = ours(one)
        ends[one.run.title] = units.share(last[1](one)) if last else ""
        if theirs is not None:
            run = one.run
            label = f"{run.model} {paper.title(run.model, run.kind, run.name)}"
            bars[label], ends[label] = theirs(run.model, run.kind, run.name), "-"
    names = list(dict.fromkeys(name for shares in bars.values() for name in shares))
    if OTHER in names:
        names = [*(n for n in ROLES if n in names), OTHER]
    rows: list[Row] = [("run", *names, *([last[0]] if last else []))]
    for label, shares in bars.items():
        cells = [units.share(shares[n]) if n in shares else _absent(shares) for n in names]
        rows.append((label, *cells, *([ends[label]] if last else [])))
    return pipes(rows), {label: shares for label, shares in bars.items() if shares}


def _absent(shares: Shares) -> str:
    return "-" if shares else units.NA  # the model has no such part, or nothing was measured at all


def figure(figures: dict[str, str], name: str, text: str) -> str:
    figures[name] = text
    return f"![{name}]({name}.svg)"


def percent(value: float | None) -> str:
    return units.share(None if value is None else value / 100)
