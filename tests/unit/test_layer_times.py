"""Means over sampled steps, and shares, worked out by hand."""

from __future__ import annotations

import pytest

from ft_insight import records as r
from ft_insight.layer_times import LayerTally, LayerTime, by_kind


def record(micro_batches: int, scale: float) -> r.Layers:
    return r.Layers(
        step=1,
        t_s=1.0,
        clock="host",
        micro_batches=micro_batches,
        layers=(None, 0, 0, 1),
        kinds=("head_and_loss", "attention", "experts", "experts"),
        forward_s=(1.0 * scale, 2.0 * scale, 3.0 * scale, 5.0 * scale),
        recompute_s=(0.0, 2.0 * scale, 3.0 * scale, 5.0 * scale),
        backward_s=(1.0 * scale, 4.0 * scale, 6.0 * scale, 8.0 * scale),
    )


def test_means_are_per_micro_batch() -> None:
    tally = LayerTally()
    tally.add(record(1, 1.0))
    tally.add(record(3, 3.0))
    layers = tally.layers()
    assert layers[0] == LayerTime(None, "head_and_loss", 1.0, 0.0, 1.0)
    assert layers[-1] == LayerTime(1, "experts", 5.0, 5.0, 8.0)
    assert tally.steps == 2


def test_kinds_are_summed_over_layers_and_the_largest_comes_first() -> None:
    tally = LayerTally()
    tally.add(record(1, 1.0))
    kinds = by_kind(tally.layers())
    assert [k.kind for k in kinds] == ["experts", "attention", "head_and_loss"]
    assert (kinds[0].forward_s, kinds[0].recompute_s, kinds[0].backward_s) == (8.0, 8.0, 14.0)
    assert [k.share for k in kinds] == pytest.approx([30 / 40, 8 / 40, 2 / 40])
    assert kinds[2].words == "head and loss"


def test_nothing_sampled_is_nothing() -> None:
    assert LayerTally().layers() == ()
    assert by_kind(()) == ()
