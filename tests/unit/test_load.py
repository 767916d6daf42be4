"""Load of experts over a run and across runs, with the paper's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from makers import end, header, log, steps, view

from ft_insight import records as r
from ft_insight.cli import main
from ft_insight.experts import LayerLoad, ModelLoad, model_load
from ft_insight.verdict import findings

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "measurements.json"


def test_the_papers_variances() -> None:
    """FACTS: with n throughout, Mixtral HE 48.6 -> 112.3, GS 21.2 -> 79.2; BlackMamba 131.9 -> 81.7, 163.2 -> 164.4."""
    if not PAPER.exists():
        pytest.skip("needs the paper's measurements, which do not ship with the package")
    distribution = json.loads(PAPER.read_text())["tokens_per_query_per_expert"]
    expected = {
        "Mixtral": {"HE": 48.6, "HE_tuned": 112.3, "GS": 21.2, "GS_tuned": 79.2},
        "BlackMamba": {"HE": 131.9, "HE_tuned": 81.7, "GS": 163.2, "GS_tuned": 164.4},
    }
    for model, sets in expected.items():
        for name, variance in sets.items():
            means = distribution[model]["rows"][name]
            # as counts of one layer over 10,000 queries, so that it goes through all of this project's code
            layer = LayerLoad("gate", tuple(round(m * 10_000) for m in means), 1)
            load = model_load([layer], 10_000)
            assert load is not None
            assert load.variance_n == pytest.approx(variance, abs=0.06)


def test_variance_by_hand() -> None:
    load = ModelLoad((1.0, 2.0, 3.0, 6.0), 10)
    assert load.variance_n == pytest.approx((4 + 1 + 0 + 9) / 4)
    assert load.variance_n1 == pytest.approx(14 / 3)
    assert load.shares == pytest.approx((1 / 12, 2 / 12, 3 / 12, 6 / 12))
    assert ModelLoad((5.0,), 1).variance_n1 is None


def test_means_are_over_layers_and_queries() -> None:
    layers = [LayerLoad("a", (10, 30), 20), LayerLoad("b", (30, 50), 40)]
    load = model_load(layers, 10)
    assert load is not None
    assert load.means == (2.0, 4.0)
    assert model_load(layers, None) is None
    assert model_load([*layers, LayerLoad("c", (1, 2, 3), 3)], 10) is None
    assert model_load([], 10) is None


@pytest.mark.parametrize(("counts", "entropy"), [((5, 5, 5, 5), 1.0), ((7, 0), 0.0), ((3, 1), 0.8112781), ((4,), 1.0)])
def test_entropy(counts: tuple[int, ...], entropy: float) -> None:
    assert LayerLoad("gate", counts, sum(counts)).entropy == pytest.approx(entropy, abs=1e-6)


def experts(step: int, counts: tuple[int, ...], queries: int | None = 10) -> r.Experts:
    return r.Experts(
        step=step, t_s=float(step), mode="train", layers=("gate",), counts=(counts,), tokens=(20,), queries=queries
    )


def test_start_and_end_of_a_run_and_what_changed() -> None:
    # 100 steps: the first and the last 5 are its start and its end
    middle = [experts(s, (100, 100, 100, 100)) for s in range(6, 96)]
    start = [experts(s, (90, 110, 100, 100)) for s in range(1, 6)]
    last = [experts(s, (40, 100, 100, 160)) for s in range(96, 101)]
    seen = view([header(train={"max_steps": 100}), *start, *middle, *last])
    assert seen.load_start is not None
    assert seen.load_end is not None
    assert seen.load_start.means == (9.0, 11.0, 10.0, 10.0)
    assert seen.load_end.means == (4.0, 10.0, 10.0, 16.0)
    assert (seen.load_start.variance_n, seen.load_end.variance_n) == pytest.approx((0.5, 18.0))
    text = next(f.text for f in findings(seen) if "changed" in f.text)
    assert "variance 0.500 -> 18.0" in text
    assert "expert 0 took 22% -> 10%" in text or "expert 3 took 25% -> 40%" in text


def test_no_word_of_change_where_there_is_none() -> None:
    same = [experts(s, (90, 110, 100, 100)) for s in range(1, 101)]
    assert not any("changed" in f.text for f in findings(view([header(train={"max_steps": 100}), *same])))
    unknown = [experts(s, (90 + s, 110, 100, 100), queries=None) for s in range(1, 101)]
    assert view([header(train={"max_steps": 100}), *unknown]).load_start is None


def test_compare_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = log(tmp_path / "a.jsonl", [header(), *steps(4, wall_s=2.0), experts(4, (100, 100)), end(8.0)])
    after = log(tmp_path / "b.jsonl", [header(), *steps(4, wall_s=1.0), experts(4, (50, 150)), end(4.0)])
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    assert "-50.0%" in said  # the step
    assert "+100.0%" in said  # queries per second
    assert "expert 0 moved most: 50% -> 25%" in said or "expert 1 moved most: 50% -> 75%" in said
    assert "25%" in said.splitlines()[-1]  # a quarter of the tokens went elsewhere
    assert main(["compare", str(before), str(before)]) == 0
    assert "moved most" not in capsys.readouterr().out


def test_nothing_to_compare_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = log(tmp_path / "a.jsonl", [header(), end(1.0)])
    assert main(["compare", str(empty), str(empty)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
