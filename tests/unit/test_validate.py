"""``ft-insight validate`` over tables of measurements."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft_insight import validate
from ft_insight.cli import main
from ft_insight.validate import sweeps
from ft_insight.validate.checked import Checked
from ft_insight.validate.summary import report_text
from ft_insight.validate.table import (
    COLUMNS,
    TableError,
    length_of,
    method_of,
    number,
    read_table,
    says_yes,
    seconds_of,
)

PUBLISHED = Path(__file__).resolve().parents[2].parent / "shared" / "field" / "validation.csv"


def row(**said: Any) -> dict[str, str]:
    return {
        **dict.fromkeys(COLUMNS, ""),
        "source": "a paper",
        "gpu": "A40",
        "n_gpus": "1",
        **{k: f"{v}" for k, v in said.items()},
    }


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def sweep(count: int = 8, **said: Any) -> list[dict[str, str]]:
    return [
        row(sweep_id="s", batch_per_gpu=b, seq_len="<=512", step_time_s=0.3 + 0.05 * b, **said)
        for b in range(1, count + 1)
    ]


def test_a_sweep_on_a_line_is_predicted() -> None:
    checks, left_out = sweeps.check(sweep())
    assert left_out == []
    assert [check.label for check in checks][:2] == ["s: batch 1", "s: batch 2"]
    assert {check.method for check in checks} == {"leave-one-out"}
    assert all(abs(check.error) < 0.01 for check in checks[1:-1])
    assert all(check.covered for check in checks)


def test_each_point_is_predicted_without_itself() -> None:
    """A point that is moved moves its own error by that much, and no more: it was not in the fit."""
    rows = sweep()
    rows[4]["step_time_s"] = f"{float(rows[4]['step_time_s']) * 1.5}"
    checks, _ = sweeps.check(rows)
    assert checks[4].error == pytest.approx(1 / 1.5 - 1, abs=0.01)
    assert checks[4].covered is False


@pytest.mark.parametrize("unit", ["queries/s", "samples/s"])
def test_times_from_throughput(unit: str) -> None:
    rows = sweep()
    for each in rows:
        each["throughput"], each["unit"] = f"{2 * int(each['batch_per_gpu']) / float(each['step_time_s'])}", unit
        each["step_time_s"], each["n_gpus"] = "", "2"
    checks, _ = sweeps.check(rows)
    assert checks[3].measured == pytest.approx(0.3 + 0.05 * 4)


def test_a_sweep_over_lengths_goes_by_slots() -> None:
    rows = [
        row(sweep_id="t", batch_per_gpu=2, seq_len=n, step_time_s=0.1 + 2e-4 * n) for n in (128, 256, 512, 1024, 2048)
    ]
    rows += [
        row(sweep_id="u", batch_per_gpu=2, seq_len=n, throughput=2 * n / (0.1 + 2e-4 * n), unit="tokens/s")
        for n in (128, 256, 512, 1024)
    ]
    checks, left_out = sweeps.check(rows)
    assert left_out == []
    assert checks[2].label == "t: batch 2 x 512"
    assert {check.method for check in checks} == {"leave-one-out, tokens"}
    assert checks[2].error == pytest.approx(0, abs=0.01)
    assert checks[6].measured == pytest.approx(0.1 + 2e-4 * 256)


def test_rows_of_two_lengths_are_two_sweeps() -> None:
    rows = sweep() + [{**each, "seq_len": "mean 100"} for each in sweep()]
    checks, _ = sweeps.check(rows)
    assert {check.label.split(":")[0] for check in checks} == {"s <=512", "s mean 100"}


def test_too_few_sizes_are_left_out_and_named() -> None:
    checks, left_out = sweeps.check([*sweep(3), row(sweep_id="other", batch_per_gpu=1, seq_len="79", step_time_s=1)])
    assert checks == []
    assert left_out == ["2 sweeps of fewer than 4 sizes left out: s, other"]


def test_the_report_by_hand() -> None:
    checks = [
        Checked("leave-one-out", "one", "A40", "s: batch 1", 1.0, 1.1, "s", low=0.9, high=1.2),
        Checked("leave-one-out", "one", "A40", "s: batch 2", 1.0, 0.7, "s", low=0.6, high=0.8),
        Checked("leave-one-out", "two", "L4", "u: batch 2", 2.0, 2.0, "s", low=1.9, high=2.1),
        Checked("peak memory", "two", "L4", "a model", 10.0, 12.0, "GiB"),
    ]
    lines = [" ".join(line.split()) for line in report_text("x.csv", 9, checks, ["one row: no size"]).splitlines()]
    assert lines[0] == "x.csv · 9 rows · 4 predictions, none of which has seen itself"
    assert "s: batch 2 A40 1.00 s 0.700 s [0.600-0.800] misses it -30.0%" in lines
    assert "a model L4 10.0 GiB 12.0 GiB +20.0%" in lines
    assert "one row: no size" in lines
    assert "one leave-one-out 2 20.0% 20.0% 30.0% 50%" in lines
    assert "L4 peak memory 1 20.0% 20.0% 20.0%" in lines
    # errors 10, 30 and 0%: 13.3% over points, and (20 + 0) / 2 over the two sweeps
    assert "leave-one-out 3 13.3% 10.0% 30.0% 67% 10.0% of 2" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv has no column source, model"),
        ("a,b\n1,2\n", "x.csv has no column source, model"),
        (",".join(c for c in COLUMNS if c != "gpu") + "\n", "x.csv has no column gpu; needed are source, model"),
        (",".join(COLUMNS) + "\n", "x.csv has no rows"),
        (",".join(COLUMNS) + "\nx\n", "x.csv holds nothing to check"),
    ],
)
def test_a_file_that_is_no_table(text: str, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    assert main(["validate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ft-insight: {message}")
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path, capsys: Any) -> None:
    assert main(["validate", str(tmp_path / "no.csv")]) == 2
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00\x01")
    assert main(["validate", str(tmp_path / "x.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_cells() -> None:
    assert (number("3.5"), number(""), number("<=512"), number("-1"), number("inf"), number("nan")) == (
        3.5,
        *[None] * 5,
    )


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1,024", 1024.0),
        ("12,345.5", 12345.5),
        ("~5", 5.0),
        ("0,512", None),
        ("1,02", None),
        ("12%", None),
        ("3 s", None),
    ],
)
def test_cells_as_people_write_them(cell: str, value: float | None) -> None:
    assert number(cell) == value


@pytest.mark.parametrize(
    ("cell", "length"),
    [
        ("512", 512.0),
        (" 8192 ", 8192.0),
        ("1,024", 1024.0),
        ("174(median)", 174.0),
        ("79 (mean)", 79.0),
        ("<=768 (mean ~210)", 210.0),
        ("average 1,300, cut at 2048", 1300.0),
        ("<=512", None),
        ("512-1024", None),
        ("512 to 1024", None),
        ("4k", None),
        ("alpaca (max 1034-1304)", None),
        ("about five hundred", None),
        ("", None),
    ],
)
def test_lengths(cell: str, length: float | None) -> None:
    assert length_of(cell) == length


def test_methods_and_affirmations() -> None:
    said = {
        "full": ("Full", "full-finetuning:lr_0.00001", "FFT", "SFT (all weights)", "pre-training"),
        "qlora": ("QLoRA", "QLoRA (HF)", "QAdapter(bnb.nf4-dq)", "LoRA 4-bit", "q-lora", "LoRA (gptq)"),
        "lora": ("LoRA", "lora:rank32-dora", "prefixtuning:lr_0.001", "IA3"),
    }
    for method, cells in said.items():
        assert {cell: method_of(cell) for cell in cells} == dict.fromkeys(cells, method)
    assert method_of("") is None
    assert [says_yes(cell) for cell in ("yes", "True", "1", "no", "", "False")] == [True] * 3 + [False] * 3


def test_seconds_from_what_is_stated() -> None:
    # 4 rows of 256 on each of 2 GPUs: 8 rows, 2048 tokens a step
    said = {"batch_per_gpu": 4, "seq_len": 256, "n_gpus": 2}
    assert seconds_of(row(**said, throughput="1,024", unit="Tokens/s (non-pad)")) == 2.0
    assert seconds_of(row(**said, throughput=4, unit="Sequences/sec")) == 2.0
    assert seconds_of(row(**said, throughput=4, unit="samples/s", step_time_s=3)) == 3.0
    assert seconds_of(row(**said, throughput=4, unit="")) is None
    assert seconds_of(row(**said, throughput=4, unit="minutes")) is None
    assert seconds_of(row(throughput=4, unit="samples/s")) is None


def test_a_size_measured_twice_does_not_give_itself_away() -> None:
    """Both rows of batch 4 are off by half: each is predicted from the other sizes, so both errors are a third."""
    rows = sweep()
    rows.append(dict(rows[3]))
    for each in (rows[3], rows[-1]):
        each["step_time_s"] = f"{0.5 * 1.5}"
    checks, _ = sweeps.check(rows)
    assert [check.error for check in checks if check.label == "s: batch 4"] == pytest.approx(
        [1 / 1.5 - 1] * 2, abs=0.02
    )


def test_rows_of_a_sweep_without_a_time_are_named() -> None:
    rows = sweep()
    rows[2]["step_time_s"], rows[5]["batch_per_gpu"] = "12%", ""
    checks, left_out = sweeps.check(rows)
    assert len(checks) == 6
    assert left_out == ["s: 2 rows left out: no batch, or no time of a step"]


def test_rows_with_nothing_to_compare_are_counted(tmp_path: Path) -> None:
    text = validate.validate_text(table(tmp_path / "x.csv", [*sweep(), row(notes="x"), row(throughput=3)]))
    assert "2 rows left out: no sweep_id, no pair_id and no peak memory" in text


CELLS = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e400",
        "1,024",
        "12%",
        "~5",
        "3.5 s",
        "<=512",
        "N/A",
        "1e-300",
        "yes",
        "8x",
        "\x1b[2J",
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.dictionaries(st.tuples(st.integers(0, 7), st.sampled_from(COLUMNS)), CELLS, max_size=30))
def test_odd_cells_never_end_in_a_traceback(cells: dict[tuple[int, str], str], tmp_path: Path) -> None:
    rows = sweep(5, model="m", params_b=7, method="LoRA", grad_ckpt="no")
    rows += [{**rows[i], "sweep_id": "", "pair_id": "p", "gpu": gpu} for i, gpu in enumerate(("A40", "h100", "L40S"))]
    for (index, name), cell in cells.items():
        rows[index][name] = cell
    try:
        text = validate.validate_text(table(tmp_path / "x.csv", rows), fast=True)
    except TableError as error:
        text = f"{error}"
    assert "\x1b" not in text
    assert "none of which has seen itself" in text or "\n" not in text


def test_short_rows_are_read(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", sweep())
    path.write_text(path.read_text() + "b,c\n")
    rows = read_table(path)
    assert rows[-1]["source"] == "b"
    assert rows[-1]["notes"] == ""
    with pytest.raises(TableError):
        read_table(table(tmp_path / "y.csv", []))


def test_peak_memory_is_left_out_when_fast_or_without_torch(tmp_path: Path, monkeypatch: Any) -> None:
    path = table(tmp_path / "x.csv", [*sweep(), row(peak_mem_gib=20)])
    assert "1 rows of peak memory left out: --fast was asked for" in validate.validate_text(path, fast=True)
    monkeypatch.setattr(validate, "find_spec", lambda name: None)
    assert "1 rows of peak memory left out: they need torch" in validate.validate_text(path)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="needs the shared field folder beside the repository")
def test_published_sweeps() -> None:
    checks, left_out = sweeps.check(read_table(PUBLISHED))
    by_sweep: dict[str, list[float]] = {}
    for check in checks:
        by_sweep.setdefault(check.label.split(":")[0], []).append(abs(check.error))
    means = [sum(errors) / len(errors) for errors in by_sweep.values()]
    held = [check.covered for check in checks]
    assert len(means) == 11
    assert sum(means) / len(means) <= 0.04
    assert 0.7 <= sum(map(bool, held)) / len(held) <= 0.9
    assert len(left_out) == 1
