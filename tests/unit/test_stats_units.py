"""Bounded collections, and figures as people read them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_insight import records as r
from ft_insight import units
from ft_insight.stats import CurveBuilder, EvenSample, RowCurves, median
from ft_insight.words import batch_text, clean, hours_text, row_name, row_text, usd_text

ANY = st.one_of(st.none(), st.floats(-1e300, 1e300), st.sampled_from([math.nan, math.inf, -math.inf]))
FORMATTERS = [
    units.duration,
    units.hours,
    units.clock,
    units.size,
    units.count,
    units.big,
    units.rate,
    units.share,
    units.money,
]


@pytest.mark.parametrize("count", [1, 511, 512, 513, 50_000])
@pytest.mark.parametrize("limit", [512, 7])
def test_a_curve_stays_bounded_and_keeps_its_mean_and_its_end(count: int, limit: int) -> None:
    curve = CurveBuilder(limit)
    for x in range(1, count + 1):
        curve.add(x, float(x))
    points = curve.points()
    assert len(points) <= limit + 2
    assert points[-1][0] == count
    xs = [x for x, _ in points]
    assert xs == sorted(set(xs))
    # each point is the mean of the stretch that ends at it, so that weighting by stretch gives the whole sum
    stretches = [b - a for a, b in zip([0, *xs], xs, strict=False)]
    assert sum(w * y for w, (_, y) in zip(stretches, points, strict=True)) == pytest.approx(count * (count + 1) / 2)


def test_a_curve_leaves_out_what_was_not_measured() -> None:
    curve = CurveBuilder()
    for x, y in enumerate([1.0, None, math.nan, math.inf, 2.0]):
        curve.add(x, y)
    assert curve.points() == ((0, 1.0), (4, 2.0))


def test_a_curve_is_cut_and_goes_on() -> None:
    curve = CurveBuilder(4)
    for x in range(1, 7):
        curve.add(x, float(x))
    assert curve.points() == ((2, 1.5), (4, 3.5), (6, 5.5))
    curve.cut_after(4)
    assert curve.points() == ((2, 1.5), (4, 3.5))
    curve.add(5, 50.0)
    assert curve.points()[-1] == (5, 50.0)


@pytest.mark.parametrize("count", [0, 3, 4, 100])
def test_a_small_sample_is_everything_and_a_large_one_bounded(count: int) -> None:
    sample: EvenSample[int] = EvenSample(limit=4)
    for i in range(count):
        sample.add(i)
    items = sample.items()
    assert len(items) == min(count, 4)
    assert len(set(items)) == len(items)
    assert set(items) <= set(range(count))


def test_a_sample_prefers_no_part_of_a_step() -> None:
    # with accumulation 8 every n-th, n a power of two, would always be the same micro-batch
    sample: EvenSample[int] = EvenSample(limit=512)
    for i in range(64_000):
        sample.add(i % 8)
    shares = [sample.items().count(k) / 512 for k in range(8)]
    assert all(0.07 < share < 0.18 for share in shares)  # 1/8, four standard deviations around


def test_median() -> None:
    assert median([]) is None
    assert median(iter([3.0])) == 3
    assert median([4, 1, 3, 2]) == 2.5
    assert median([9, 1, 5]) == 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (math.nan, "n/a"),
        (0, "0 s"),
        (340e-6, "340 us"),
        (0.0124, "12.4 ms"),
        (0.9996, "1.00 s"),
        (1.84, "1.84 s"),
        (59.96, "1m 00s"),
        (200, "3m 20s"),
        (3599.4, "59m 59s"),
        (3599.5, "1.0 h"),
        (3599.9, "1.0 h"),
        (41.3 * 3600, "41.3 h"),
        (12.1 * 86400, "12.1 d"),
        (-2.5, "-2.50 s"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (units.hours(0.99987), "1.0 h"),
        (units.hours(0.5), "30m 00s"),
        (units.hours(239.96), "10.0 d"),
        (units.size(512), "512 B"),
        (units.size(1000), "0.977 KiB"),
        (units.size(44.1 * 1024**3), "44.1 GiB"),
        (units.size(1.5 * 1024**2), "1.50 MiB"),
        (units.count(15000), "15,000"),
        (units.big(46.7e9), "46.7B"),
        (units.big(13_600_000), "13.6M"),
        (units.big(2048), "2,048"),
        (units.significant(0.09996), "0.100"),
        (units.significant(9.996), "10.0"),
        (units.significant(999.6), "1,000"),
        (units.significant(math.inf), "n/a"),
        (units.significant(1e-6), "0.00000100"),
        (units.significant(1.234e-10), "1.23e-10"),
        (units.rate(1.0055, "queries"), "1.01 queries/s"),
        (units.rate(None, "queries"), "n/a"),
        (units.share(0.004), "0.4%"),
        (units.share(0.22), "22%"),
        (units.share(0.0001), "<0.1%"),
        (units.share(0), "0%"),
        (units.money(32.74), "$32.74"),
        (units.money(3460), "$3,460"),
        (units.money(0), "$0.00"),
        (units.money(0.00001), "<$0.0001"),
        (units.money(0.0012), "$0.0012"),
        (units.clock(761), "12:41"),
        (units.clock(3753), "1:02:33"),
        (units.interval(7.6, 9.6), "[7.60-9.60]"),
        (units.interval(None, 1.0), ""),
        (hours_text((8.5, 7.6, 9.6)), "8.50 h [7.60-9.60]"),
        (hours_text((0.05, 0.04, 0.06)), "3.00 min [2.40-3.60]"),
        (hours_text((480.0, 480.0, 480.0)), "20.0 d"),
        (row_name(r.ProjectionRow(gpu="A40", gpus=8)), "8x A40"),
        (row_name(r.ProjectionRow(gpu="A40", gpus=1)), "A40"),
        (row_text(r.ProjectionRow(gpu="A40", gpus=8, hours=(1.0, 1.0, 1.0))), "8x A40 1.00 h"),
        (batch_text(r.ProjectionRow(gpu="A40", batch=4, accumulation=1.0)), "4"),
        (batch_text(r.ProjectionRow(gpu="A40", batch=4, accumulation=8.0)), "4 x 8"),
        (batch_text(r.ProjectionRow(gpu="A40")), "n/a"),
        (usd_text((17.9, 16.0, 20.0)), "$17.90 [$16.00-$20.00]"),
        (usd_text((17.9, 17.9, 17.9)), "$17.90"),
    ],
)
def test_figures(found: str, text: str) -> None:
    assert found == text


@given(ANY)
def test_every_figure_can_be_shown_and_unmeasured_is_never_zero(value: float | None) -> None:
    for show in FORMATTERS:
        text = show(value)
        assert text
        assert (text == "n/a") == (value is None or not math.isfinite(value))


@given(st.floats(3500, 3700))
def test_around_an_hour(seconds: float) -> None:
    assert units.duration(seconds) == units.hours(seconds / 3600)


def test_clean_takes_what_a_terminal_would_act_on() -> None:
    hostile = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\ne\x7f\u202ef\u2028g"
    assert clean(hostile) == "abcd e  f g"
    assert clean("\x1b") == " "
    assert clean("\ud800") == " "
    assert clean("x" * 1000, 10) == "x" * 9 + "…"
    assert len(clean("\x1b[0m" * 10_000 + "y" * 500)) <= 200


@given(st.text())
def test_clean_is_printable(text: str) -> None:
    found = clean(text)
    assert len(found) <= 200
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in found)


def test_a_sample_prefers_no_part_of_a_run() -> None:
    means = []
    for limit in (16, 64, 512):
        sample: EvenSample[int] = EvenSample(limit=limit)
        for i in range(50_000):
            sample.add(i)
        means.append((sum(sample.items()) / limit - 25_000) / (50_000 / math.sqrt(12 * limit)))
    assert all(abs(mean) < 3 for mean in means)  # in standard errors of the mean of a uniform sample


@dataclass(frozen=True)
class Row:
    one: float | None
    two: float | None = None
    never: float | None = None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
@settings(max_examples=30, deadline=None)
def test_curves_of_rows_are_those_of_their_columns(values: list[float]) -> None:
    rows, column = RowCurves(("one", "two", "never"), 16), CurveBuilder(16)
    for i, value in enumerate(values):
        rows.add(i, Row(value, 2 * value if i % 3 else None))
        column.add(i, value)
    found = rows.curves()
    assert [x for x, _ in found["one"]] == [x for x, _ in column.points()]
    assert [y for _, y in found["one"]] == pytest.approx([y for _, y in column.points()], abs=1e-6)
    assert "never" not in found
    assert len(found["one"]) <= 16 + 1


def test_a_row_that_lacks_a_figure_is_left_out_of_its_mean() -> None:
    rows = RowCurves(("one", "two"), 4)
    for i in range(8):
        rows.add(i, Row(float(i), 10.0 * i if i % 2 else None))
    assert rows.curves() == {"one": ((3, 1.5), (7, 5.5)), "two": ((3, 20.0), (7, 60.0))}
    rows.cut_after(5)
    assert rows.curves() == {"one": ((3, 1.5),), "two": ((3, 20.0),)}


@given(st.integers(0, 3), st.lists(st.integers(), max_size=300))
def test_an_item_that_is_made_only_when_wanted_is_sampled_as_any_other(seed: int, items: list[int]) -> None:
    whole: EvenSample[int] = EvenSample(10)
    lazy: EvenSample[int] = EvenSample(10)
    made = 0
    for item in items:
        whole.add(item)
        if lazy.wants():
            made += 1
            lazy.take(item)
    assert whole.items() == lazy.items()
    assert made <= len(items)
