"""The pure drawings, without an app."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_insight import records as r
from ft_insight.experts import LayerLoad
from ft_insight.layer_times import LayerTime
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets import expert_page, experts, kernels, layers, plots
from ft_insight.tui.widgets.text import clean, cut, table, tail, wrap
from tests.tui.made import kernels as recorded
from tests.tui.made import role


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
    assert experts.busiest([1, 2, 9, 4, 5], 3) == [1, 2, 4]
    assert experts.busiest([1, 2], 8) == [0, 1]


def test_heat_has_its_even_share_in_the_middle() -> None:
    heat = expert_page.heat
    assert heat(1.0) == heat(0.95) == heat(1.05)
    assert heat(0.0) != heat(1.0) != heat(2.0)
    assert heat(50.0) == heat(2.0)


def test_change_has_nothing_in_the_middle() -> None:
    change = expert_page.diverging
    assert change(0.0) == change(0.05) == change(-0.05)
    assert change(1.0) == change(2.0) == "#ffa23a"
    assert change(-1.0) == change(-7.0) == "#6cb0f0"
    assert [experts.points(x) for x in (0.1241, -0.003, 0.0004, -0.0004)] == ["+12.4", "-0.3", "0", "0"]


def _experts(layers: int, counts: tuple[int, ...], **choices: object) -> Frame:
    loads = tuple(LayerLoad(f"model.layers.{i}.mlp", counts, 9) for i in range(layers))
    even = tuple(LayerLoad(f"model.layers.{i}.mlp", (1,) * len(counts), 9) for i in range(layers))
    view = RunView(experts=loads, experts_start=even, experts_end=loads)
    return Frame(view=view, **choices)  # type: ignore[arg-type]


@pytest.mark.parametrize("experts_of_a_layer", [1, 8, 64, 256])
@pytest.mark.parametrize("layer_count", [1, 2, 80])
@pytest.mark.parametrize(("width", "height"), [(77, 19), (77, 43), (116, 35), (156, 43), (20, 5)])
@pytest.mark.parametrize("since_start", [False, True])
def test_heat_map_leaves_room(
    experts_of_a_layer: int, layer_count: int, width: int, height: int, since_start: bool
) -> None:
    frame = _experts(
        layer_count, tuple(range(experts_of_a_layer)), since_start=since_start, layer="model.layers.70.mlp"
    )
    lines = expert_page.heat_lines(frame, width, height)
    text = "\n".join(line.plain for line in lines)
    assert ("▸ 70 " in text) == (layer_count == 80)
    assert text.count("▸") == 1
    if height > 5:
        assert len(lines) <= height - 7
        assert max(line.cell_len for line in lines) <= width
    for room in (1, 2, 3, 6, 12, 40):
        assert len(expert_page.detail_lines(frame, width, room)) <= max(room, 2)


def test_start_is_marked_on_columns() -> None:
    # 30 experts in 10 lines at most: columns; expert 0 went from 1/30 to half of all, the highest of the columns
    now, start = LayerLoad("a", (29, *(1,) * 29), 9), LayerLoad("a", (1,) * 30, 9)
    lines = [line.plain for line in experts.load_lines(now, 70, 11, start)]
    assert len(lines) == 11
    assert lines[-1].strip() == "experts 0 to 29"
    assert lines[0][5:7] == "█ "
    assert lines[9][:7] == "even┤─ "
    assert lines[9].count("─") == 30


def test_many_experts_stand_in_bands() -> None:
    lines = [line.plain for line in experts.load_lines(LayerLoad("a", tuple(range(256)), 9), 69, 20)]
    notes = [line.strip() for line in lines if "experts" in line]
    assert notes == ["experts 0 to 63", "experts 64 to 127", "experts 128 to 191", "experts 192 to 255"]
    assert len(lines) == 20


def _roles(on_device: bool) -> Frame:
    clock = "cuda" if on_device else "host"
    return Frame(view=RunView(kernels=recorded(clock, [role("experts", "matmul_w1_w3", "forward", 0.5)])))


@pytest.mark.parametrize("width", [10, 40, 76, 115, 155, 220])
@pytest.mark.parametrize("on_device", [False, True])
def test_kernels_keep_their_width(width: int, on_device: bool) -> None:
    frame = _roles(on_device)
    lines = [*kernels.head_lines(frame, width, 20), *kernels.role_lines(frame, width, 20)]
    assert max(line.cell_len for line in lines) <= width
    assert "experts" in kernels.role_lines(frame, width, 20)[0].plain


def test_kernels_without_any_role() -> None:
    step = r.Kernels(step=6, t_s=1.0, clock="host", window_s=0.0, busy_s=0.0, roles=())
    frame = Frame(view=RunView(kernels=step))
    assert kernels.role_lines(frame, 80, 20) == []
    assert "in operators n/a" in kernels.head_lines(frame, 80, 20)[0].plain


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
