from __future__ import annotations

import re
import statistics

import pytest

from ft_insight.demo.rows import _TEMPLATES, generate_rows

_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return generate_rows()


def _holds(a: int, op: str, b: int, c: int) -> bool:
    return {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[op]


def test_every_sum_is_right_and_the_last_one_is_the_answer(rows: list[dict[str, str]]) -> None:
    for row in rows + generate_rows(2000, seed=99):
        *steps, last = row["completion"].split("\n")
        assert 1 <= len(steps) <= 6
        results = []
        for step in steps:
            found = _SUM.findall(step)
            assert len(found) == 1, step
            (a, op, b, c) = found[0]
            assert _holds(int(a), op, int(b), int(c)), step
            results.append(int(c))
        assert last == f"#### {results[-1]}"
        assert results[-1] > 0


def test_steps_use_only_numbers_that_were_told_or_worked_out(rows: list[dict[str, str]]) -> None:
    """The answer follows from the question: no step takes a number out of thin air."""
    for row in rows:
        known = {int(number) for number in re.findall(r"\d+", row["prompt"])}
        for a, op, b, c in _SUM.findall(row["completion"]):
            # "half" and "four sides" mean two; ten, twenty-five and so on percent mean a part.
            implied = {2} | {100 // n for n in (10, 20, 25, 50) if f"{n} percent" in row["prompt"]}
            assert int(a) in known, row
            assert int(b) in known | implied, (op, row)
            known.add(int(c))


def test_no_placeholder_or_singular_slips_through(rows: list[dict[str, str]]) -> None:
    for row in rows + generate_rows(1000, seed=4):
        assert not re.search(r"[{}]", row["prompt"] + row["completion"])
        assert not re.search(r"(?<!\d)[01] [a-z]", row["prompt"]), row["prompt"]
        assert row["prompt"].endswith("?")
        assert set(row) == {"prompt", "completion"}


def test_same_seed_same_rows_and_a_short_run_is_the_start_of_a_long_one(rows: list[dict[str, str]]) -> None:
    assert generate_rows() == rows
    assert generate_rows(40) == rows[:40]
    assert generate_rows(40, seed=1) != rows[:40]


@pytest.mark.parametrize("seed", range(10))
def test_lengths_spread_like_a_real_set(seed: int) -> None:
    lengths = sorted(len(row["prompt"]) + len(row["completion"]) for row in generate_rows(400, seed))
    median = statistics.median(lengths)
    assert 1.8 <= lengths[379] / median <= 2.25
    assert 0.35 <= lengths[0] / median <= 0.55
    assert lengths[-1] / median > 2.5
    assert statistics.mean(lengths) > median  # the tail is on the right


def test_rows_differ_and_come_from_many_templates(rows: list[dict[str, str]]) -> None:
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len(_TEMPLATES) >= 10
    openings = {re.sub(r"\d+", "0", row["completion"]).split()[0] for row in rows}
    assert len(openings) >= 10


def test_numbers_of_rows() -> None:
    assert generate_rows(0) == []
    assert len(generate_rows(7)) == 7
    with pytest.raises(ValueError, match="-1"):
        generate_rows(-1)


def test_the_default_rows_are_well_inside_the_range(rows: list[dict[str, str]]) -> None:
    lengths = sorted(len(row["prompt"]) + len(row["completion"]) for row in rows)
    assert 1.8 <= lengths[379] / statistics.median(lengths) <= 2.2
    assert 0.35 <= lengths[0] / statistics.median(lengths) <= 0.5
