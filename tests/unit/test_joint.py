"""The joint fit of several runs against laws that are known, and what it refuses to say."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from ft_insight.estimate.joint import Joint, fit_form, fit_joint
from ft_insight.estimate.models import FORMS, Design, Form, Point
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.report.joint import joint_lines

H, C0, C1 = 0.4, 0.02, 0.06
SMOOTH = tuple(form for form in FORMS if not form.spare)


def law(batch: float, density: float, n: float) -> float:
    return float((H**n + ((C0 + C1 * density) * batch) ** n) ** (1 / n))


def points(n: float, seed: int, count: int = 60, noise: float = 0.04, outliers: float = 0.05) -> list[Point]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        batch, density = float(rng.integers(1, 17)), float(rng.choice([0.25, 0.5, 1.0]))
        seconds = law(batch, density, n) * math.exp(rng.normal(0, noise)) * (4 if rng.random() < outliers else 1)
        found.append(Point(batch, seconds, density))
    return found


def joint(found: Joint | NotIdentifiable) -> Joint:
    assert isinstance(found, Joint)
    return found


@pytest.mark.parametrize("n", [1.0, 2.0])
def test_intervals_hold_what_was_planted(n: float) -> None:
    """200 seeds in all, with noise and outliers: each parameter within its 95% interval in at least 90%."""
    seeds, held, predicted = 100, Counter[str](), 0
    for seed in range(seeds):
        model = joint(fit_joint(points(n, seed), SMOOTH))
        for name, truth in (("fixed_s", H), ("dense_s", C0), ("experts_s", C1)):
            low, high = model.interval(name)
            held[name] += low <= truth <= high
        again = law(20.0, 1.0, n) * math.exp(np.random.default_rng(1000 + seed).normal(0, 0.04))
        middle, low, high = model.predict(20.0, 1.0)
        assert low < middle < high
        predicted += low <= again <= high
    print(f"n={n}: {dict(held)} within, prediction beyond the range {predicted} of {seeds}")
    assert min(held.values()) >= 0.9 * seeds
    assert predicted >= 0.7 * seeds


@pytest.mark.parametrize("form", SMOOTH, ids=lambda form: form.name)
def test_each_form_finds_its_own(form: object) -> None:
    assert form in FORMS
    chosen = next(each for each in FORMS if each == form)
    layout = Design.of([Point(float(b), 1.0, s) for b in range(1, 13) for s in (0.25, 1.0)])
    seconds = chosen.seconds(np.array([H, C0, C1]), layout)
    seen = [Point(b, t, s) for b, t, s in zip(layout.work, seconds, layout.density, strict=True)]
    model = joint(fit_joint(seen))
    assert model.best.form == chosen
    assert model.unknowns == {
        name: pytest.approx(v, rel=2e-3) for name, v in zip(model.best.names, (H, C0, C1), strict=True)
    }
    assert model.best.error < 1e-3
    assert model.outliers == 0


def test_a_knee_is_found() -> None:
    seen = [Point(float(b), max(0.5, 0.3 + 0.04 * b)) for b in range(1, 17)]
    model = joint(fit_joint(seen))
    assert model.best.form.name == "knee"
    assert model.unknowns == {
        k: pytest.approx(v, rel=1e-3) for k, v in (("fixed_s", 0.5), ("per_unit_s", 0.04), ("base_s", 0.3))
    }


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("eq. (2) printed", lambda b, s: 0.8 * math.log(b / s) + 0.5),
        ("eq. (2) coded", lambda b, s: 0.3 * math.log(b) / s + 0.5),
    ],
)
def test_the_papers_equation_is_found_where_it_holds(name: str, rate: object) -> None:
    assert callable(rate)
    seen = [Point(float(b), b / rate(b, s), s) for b in range(1, 13) for s in (0.25, 1.0)]
    assert joint(fit_joint(seen)).best.form.name == name


def test_outliers_are_set_aside() -> None:
    seen = points(2.0, 1, noise=0.01, outliers=0.0)
    spoilt = [msgspec.structs.replace(p, seconds=p.seconds * (6 if i % 20 == 0 else 1)) for i, p in enumerate(seen)]
    model = joint(fit_joint(spoilt))
    assert model.outliers == 3
    assert model.predict(8.0, 0.5)[0] == pytest.approx(law(8.0, 0.5, 2.0), rel=0.01)


def test_leaving_out_to_first_order_is_leaving_out() -> None:
    seen = points(2.0, 5, count=20, noise=0.03, outliers=0.0)
    layout = Design.of(seen)
    fit = fit_form(FORMS[0], layout)
    for i, point in enumerate(seen):
        rest = seen[:i] + seen[i + 1 :]
        without = fit_form(FORMS[0], layout.at(rest))
        exact = math.log(point.seconds) - float(without.log_seconds(layout.at([point]))[0])
        assert fit.left_out[i] == pytest.approx(exact, abs=0.006)


def test_accumulation_tells_the_rest_of_a_step() -> None:
    seen = [
        Point(float(b), a * (0.2 + 0.05 * b) + 0.35, accumulation=float(a)) for b in (1, 2, 4, 8) for a in (1, 2, 4)
    ]
    model = joint(fit_joint(seen))
    assert model.best.form.name == "affine"
    assert model.unknowns == {
        k: pytest.approx(v, rel=1e-3) for k, v in (("fixed_s", 0.2), ("per_unit_s", 0.05), ("rest_s", 0.35))
    }
    assert model.predict(16.0, accumulation=8.0)[0] == pytest.approx(8 * (0.2 + 0.05 * 16) + 0.35, rel=1e-3)


def test_length_tells_what_attention_adds() -> None:
    def seconds(slots: float, length: float) -> float:
        return 0.1 + (1e-4 + 5e-8 * length) * slots

    seen = [
        Point(slots, seconds(slots, length), length=length)
        for slots in (1e3, 2e3, 4e3, 8e3)
        for length in (128.0, 512.0, 1024.0)
    ]
    model = joint(fit_joint(seen))
    assert model.unknowns["length_s"] == pytest.approx(5e-8, rel=1e-2)
    assert model.predict(6e3, length=2048.0)[0] == pytest.approx(seconds(6e3, 2048.0), rel=1e-2)


def test_what_does_not_vary_is_not_predicted() -> None:
    model = joint(fit_joint([Point(float(b), 0.3 + 0.05 * b, 0.25) for b in (1, 2, 4, 8)]))
    assert model.best.names == ("fixed_s", "per_unit_s")
    assert model.notes[0] == "density 0.25 only: what other densities take cannot be told"
    assert model.predict(3.0) == model.predict(3.0, 0.25)
    with pytest.raises(ValueError, match=r"^only density 0.25 was measured: density 1 cannot be predicted$"):
        model.predict(3.0, 1.0)
    with pytest.raises(ValueError, match="only accumulation 1 was measured"):
        model.predict(3.0, accumulation=2.0)
    with pytest.raises(KeyError):
        model.interval("experts_s")


def test_length_that_goes_with_the_slots_is_not_told_apart() -> None:
    """One batch at many lengths: slots and length say the same."""
    seen = [Point(4.0 * length, 0.1 + 1e-4 * 4 * length, length=float(length)) for length in (128, 256, 512, 1024)]
    assert joint(fit_joint(seen)).best.names == ("fixed_s", "per_unit_s")


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ([], "no measured step times"),
        ([Point(4.0, math.nan), Point(0.0, 1.0)], "no measured step times"),
        ([Point(8.0, 0.5), Point(8.0, 0.5)], "not identifiable: one size of work seen (8, 0.5 s, 16 a second)"),
        (
            [Point(8.0, 0.5), Point(4.0, 0.3, 0.5)],
            "not identifiable: density goes with the size of work in these points",
        ),
    ],
)
def test_refusals(seen: list[Point], reason: str) -> None:
    found = fit_joint(seen)
    assert isinstance(found, NotIdentifiable)
    assert found.reason == reason


def test_two_points_are_joined_and_it_is_said_that_they_choose_nothing() -> None:
    model = joint(fit_joint([Point(8.0, 0.5), Point(4.0, 0.3)]))
    assert model.notes[0] == "no more points than unknowns: the form is assumed, not chosen"
    assert model.predict(8.0)[0] == pytest.approx(0.5, rel=1e-3)


def test_a_form_is_not_tried_on_fewer_points_than_it_needs() -> None:
    knee = next(form for form in FORMS if form.name == "knee")
    seen = [Point(float(b), 0.3 + 0.05 * b) for b in range(1, 7)]
    assert fit_joint(seen, [knee]) == NotIdentifiable(
        "not identifiable: 6 points, too few for the unknowns of any form"
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_is_told_with_all_its_unknowns(form: Form) -> None:
    model = joint(fit_joint(points(1.0, 0), [form]))
    law, letters = joint_lines(model)
    assert form.formula in law
    assert letters.count("[") == len(model.unknowns)
    assert "nan" not in law + letters
