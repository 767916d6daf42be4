"""Load of experts at two times, side by side: what fine-tuning did to it, or what one run did that another did not."""

from __future__ import annotations

from ft_insight import units
from ft_insight.experts import LayerLoad, LoadChange, ModelLoad
from ft_insight.report.layout import Section
from ft_insight.words import clean

ALL_LAYERS = "Experts, all layers together"
MOST_EXPERT_COLUMNS = 16


def change_sections(change: LoadChange, basis: str) -> list[Section]:
    """Return the change of all layers together, and layer by layer; empty where it cannot be had."""
    return [_together(change, basis), _by_layer(change)]


def _together(change: LoadChange, basis: str) -> Section:
    old, new, moved = change.model_start, change.model_end, change.moved
    if old is None or new is None or moved is None:
        return Section(ALL_LAYERS)
    few = len(old.means) <= MOST_EXPERT_COLUMNS
    head = ("", *((str(e) for e in range(len(old.means))) if few else ()), "variance (n)", "variance (n-1)")
    shares = units.share(old.shares[moved]), units.share(new.shares[moved])
    notes = [
        f"counted on {basis}",
        f"{'tokens' if few else 'variance of tokens'} per query and expert, mean over layers",
    ]
    if shares[0] != shares[1]:
        notes.append(f"expert {moved} moved most: {shares[0]} -> {shares[1]}")
    return Section(
        ALL_LAYERS,
        table=(head, *(_row(name, load, few=few) for name, load in (("before", old), ("after", new)))),
        after=tuple(notes),
    )


def _row(name: str, load: ModelLoad, *, few: bool) -> tuple[str, ...]:
    return (
        name,
        *((units.significant(mean) for mean in load.means) if few else ()),
        units.significant(load.variance_n),
        units.NA if load.variance_n1 is None else units.significant(load.variance_n1),
    )


def _by_layer(change: LoadChange) -> Section:
    old = {load.layer: load for load in change.start}
    rows: list[tuple[str, ...]] = [("layer", "max/mean before", "after", "busiest before", "after", "moved share")]
    for load in change.end:
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
