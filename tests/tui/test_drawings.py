"""The pure drawings, without an app."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_insight.experts import LayerLoad
from ft_insight.layer_times import LayerTime
from ft_insight.run import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets import experts, layers, plots
from ft_insight.tui.widgets.text import clean, cut, table, tail, wrap


@given(st.text(max_size=300))
def test_clean_leaves_nothing_that_moves_a_cursor(text: str) -> None:
    line = clean(text)
    assert line.isprintable()
    assert clean(line) == line


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(1, 200))
def test_split_adds_up(shares: list[float], width: int) -> None:
    cells = plots.split(shares, width)
    assert all(c >= 0 for c in cells)
    assert sum(cells) == (width if sum(shares) > 0 else 0)


@pytest.mark.parametrize(("fraction", "full"), [(0, 0), (0.5, 5), (1, 10), (7, 10), (-1, 0)])
def test_bar(fraction: float, full: int) -> None:
    line = plots.bar(fraction, 10)
    assert line.cell_len == 10
    bright = sum(s.end - s.start for s in line.spans if plots.TRACK not in str(s.style))
    assert (bright or (full if not line.spans else 0)) == full or line.plain.count("━") == 10


def test_spark_is_scaled_from_zero() -> None:
    points = tuple((float(i), y) for i, y in enumerate((0.0, 7.0, 3.0)))
    assert plots.spark(points, 3).plain == "▁█▄"
    assert plots.spark((), 10).plain == ""


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e9, 1e9)), min_size=1, max_size=40),
    st.integers(3, 30),
    st.integers(24, 120),
)
def test_chart_keeps_its_size(points: list[tuple[float, float]], height: int, width: int) -> None:
    curve = tuple(sorted(points))
    lines = plots.chart(plots.trend(curve), width, height, plots.Axis(plots.tick), plots.Axis(plots.tick))
    assert len(lines) == height
    assert all(line.cell_len <= width + 24 for line in lines)


def test_chart_marks_values_at_their_rows() -> None:
    curve = tuple((float(x), float(x)) for x in range(101))
    lines = plots.chart([plots.Layer(curve)], 60, 11, plots.Axis(plots.tick), plots.Axis(plots.tick))
    assert lines[0].plain.startswith("100┤")
    assert lines[9].plain.startswith("  0┤")
    assert lines[10].plain.split() == ["0", "100"]


def test_smooth_keeps_a_constant() -> None:
    assert plots.smooth(tuple((float(i), 3.0) for i in range(200))) == tuple((float(i), 3.0) for i in range(200))


def test_tables_align() -> None:
    lines = table([["a", "10"], ["long", "7"]], "<>")
    assert [line.plain for line in lines] == ["a     10", "long   7"]


def test_long_text() -> None:
    assert tail("/a/very/long/path.jsonl", 10) == "…ath.jsonl"
    lines = wrap("one two three four five six seven eight nine ten", 10, most=2)
    assert len(lines) == 2
    assert lines[-1].plain.endswith("…")
    assert cut(lines[0], 4).plain == "one…"


def test_layer_names_are_what_differs() -> None:
    layers = [LayerLoad(f"model.layers.{i}.mlp.gate", (1, 1), 1) for i in (3, 17)]
    assert experts.layer_names(layers) == ["3", "17"]
    assert experts.layer_names(layers[:1]) == ["model.layers.3.mlp.gate"]


def test_grouping_keeps_the_busiest() -> None:
    assert experts.grouped([1, 2, 9, 4, 5], 3) == [2, 9, 5]
    assert experts.grouped([1, 2], 8) == [1, 2]


def test_heat_has_its_even_share_in_the_middle() -> None:
    assert experts.heat(1.0) == experts.heat(0.95) == experts.heat(1.05)
    assert experts.heat(0.0) != experts.heat(1.0) != experts.heat(2.0)
    assert experts.heat(math.inf if False else 50.0) == experts.heat(2.0)


def _frame(seconds: dict[str, float]) -> Frame:
    times = tuple(LayerTime(0, kind, value, 0.0, 0.0) for kind, value in seconds.items())
    return Frame(view=RunView(layers=times, layer_steps=1))


def test_layers_that_do_not_fit_are_summed_up() -> None:
    frame = _frame({"experts": 0.4, "router": 0.06, "attention": 0.3, "head": 0.2, "around": 0.03, "embedding": 0.01})
    three = [line.plain.split()[: 5 if "others" in line.plain else 4] for line in layers.overview_lines(frame, 30, 3)]
    assert three == [
        ["MoE", "46%", "460", "ms"],
        ["attention", "30%", "300", "ms"],
        ["3", "others", "24%", "240", "ms"],
    ]
    five = [line.plain.split()[:2] for line in layers.overview_lines(frame, 30, 5)]
    assert five == [["MoE", "46%"], ["experts", "40%"], ["attention", "30%"], ["head", "20%"], ["2", "others"]]
    everything = layers.overview_lines(frame, 30, 9)
    assert len(everything) == 7


@given(
    st.dictionaries(
        st.sampled_from(["experts", "router", "moe", "attention", "mlp", "input_norm", "final_norm", "head"]),
        st.floats(0, 100),
        min_size=1,
    ),
    st.integers(1, 12),
    st.integers(20, 150),
)
def test_layers_fit_and_their_shares_add_up(seconds: dict[str, float], height: int, width: int) -> None:
    lines = layers.overview_lines(_frame(seconds), width, height)
    assert 1 <= len(lines) <= height
    if height > 1 and sum(seconds.values()) > 0:
        shares = [float(re.findall(r"([\d.]+)%", line.plain)[0]) for line in lines if line.plain[0] != " "]
        assert sum(shares) == pytest.approx(100, abs=1 + len(lines))
    assert len(layers.compact_line(_frame(seconds), width, 1)) == 1
    layers.kind_table(_frame(seconds), width, height)
    layers.decoder_lines(_frame(seconds), width, height)
