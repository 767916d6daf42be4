"""The cost of uneven load: an interval that holds the planted one, and no claim where there is none."""

from __future__ import annotations

import random

import pytest
from makers import header, steps, view

from ft_insight import records as r
from ft_insight.experts import LayerLoad
from ft_insight.imbalance import ImbalanceCost, cost_of_imbalance
from ft_insight.layer_times import LayerTime
from ft_insight.verdict import findings

EXPERTS, TOKENS = 8, 10_000


def loads_of(over_even: list[float]) -> list[LayerLoad]:
    """Build layers whose busiest expert has so many times its even share; the others share the rest."""
    loads = []
    for layer, over in enumerate(over_even):
        most = round(over * TOKENS / EXPERTS)
        rest = [(TOKENS - most) // (EXPERTS - 1)] * (EXPERTS - 1)
        rest[0] += TOKENS - most - sum(rest)
        loads.append(LayerLoad(f"model.layers.{layer}.mlp.gate", (*rest, most), TOKENS))
    return loads


def times_of(seconds: list[float]) -> list[LayerTime]:
    return [
        x
        for layer, s in enumerate(seconds)
        for x in (
            LayerTime(layer, "experts", s / 4, s / 4, s / 2),
            LayerTime(layer, "attention", 1.0, 1.0, 2.0),
        )
    ]


def planted(seed: int, layers: int, slope_s: float, noise_s: float) -> tuple[list[LayerLoad], list[LayerTime], float]:
    rng = random.Random(seed)
    loads = loads_of([1 + rng.expovariate(1 / 0.6) for _ in range(layers)])
    seconds = [0.020 + slope_s * load.max_over_mean + rng.gauss(0, noise_s) for load in loads]
    seconds[0] -= 0.008  # nothing to train before the first layer: its backward pass is shorter
    return loads, times_of(seconds), slope_s * sum(load.max_over_mean - 1 for load in loads)


@pytest.mark.parametrize(("layers", "noise_s"), [(12, 0.0003), (16, 0.0006), (24, 0.0012), (32, 0.0012), (64, 0.0012)])
def test_the_interval_holds_the_planted_cost(layers: int, noise_s: float) -> None:
    found = held = 0
    for seed in range(100):
        loads, times, truth = planted(seed, layers, slope_s=0.004, noise_s=noise_s)
        cost = cost_of_imbalance(loads, times)
        if isinstance(cost, ImbalanceCost):
            found += 1
            middle, low, high = cost.total_s
            assert low <= middle <= high
            held += low <= truth <= high
    assert found >= 85
    assert held >= 0.85 * found


@pytest.mark.parametrize("slope_s", [0.0, -0.004])
def test_nothing_is_claimed_where_there_is_no_cost(slope_s: float) -> None:
    claims = [cost_of_imbalance(*planted(seed, 32, slope_s, noise_s=0.0012)[:2]) for seed in range(200)]
    said = [claim for claim in claims if isinstance(claim, ImbalanceCost)]
    assert len(said) <= (4 if slope_s == 0 else 0)
    assert "the time of the experts does not rise with the load of the busiest one" in claims


def test_without_noise_it_is_exact() -> None:
    over = [1 + layer / 10 for layer in range(12)]
    loads = loads_of(over)
    cost = cost_of_imbalance(loads, times_of([0.02 + 0.004 * load.max_over_mean for load in loads]))
    assert isinstance(cost, ImbalanceCost)
    assert cost.total_s == pytest.approx((0.004 * 6.6,) * 3, rel=1e-3)  # 0 + 0.1 + ... + 1.1 beyond even
    assert cost.layer_s["model.layers.11.mlp.gate"] == pytest.approx((0.004 * 1.1,) * 3, rel=1e-3)
    assert cost.layer_s["model.layers.0.mlp.gate"] == pytest.approx((0, 0, 0), abs=1e-6)


@pytest.mark.parametrize(
    ("loads", "times", "why"),
    [
        (loads_of([1, 2, 3]), times_of([1, 2, 3]), "3 layers with experts were timed, and 12 are needed"),
        (loads_of([1, 2]), [LayerTime(0, "attention", 1, 1, 1)], "the experts' time was not measured"),
        (loads_of([2 + i / 100 for i in range(20)]), times_of(list(range(20))), "all layers are about as uneven"),
        (loads_of([1 + i / 10 for i in range(20)]), times_of([1.0] * 20), "does not rise with the load"),
        ([LayerLoad("gate", (1, 2), 3)] * 12, times_of([1.0] * 12), "cannot be told to belong together"),
        (
            [*loads_of([1 + i / 10 for i in range(12)]), LayerLoad("model.layers.12.mlp.gate", (1, 2), TOKENS)],
            times_of(list(range(13))),
            "differ in experts or tokens",
        ),
    ],
)
def test_why_it_cannot_be_told(loads: list[LayerLoad], times: list[LayerTime], why: str) -> None:
    said = cost_of_imbalance(loads, times)
    assert isinstance(said, str)
    assert why in said


def run_of(slope_s: float) -> list[r.Record]:
    """Build a run of 12 layers, whose step of 1 s has two micro-batches."""
    loads = loads_of([1 + layer / 3 for layer in range(12)])
    seconds = [0.02 + slope_s * load.max_over_mean for load in loads]
    return [
        header(),
        *steps(4, micro=(r.MicroBatch(5, 500, 400, 400, 0.4),) * 2),
        r.Experts(
            step=4,
            t_s=4.0,
            mode="train",
            layers=tuple(load.layer for load in loads),
            counts=tuple(load.counts for load in loads),
            tokens=(TOKENS,) * 12,
            queries=40,
        ),
        r.Layers(
            step=4,
            t_s=4.0,
            clock="host",
            micro_batches=2,
            layers=tuple(range(12)),
            kinds=("experts",) * 12,
            forward_s=tuple(s / 2 for s in seconds),
            recompute_s=tuple(s / 2 for s in seconds),
            backward_s=tuple(seconds),  # twice the seconds of one micro-batch in all
        ),
    ]


def test_the_finding_says_what_it_costs() -> None:
    # 0 + 1/3 + ... + 11/3 beyond even, 2 ms each: 44 ms a micro-batch, 88 ms of a step of 1 s; 2 x 7.3 ms in layer 11
    finding = next(f for f in findings(view(run_of(0.002))) if f.topic == "experts")
    assert finding.evidence.startswith("model.layers.11.mlp.gate: expert 7 takes 58% of tokens (even: 12%)")
    assert (
        finding.worth
        == "uneven load costs 8.8% of a step [8.8%-8.8%] (90%, by the times of 12 layers), this layer 1.5%"
    )


def test_the_finding_says_why_it_does_not() -> None:
    finding = next(f for f in findings(view(run_of(-0.002))) if f.topic == "experts")
    why = "the time of the experts does not rise with the load of the busiest one"
    assert finding.worth == f"cost in time not measurable in this run: {why}"
