"""Two runs side by side: how fast they were, and how the load of their experts differs."""

from __future__ import annotations

from collections.abc import Callable

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.report.layout import Section
from ft_insight.run_view import RunView
from ft_insight.words import clean

Cell = Callable[[RunView], float | None]


class CompareError(ValueError):
    """Two runs that cannot be compared; the message is one line."""


def compare_sections(before: RunView, after: RunView) -> list[Section]:
    """Return the sections of a comparison. Raises :class:`CompareError` if there is nothing that both have."""
    sections = [_speed(before, after), _load(before, after), _layers(before, after)]
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


def _load(before: RunView, after: RunView) -> Section:
    old, new = before.expert_load, after.expert_load
    if old is None or new is None or len(old.means) != len(new.means):
        return Section("Experts, all layers together")
    head = ("", *(str(e) for e in range(len(old.means))), "variance (n)", "variance (n-1)")
    rows = [
        (
            name,
            *(units.significant(mean) for mean in load.means),
            units.significant(load.variance_n),
            units.NA if load.variance_n1 is None else units.significant(load.variance_n1),
        )
        for name, load in (("before", old), ("after", new))
    ]
    moved = max(range(len(old.means)), key=lambda e: abs(new.shares[e] - old.shares[e]))
    return Section(
        "Experts, all layers together",
        table=(head, *rows),
        after=(
            "tokens per query and expert, mean over layers",
            f"expert {moved} moved most: {units.share(old.shares[moved])} -> {units.share(new.shares[moved])}",
        ),
    )


def _layers(before: RunView, after: RunView) -> Section:
    old = {load.layer: load for load in before.experts}
    rows: list[tuple[str, ...]] = [("layer", "max/mean before", "after", "busiest before", "after", "moved share")]
    for load in after.experts:
        earlier = old.get(load.layer)
        if earlier is not None and len(earlier.counts) == len(load.counts):
            rows.append(_layer_row(earlier, load))
    return Section("Experts, layer by layer", table=tuple(rows))


def _layer_row(old: LayerLoad, new: LayerLoad) -> tuple[str, ...]:
    # half the sum of differences: the share of tokens that would have to go elsewhere to undo the change
    moved = sum(abs(a - b) for a, b in zip(old.shares, new.shares, strict=True)) / 2
    return (
        clean(new.layer),
        f"{old.max_over_mean:.2f}",
        f"{new.max_over_mean:.2f}",
        str(old.worst),
        str(new.worst),
        units.share(moved),
    )


def _change(old: float | None, new: float | None) -> str:
    # percentages of next to nothing say nothing
    if old is None or new is None or old <= 1e-9:
        return units.NA
    return f"{(new / old - 1) * 100:+.1f}%"
