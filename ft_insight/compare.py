"""Two runs side by side: how fast they were, and how the load of their experts differs."""

from __future__ import annotations

from collections.abc import Callable

from ft_insight import units
from ft_insight.experts import LoadChange
from ft_insight.report.layout import Section
from ft_insight.report.load import change_sections
from ft_insight.run_view import RunView

Cell = Callable[[RunView], float | None]


class CompareError(ValueError):
    """Two runs that cannot be compared; the message is one line."""


def compare_sections(before: RunView, after: RunView) -> list[Section]:
    """Return the sections of a comparison. Raises :class:`CompareError` if there is nothing that both have."""
    sections = [_speed(before, after), *change_sections(*_load_change(before, after))]
    if all(section.empty for section in sections):
        raise CompareError("these two runs have nothing in common that could be compared: no steps, no experts")
    return sections


def _speed(before: RunView, after: RunView) -> Section:
    rows: list[tuple[str, Cell, Callable[[float | None], str]]] = [
        ("step", lambda v: v.step_s, units.duration),
        ("queries/s", lambda v: v.rates.queries_per_s, units.rate),
        ("tokens/s", lambda v: v.rates.real_tokens_per_s, units.rate),
        ("padding", lambda v: v.totals.padding_share, units.share),
    ]
    table = [("", "before", "after", "change")]
    for name, read, show in rows:
        old, new = read(before), read(after)
        if old is not None or new is not None:
            table.append((name, show(old), show(new), _change(old, new)))
    return Section("Speed", table=tuple(table))


def _load_change(before: RunView, after: RunView) -> tuple[LoadChange, str]:
    """Return the load of both runs: on the same rows where both were shown them at their end, else in training."""
    tokens = [{load.layer: load.tokens for load in view.experts_after} for view in (before, after)]
    if tokens[0] and tokens[0] == tokens[1] and before.rows_after == after.rows_after:
        change = LoadChange(before.experts_after, after.experts_after, before.load_after, after.load_after)
        return change, f"the same {units.count(after.rows_after)} rows after each run"
    change = LoadChange(before.experts, after.experts, before.expert_load, after.expert_load)
    return change, "what each run trained on, all its steps"


def _change(old: float | None, new: float | None) -> str:
    # percentages of next to nothing say nothing
    if old is None or new is None or old <= 1e-9:
        return units.NA
    return f"{(new / old - 1) * 100:+.1f}%"
