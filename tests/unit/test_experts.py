"""Load of experts, against figures worked out by hand."""

from __future__ import annotations

import pytest

from ft_insight.experts import ExpertTally, LayerLoad
from ft_insight.records import Experts


def flush(counts: list[tuple[int, ...]], mode: str = "train", **said: object) -> Experts:
    layers = tuple(f"layers.{i}" for i in range(len(counts)))
    tokens = tuple(sum(c) // 2 for c in counts)
    return Experts(step=1, t_s=0.0, mode=mode, layers=layers, counts=tuple(counts), tokens=tokens, **said)


def test_one_layer_by_hand() -> None:
    load = LayerLoad("moe", (10, 30, 0, 40), 40)
    assert load.shares == (0.125, 0.375, 0.0, 0.5)
    assert load.ideal == 0.25
    assert load.worst == 3
    assert load.max_over_mean == 2.0
    # deviations from the mean 20: -10, 10, -20, 20; variance 250
    assert load.cv == pytest.approx(250**0.5 / 20)
    assert load.dead == (2,)


def test_even_and_collapsed() -> None:
    even = LayerLoad("moe", (5, 5, 5, 5), 10)
    assert (even.max_over_mean, even.cv, even.dead) == (1.0, 0.0, ())
    collapsed = LayerLoad("moe", (0, 0, 20, 0), 20)
    assert collapsed.max_over_mean == 4.0
    assert collapsed.cv == pytest.approx(3**0.5)
    assert collapsed.dead == (0, 1, 3)


def test_nothing_routed_is_not_uneven() -> None:
    load = LayerLoad("moe", (0, 0), 0)
    assert (load.shares, load.max_over_mean, load.cv, load.dead) == ((0.0, 0.0), 0.0, 0.0, ())


def test_training_is_summed_and_evaluation_left_out() -> None:
    tally = ExpertTally()
    tally.add(flush([(1, 3), (4, 0)]))
    tally.add(flush([(100, 100), (100, 100)], mode="evaluation"))
    tally.add(flush([(5, 7), (2, 2)], method="recomputed", padding_counted=True))
    assert tally.layers() == (LayerLoad("layers.0", (6, 10), 8), LayerLoad("layers.1", (6, 2), 4))
    assert tally.method == "recomputed"
    assert tally.padding_counted


def test_ranks_are_summed_by_layer() -> None:
    one = (LayerLoad("a", (1, 2), 3), LayerLoad("b", (0, 4), 4))
    other = (LayerLoad("b", (5, 0), 5), LayerLoad("c", (1, 1), 2))
    assert ExpertTally.merged([one, other]) == (
        LayerLoad("a", (1, 2), 3),
        LayerLoad("b", (5, 4), 9),
        LayerLoad("c", (1, 1), 2),
    )


def test_a_record_that_contradicts_itself_does_no_harm() -> None:
    tally = ExpertTally()
    tally.add(Experts(step=1, t_s=0, mode="train", layers=("a", "b"), counts=((1, 2), ()), tokens=(3,)))
    tally.add(Experts(step=2, t_s=0, mode="train", layers=("a",), counts=((1, 2, 9),), tokens=(3,)))
    assert tally.layers() == (LayerLoad("a", (2, 4), 6),)
