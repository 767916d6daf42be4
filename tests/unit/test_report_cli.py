"""Reports in every form, and the commands as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from makers import A40, CPU, GIB, end, header, log, micro, step, steps

from ft_insight import cli
from ft_insight import records as r
from ft_insight.estimate import estimate_records
from ft_insight.reader import Status, read_run
from ft_insight.report import FORMATS, render
from ft_insight.report.layout import Section, columns, escape, pipes, to_text
from ft_insight.run import RunState
from ft_insight.summary import summary_lines
from ft_insight.verdict import findings

ROOT = Path(__file__).resolve().parents[2]
DONE = Status("completed", "completed")


def full_run() -> list[r.Record]:
    lengths = {"queries": 1000, "length_values": (50, 100, 200), "length_counts": (5, 3, 2)}
    train = {"epochs": 2.0, "max_steps": 30, "lora_rank": 16}
    items: list[r.Record] = [
        header(devices=(A40,), price_usd_per_hour=0.79, dataset=lengths, train=train, model={"experts": 4})
    ]
    for i in range(1, 31):
        slots = 10 * (50, 100, 200)[i % 3]
        seconds = 0.1 + slots * 1e-3
        memory = r.Memory(
            allocated_bytes=9 * GIB, peak_allocated_bytes=12 * GIB, peak_reserved_bytes=13 * GIB, rss_bytes=GIB
        )
        items.append(
            step(
                i,
                i * 3.0,
                seconds + 0.5,
                phases_s={"data_wait": 0.3, "forward": seconds / 3, "backward": seconds * 2 / 3, "optimizer": 0.2},
                micro=(micro(10, slots, slots // 2, compute_s=seconds),),
                memory=memory,
                self_s=0.001,
                skipped=i == 1,
            )
        )
        items.append(r.Logs(step=i, t_s=i * 3.0, values={"loss": 3.0 - i / 20}))
    items.append(r.Span(kind="evaluation", t_s=93.0, wall_s=4.0, step=30))
    counts = ((10, 20, 70, 0), (25, 25, 25, 25))
    items.append(
        r.Experts(step=30, t_s=93.0, mode="train", layers=("layers.0", "layers.1"), counts=counts, tokens=(50, 50))
    )
    items.append(
        r.Gpu(
            t_s=1.0,
            samples=(
                r.GpuSample(
                    uuid="GPU-1", gpu_percent=97.0, power_w=250.0, memory_used_bytes=GIB, memory_total_bytes=48 * GIB
                ),
            ),
        )
    )
    items.append(r.Notice(t_s=1.0, collector="gpu", text="no GPM on this card"))
    return items


def finished(items: list[r.Record]) -> list[r.Record]:
    seen = RunState().replay(items)
    return [*items, *estimate_records(seen, seen.clock_s), end(seen.clock_s, "completed", seen.step)]


def shown(items: list[Any], form: str = "text", status: Status = DONE) -> str:
    return render(RunState().replay(items), status, form)


# what a report says


def test_a_report_says_what_was_measured() -> None:
    text = shown(finished(full_run()))
    head = text.splitlines()[0]
    assert head.startswith("run-1 · mixtral LoRA r16 · NVIDIA A40 · 30 steps · 1m 37s · $0.02")
    for part in (
        "data",
        "forward",
        "by the host's clock; the phases add up to 100% of the steps' wall time",
        "evaluation 4.00 s",
        "padding 50% of slots",
        "loss: 2.95 -> 1.5",
        "layers.0",
        "70%",
        "2.80",  # max over mean of 70 of 100 over four experts
        "peak 12.0 GiB allocated, 13.0 GiB reserved",
        "GPU 0 is GPU-1",
        "Use of GPU 0 by phase",
        "1,000 rows x 2 epochs",
        "gpu: no GPM on this card",
        "T = 0.100 + 1.00·kslots s a micro-batch",
    ):
        assert part in text, part
    row = next(line.split() for line in text.splitlines() if "1.0 GiB of 48.0 GiB" in line)
    assert row[:9] == ["0", "97%", "n/a", "n/a", "n/a", "1.0", "GiB", "of", "48.0"]
    assert row[10:14] == ["250", "of", "n/a", "W"]


def test_findings_and_what_they_are_worth() -> None:
    seen = RunState().replay(finished(full_run()))
    found = {f.topic: f for f in findings(seen)}
    assert set(found) == {"data", "padding", "experts", "scaler"}
    wait = 0.3 * 30 / sum(0.5 + 0.1 + 10 * x * 1e-3 for x in (50, 100, 200) * 10)
    assert f"{wait * 100:.0f}% of step time waits for data" == found["data"].evidence
    assert "padding fills 50% of the slots" in found["padding"].evidence
    # mean 1166.7 slots: half of them save 0.583 s of 1.267, of the 72% of step time that is computing
    mean = sum((500, 1000, 2000)) / 3
    first_left_out = (mean * 30 - 1000) / 29
    saved = first_left_out / 2 * 1e-3 / (0.1 + first_left_out * 1e-3)
    computing = (0.1 + mean * 1e-3) / (0.6 + mean * 1e-3)
    assert f"saves up to {saved * computing * 100:.0f}%" in str(found["padding"].worth)
    assert "expert 2 takes 70% of tokens (even: 25%)" in found["experts"].evidence
    assert "1 experts got no token" in found["experts"].evidence
    assert "1 of 30 steps" in found["scaler"].evidence


@pytest.mark.parametrize(
    "odd",
    [
        {"fixed_s": 0.0, "per_slot_s": 0.0},
        {"fixed_s": -1.0},
        {"exponent": 1e9},
        {"exponent": 0.0},
        {"per_slot_s": 1e300},
    ],
)
def test_a_fit_that_cannot_be_does_no_harm(odd: dict[str, float]) -> None:
    fit = {"exponent": 1.5, "fixed_s": 0.1, "per_slot_s": 1e-3, **odd}
    items = [*full_run(), r.Fit(t_s=1.0, identifiable=True, **fit)]
    assert "padding" in {f.topic for f in findings(RunState().replay(items))}
    for form in FORMATS:
        shown(items, form)


def stories() -> dict[str, list[r.Record]]:
    return {
        "full": finished(full_run()),
        "header only": [header()],
        "no finished step": [header(), r.Logs(step=0, t_s=1.0, values={}), end(2.0, "failed", reason="boom")],
        "one step": [header(devices=(CPU,)), *steps(1)],
        "dense": [header(model={"name": "llama", "kind": "llama"}), *steps(5)],
        "nan": [header(), *steps(5), r.Logs(step=5, t_s=5, values={"loss": None}, nonfinite=("loss",))],
        "uncounted": [header(), *[step(i, i, micro=(micro(None, None, None),)) for i in range(1, 6)]],
        "zero": [header(), *[step(i, 0.0, 0.0, phases_s={}) for i in range(1, 6)]],
        "huge": [header(), *[step(i, 1e308, 1e308) for i in range(1, 6)]],
        "many experts": [
            header(),
            *steps(3),
            r.Experts(step=1, t_s=1, mode="train", layers=("a", "b"), counts=((5,) * 64, (0,) * 64), tokens=(160, 0)),
        ],
        "evaluated only": [header(train={"max_steps": 9}), r.Span(kind="evaluation", t_s=0, wall_s=2, step=0)],
    }


@pytest.mark.parametrize("name", stories())
@pytest.mark.parametrize("form", FORMATS)
def test_every_run_has_a_report(name: str, form: str) -> None:
    text = shown(stories()[name], form)
    assert text
    if form == "json":
        json.loads(text, parse_constant=pytest.fail)
    lines = summary_lines(RunState().replay(stories()[name]), "run.jsonl")
    assert len(lines) <= 12
    assert lines[-1].endswith("project run.jsonl")
    assert all("\n" not in x for x in lines)


def test_json_holds_everything() -> None:
    data = json.loads(shown(finished(full_run()), "json"))
    assert data["status"] == {"kind": "completed", "text": "completed"}
    assert data["totals"]["queries"] == 300
    assert data["padding_share"] == 0.5
    assert data["experts"][0]["max_over_mean"] == 2.8
    assert data["experts"][0]["dead"] == [3]
    assert {f["topic"] for f in data["findings"]} >= {"data", "padding"}
    assert data["header"]["model"]["name"] == "mixtral"
    assert data["fit"]["identifiable"] is True
    assert json.loads(shown(stories()["header only"], "json"))["rates"]["queries_per_s"] is None


def test_nan_is_told() -> None:
    text = shown(stories()["nan"])
    assert "loss: NaN or infinite" in text
    assert "lower the learning rate" in text


def test_dense_models_have_no_expert_table() -> None:
    assert "Tokens per expert" not in shown(stories()["dense"])
    assert "Tokens per expert" in shown(finished(full_run()))


HOSTILE = "x\x1b[2J\x1b]0;own\x07\x9b31m\n# head\r\n| a | <b>`*_[l](u) \u202e" + "long" * 2000


def hostile_run() -> list[r.Record]:
    h = HOSTILE
    return [
        header(
            run_id=h,
            model={"name": h, "kind": h},
            train={"method": h, "epochs": 1.0},
            dataset={"queries": 9, "query_unit": h},
            devices=(r.Device(kind="cpu", name=h),),
        ),
        *steps(3, phases_s={h: 0.6, "data_wait": 0.4}, before_s={h: 0.1}, memory=r.Memory(rss_bytes=1)),
        r.Span(kind=h, t_s=1.0, wall_s=1.0, step=1),
        r.Logs(step=1, t_s=1.0, values={h: None, "loss": None}, nonfinite=(h, "loss"), texts={h: h}),
        r.Experts(step=1, t_s=1, mode="train", layers=(h,), counts=((1, 9, 0),), tokens=(5,), method=h),
        r.Gpu(t_s=1.0, samples=(r.GpuSample(uuid=h),)),
        r.Notice(t_s=1.0, collector=h, text=h),
        r.Fit(t_s=1.0, identifiable=False, reason=h),
        r.Projection(
            t_s=1.0,
            job=h,
            rows=(
                r.ProjectionRow(gpu=h, here=True, basis=h, price_source=h, unknown={h: h, "usd": h}),
                r.ProjectionRow(gpu=h, hours=(1.0, 1.0, 1.0), usd=(1.0, 1.0, 1.0), usd_per_hour=1.0),
            ),
        ),
    ]


def assert_tame(text: str) -> None:
    wild = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c in "\u202e\u2028"]
    assert not wild, wild[:5]


@pytest.mark.parametrize("form", FORMATS)
def test_hostile_text_is_tamed(form: str) -> None:
    text = shown([*hostile_run(), end(3.0, "failed", reason=HOSTILE)], form, Status("failed", f"failed: {HOSTILE}"))
    assert_tame(text)
    if form == "json":
        assert json.loads(text)["header"]["run_id"] == HOSTILE
        return
    assert "[2J" not in text
    assert max(len(x) for x in text.splitlines()) < 1500
    for raw in text.splitlines():
        assert not raw.startswith("# head")
    if form == "markdown":
        for block in text.split("\n\n"):
            if block.startswith("| "):
                bars = {x.replace("\\\\", "").replace("\\|", "").count("|") for x in block.splitlines()}
                assert len(bars) == 1, block
        assert "<b>" not in text.replace("\\<b\\>", "")
        assert "[l](" not in text.replace("\\[l\\](", "")


def test_a_hostile_summary_and_projection_are_tamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = summary_lines(RunState().replay(hostile_run()), "a\x1b[31mb")
    for text in lines:
        assert_tame(text)
        assert "\n" not in text
    path = log(tmp_path / "run.jsonl", [*hostile_run(), end(3.0, "failed", reason=HOSTILE)])
    for extra in ([], ["--json"], ["--verbose"]):
        assert cli.main(["project", str(path), *extra]) == 0
        assert_tame(capsys.readouterr().out)


def test_layout() -> None:
    table = [("a", "n"), ("xx", "5"), ("y", "10")]
    assert columns(table) == ["a    n", "xx   5", "y   10"]
    assert columns([("head",)]) == []
    assert pipes([("a|b", "c"), ("1", "2")]) == "| a\\|b | c |\n| --- | --- |\n| 1 | 2 |"
    assert escape("\\|") == "\\\\\\|"


def test_a_narrow_terminal_breaks_tables_between_columns_and_lines_between_words() -> None:
    table = (("GPU", "hours", "words"), ("A40", "10.5", "one two"), ("2x A40", "9", "three"))
    section = Section("a section", ("a line of some words, for itself",), table, ("12345 789",))
    assert to_text("a title of some words", [section], 20).split("\n") == [
        "a title of some",
        "  words",
        "",
        "a section",
        "  a line of some",
        "    words, for",
        "    itself",
        "  GPU     hours",
        "  A40      10.5",
        "  2x A40      9",
        "",
        "  GPU     words",
        "  A40     one two",
        "  2x A40  three",
        "  12345 789",
    ]
    # 2 to the left, 6 + 2 + 5 + 2 + 7
    wide, narrow = (to_text("t", [section], width) for width in (24, 23))
    assert "  2x A40      9  three\n" in wide
    assert "  2x A40      9\n" in narrow
    assert "  a line of some words, for itself\n" in to_text("t", [section])


def test_a_closed_output_is_no_traceback(folder: Path) -> None:
    run = folder / "ft_insight_runs" / "good" / "run.jsonl"
    shell = f"exec {sys.executable} -m ft_insight.cli report {run} >&-"
    done = subprocess.run(["sh", "-c", shell], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# the commands


def command(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    clean_env = {k: v for k, v in os.environ.items() if k != "FT_INSIGHT_LOG"}
    return subprocess.run(
        [sys.executable, "-m", "ft_insight.cli", *words],
        cwd=cwd,
        env={**clean_env, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    good = log(base / "ft_insight_runs" / "good" / "run.jsonl", finished(full_run()))
    old = log(base / "ft_insight_runs" / "older" / "run.jsonl", [header(run_id="older"), *steps(5)])
    os.utime(old, (time.time() - 1000,) * 2)
    log(base / "elsewhere" / "good.jsonl", finished(full_run()))
    log(base / "bad" / "empty.jsonl", [])
    log(base / "bad2" / "header.jsonl", [header()])
    log(base / "bad" / "notes.jsonl", [b'{"text": "hello"}\n'])
    log(base / "bad" / "binary.jsonl", [bytes(range(256)) * 40])
    (base / "nothing").mkdir()
    assert good.exists()
    return base


BAD: list[tuple[list[str], str]] = [
    (["project", "--gpu", "h10"], "H100"),
    (["project", "--gpu", "a100", "rtx 5099"], "did you mean RTX 5090"),
    (["project", "--gpu", "h100", "--price", "-1"], "--price must be 0 or more and at most 1e+15, not -1"),
    (["project", "--price", "1e300"], "--price must be 0 or more and at most 1e+15, not 1e+300"),
    (["project", "--json", "--markdown"], "not allowed with"),
    (["sweep"], "required: SCRIPT.py; see"),
    (["project", "--price", "nan"], "--price must be"),
    (["project", "--price", "inf"], "--price must be"),
    (["project", "--price", "2", "--gpu", "h100", "a100"], "--price needs exactly one --gpu"),
    (["project", "--price", "2", "--gpu", "all"], "--price needs exactly one --gpu"),
    (["project", "--queries", "0"], "--queries must be above 0"),
    (["project", "--queries", "-3"], "--queries must be above 0"),
    (["project", "--queries", "1" + "0" * 400], "--queries must be above 0"),
    (["project", "--queries", "many"], "invalid int value"),
    (["project", "--epochs", "inf"], "--epochs must be above 0"),
    (["project", "--epochs", "nan"], "--epochs must be above 0"),
    (["project", "--seq-len", "0"], "--seq-len must be above 0"),
    (["project", "missing.jsonl"], "missing.jsonl does not exist"),
    (["project", "bad/empty.jsonl"], "holds no record yet"),
    (["project", "bad2/header.jsonl"], "no finished step"),
    (["project", "bad/notes.jsonl"], "not an ft-insight run log"),
    (["project", "bad/binary.jsonl"], "not an ft-insight run log"),
    (["project", "nothing"], "no run log in nothing"),
    (["report", "missing.jsonl"], "missing.jsonl does not exist"),
    (["report", "bad/empty.jsonl"], "holds no record yet"),
    (["report", "bad/notes.jsonl"], "not an ft-insight run log"),
    (["report", "bad"], "no run log in bad"),
    (["report", "x" * 5000], "name too long"),
    (["report", "--format", "pdf"], "invalid choice"),
    (["report", "evil\x1b[31m\nname"], "evil name does not exist"),
    (["watch"], "watch needs a terminal"),
    ([], "required"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else "")
def test_what_a_user_gets_wrong_is_one_line(
    folder: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FT_INSIGHT_LOG", raising=False)
    try:
        code: Any = cli.main(words)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert told.lower() in err.lower()
    assert_tame(err)


@pytest.mark.parametrize("number", [0, 2, 9])
def test_the_same_in_a_process_of_its_own(folder: Path, number: int) -> None:
    words, told = BAD[number]
    done = command(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_project_finds_the_newest_run(folder: Path) -> None:
    done = command("project", "--gpu", "h100", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("run-1 · mixtral")
    assert "H100-80GB-SXM" in done.stdout
    assert "A40 (here)" in done.stdout
    assert "L40S" not in done.stdout


def test_project_by_every_way_of_naming_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FT_INSIGHT_LOG", raising=False)
    texts = []
    for words in (
        ["elsewhere/good.jsonl", "--gpu", "h100", "--json"],
        ["--gpu", "h100", "elsewhere/good.jsonl", "--json"],
        ["elsewhere", "--gpu", "h100", "--json"],
    ):
        assert cli.main(["project", *words]) == 0
        texts.append(json.loads(capsys.readouterr().out, parse_constant=pytest.fail))
    assert {t.pop("run") for t in texts} == {"elsewhere/good.jsonl"}
    assert texts[0] == texts[1] == texts[2]
    monkeypatch.setenv("FT_INSIGHT_LOG", "ft_insight_runs/older")
    assert cli.main(["report", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["header"]["run_id"] == "older"


def test_project_answers_the_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "elsewhere" / "good.jsonl")
    question = ["--queries", "15000", "--epochs", "10", "--price", "0.79", "--gpu", "a40", "--json"]
    assert cli.main(["project", path, *question]) == 0
    (here,) = json.loads(capsys.readouterr().out)["projection"]["rows"]
    seen, _ = read_run(Path(path))
    assert seen.rates.queries_per_s is not None
    assert here["hours"][0] == pytest.approx(150_000 / seen.rates.queries_per_s / 3600)
    assert here["usd"][0] == pytest.approx(here["hours"][0] * 0.79)
    assert here["price_source"] == "as given"


def test_a_report_of_a_header_alone_is_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder / "bad2" / "header.jsonl")]) == 0
    assert "0 steps" in capsys.readouterr().out


_LOADED = """
import sys
sys.argv[1:] = {words!r}
try:
    {what}
except SystemExit:
    pass
heavy = {{"torch", "transformers", "textual", "trl", "scipy", "pynvml", "matplotlib", "pandas"}}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("import ft_insight; ft_insight.RunView; ft_insight.SCHEMA", []),
        ("import ft_insight.cli; ft_insight.cli.main()", ["--help"]),
        ("import ft_insight.cli; ft_insight.cli.main()", ["project", "--gpu", "h100"]),
        ("import ft_insight.cli; ft_insight.cli.main()", ["report"]),
    ],
)
def test_nothing_heavy_is_loaded(folder: Path, what: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED.format(what=what, words=words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert len(done.stdout.splitlines()) == 1 or words


@pytest.mark.parametrize("reader", ["true", "head -c 1"])
def test_a_reader_that_leaves_is_no_error(folder: Path, reader: str) -> None:
    line = f"{sys.executable} -m ft_insight.cli report --format json | {reader}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_a_terminal_without_utf_8(folder: Path) -> None:
    done = command("report", cwd=folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "run-1 ? mixtral" in done.stdout
