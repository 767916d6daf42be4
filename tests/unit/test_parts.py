"""Parts of a step from one run: phases against slots, and other densities from the experts' time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from makers import header, micro, step, view

from ft_insight import records as r
from ft_insight.estimate import fit_record, measure
from ft_insight.estimate.density import DensityTime, predict_density
from ft_insight.estimate.joint import Joint, fit_joint
from ft_insight.estimate.parts import phase_fits
from ft_insight.estimate.run_points import micro_points
from ft_insight.estimate.step_time import NotIdentifiable

OPTIMIZER, HOST = 0.05, 0.02
E0, E1 = 0.03, 2e-5
D0, D1 = 0.06, 1e-5


def experts_s(slots: float, density: float) -> float:
    return E0 + E1 * slots * density / 0.25


def micro_s(slots: float, density: float = 0.25) -> float:
    return D0 + D1 * slots + experts_s(slots, density)


def layers(number: int, t_s: float, slots: list[int], **said: Any) -> r.Layers:
    seconds = sum(experts_s(s, 0.25) for s in slots)
    return r.Layers(
        step=number,
        t_s=t_s,
        clock="host",
        micro_batches=said.get("micro_batches", len(slots)),
        layers=(0, 1, 0),
        kinds=("experts", "experts", "attention"),
        forward_s=(0.2 * seconds, 0.2 * seconds, 0.01),
        recompute_s=(0.1 * seconds, 0.1 * seconds, 0.01),
        backward_s=(0.2 * seconds, 0.2 * seconds, 0.01),
    )


def run(count: int = 60, *, varied: bool = True, timed: int = 3, late: bool = False, top_k: int = 2) -> Any:
    rng = np.random.default_rng(0)
    items: list[Any] = [header(model={"experts": 8, "experts_per_token": top_k})]
    t_s = 0.0
    for number in range(1, count + 1):
        slots = [int(rng.integers(500, 8000)) if varied else 4000 for _ in range(2)]
        compute = [micro_s(s, top_k / 8) * float(np.exp(rng.normal(0, 0.01))) for s in slots]
        wall = sum(compute) + OPTIMIZER + HOST
        phases = {"forward": 0.3 * sum(compute), "backward": 0.7 * sum(compute), "optimizer": OPTIMIZER, "other": HOST}
        micros = tuple(micro(4, s, s, compute_s=c) for s, c in zip(slots, compute, strict=True))
        both = [step(number, t_s, wall, phases_s=phases, micro=micros)]
        if timed and number % timed == 0:
            both.append(layers(number, t_s, slots))  # type: ignore[arg-type]
        items += reversed(both) if late else both
        t_s += wall
    return view(items)


def test_phases_are_split_into_fixed_and_work() -> None:
    found = phase_fits(run())
    assert list(found) == ["forward", "backward", "optimizer", "other"]
    assert found["optimizer"].fixed_s == pytest.approx(OPTIMIZER, rel=1e-3)
    assert found["optimizer"].per_slot_s == pytest.approx(0.0, abs=1e-9)
    assert found["other"].fixed_s == pytest.approx(HOST, rel=1e-3)
    # two micro-batches in a step: their fixed time twice, 30% of it forward
    assert found["forward"].fixed_s == pytest.approx(0.3 * 2 * (D0 + E0), rel=0.05)
    assert found["forward"].per_slot_s == pytest.approx(0.3 * (D1 + E1), rel=0.05)
    assert found["backward"].fixed_s == pytest.approx(0.7 * 2 * (D0 + E0), rel=0.05)


def test_phases_of_steps_that_are_alike_have_no_parts() -> None:
    found = phase_fits(run(varied=False))
    assert found["optimizer"] == r.PhaseFit(median_s=OPTIMIZER)
    assert found["forward"].fixed_s is None
    assert found["forward"].median_s == pytest.approx(0.3 * 2 * micro_s(4000), rel=0.01)


def test_the_record_holds_them() -> None:
    fit = fit_record(measure(run()), 1.0)
    assert fit.identifiable
    assert fit.phases["optimizer"].fixed_s == pytest.approx(OPTIMIZER, rel=1e-3)
    low, high = fit.fixed_interval_s or (0, 0)
    assert low <= D0 + E0 <= high


@pytest.mark.parametrize("late", [False, True], ids=["step first", "layers first"])
def test_dense_from_a_sparse_run(late: bool) -> None:
    found = predict_density(run(late=late), 1.0, slots=3000)
    assert isinstance(found, DensityTime)
    assert found.micro_s[0] == pytest.approx(micro_s(3000, 1.0), rel=0.02)
    assert found.micro_s[1] * 0.997 <= micro_s(3000, 1.0) <= found.micro_s[2] * 1.003
    assert found.basis == "experts in 20 steps"
    same = predict_density(run(), 0.25, slots=3000)
    assert isinstance(same, DensityTime)
    assert same.micro_s[0] == pytest.approx(micro_s(3000), rel=0.02)
    sparser = predict_density(run(), 0.125, slots=3000)
    assert isinstance(sparser, DensityTime)
    assert sparser.micro_s[0] == pytest.approx(micro_s(3000, 0.125), rel=0.02)


def test_with_few_timed_steps_the_interval_is_all_that_is_possible() -> None:
    found = predict_density(run(timed=20), 1.0, slots=4250)
    assert isinstance(found, DensityTime)
    assert found.basis == "experts' mean time: bounds"
    _, low, high = found.micro_s
    assert low <= micro_s(4250) * 1.01
    assert high >= micro_s(4250, 1.0)
    assert low < found.micro_s[0] < high


def test_one_shape_gives_bounds_and_no_figure() -> None:
    found = predict_density(run(varied=False), 1.0)
    assert isinstance(found, NotIdentifiable)
    # nothing of the experts' time may grow, or all of it fourfold: 0.21 s, or 0.11 s of it four times
    assert found.reason == "not identifiable: with micro-batches all of 4,000 slots, anything from 0.21 to 0.54 s"


def test_without_experts_or_their_time() -> None:
    assert predict_density(view([header(), step(1, 0.0)]), 1.0) == NotIdentifiable(
        "the model has no experts, as far as this run says"
    )
    untimed = predict_density(run(timed=0), 1.0)
    assert isinstance(untimed, NotIdentifiable)
    assert "not timed" in untimed.reason
    with pytest.raises(ValueError, match="above 0 and at most 1, not 4"):
        predict_density(run(), 4.0)


def test_layers_of_some_micro_batches_only_are_no_points() -> None:
    seen = view([header(), step(1, 0.0), step(2, 1.0), layers(2, 1.0, [1000, 1000])])
    assert seen.parts.experts == ()
    assert len(seen.parts.phases) == 1


def test_a_sparse_and_a_dense_run_together_tell_top_4() -> None:
    points = [*micro_points(run()), *micro_points(run(top_k=8))]
    assert len(points) == 24
    assert {point.density for point in points} == {0.25, 1.0}
    model = fit_joint(points)
    assert isinstance(model, Joint)
    assert model.best.form.name == "affine"
    assert model.unknowns["experts_s"] == pytest.approx(4 * E1, rel=0.03)
    assert model.unknowns["dense_s"] == pytest.approx(D1, rel=0.15)
    truth = micro_s(4000, 0.5)
    assert model.predict(4000.0, 0.5)[0] == pytest.approx(truth, rel=0.01)


def test_a_run_that_does_not_tell_its_slots_has_no_points() -> None:
    assert micro_points(view([header(), step(1, 0.0), step(2, 1.0, micro=(micro(4, None, None),))])) == []
    assert len(micro_points(view([header(), step(1, 0.0), step(2, 1.0)]))) == 1


def test_rows_of_a_batch_that_hold_several_tell_no_length() -> None:
    items = [step(n, float(n), micro=(micro(2 + n % 3, 1000),)) for n in range(1, 40)]
    assert {point.length is None for point in micro_points(view([header(), *items]))} == {False}
    packed = view([header(train={"packing": "bfd"}), *items])
    assert {point.length for point in micro_points(packed)} == {None}
