"""Nsight Compute's CSV exports, in the shapes that its versions write them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from makers import end, header, steps

from ft_insight import records as r
from ft_insight.cli import main
from ft_insight.ncu import NcuError, attach, read_ncu
from ft_insight.reader import read_run

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(T1::Params)"
FILL = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(int, T2, T3)"
FILL_IN_TRACE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >"
    "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
)

FORWARD = {"pass_name": "forward"}

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"'
)


def details_row(number: int, name: str, grid: str, section: str, metric: str, unit: str, value: str) -> str:
    start = f'"{number}","41","python3","node1","{name}","1","7","(128, 1, 1)","{grid}","0","8.0"'
    return f'{start},"{section}","{metric}","{unit}","{value}","","",""'


def launch(number: int, name: str, grid: str, sm: str, memory: str, dram: str, duration: str) -> list[str]:
    sol, load = "GPU Speed Of Light Throughput", "Memory Workload Analysis"
    return [
        details_row(number, name, grid, sol, "DRAM Frequency", "Ghz", "1.51"),
        details_row(number, name, grid, load, "Memory Throughput", "Gbyte/second", "1,204.55"),
        details_row(number, name, grid, sol, "Memory Throughput", "%", memory),
        details_row(number, name, grid, sol, "DRAM Throughput", "%", dram),
        details_row(number, name, grid, sol, "Duration", "us", duration),
        details_row(number, name, grid, sol, "Compute (SM) Throughput", "%", sm),
        f'"{number}","41","python3","node1","{name}","1","7","(128, 1, 1)","{grid}","0","8.0","{sol}","","","",'
        '"SOLBottleneck","OPT","This kernel, ""as it is"", exhibits low compute throughput."',
    ]


def details() -> str:
    noise = [
        "==PROF== Connected to process 41 (/usr/bin/python3)",
        '==PROF== Profiling "Kernel2" - 0: 0%....50%....100% - 9 passes',
        "{'loss': 1.2, 'epoch': 0.1}",
        "==PROF== Disconnected from process 41",
    ]
    rows = [
        *launch(0, GEMM, "(64, 8, 1)", "80.00", "40.00", "20.00", "1,000.00"),
        *launch(1, GEMM, "(16, 8, 1)", "60.00", "50.00", "30.00", "500.00"),
        *launch(2, FILL, "(1024, 1, 1)", "10.50", "90.25", "88.00", "12.50"),
    ]
    return "\n".join([*noise, HEAD, *rows, "==PROF== Report: out.ncu-rep"]) + "\n"


RAW = (
    "==PROF== Connected to process 41 (/usr/bin/python3)\n"
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__compute_memory_throughput.avg.pct_of_peak_sust'
    'ained_elapsed","gpu__time_duration.sum","launch__registers_per_thread","sm__throughput.avg.pct_of_peak_sustain'
    'ed_elapsed"\n'
    '"","","","","","","","","","","","%","%","ns","register/thread","%"\n'
    f'"0","41","python3","node1","{GEMM}","1","7","(128, 1, 1)","(64, 8, 1)","0","8.0","20.00","40.00",'
    '"1,000,000","168","80.00"\n'
    f'"1","41","python3","node1","{GEMM}","1","7","(128, 1, 1)","(16, 8, 1)","0","8.0","30.00","50.00",'
    '"500,000","168","60.00"\n'
    f'"2","41","python3","node1","{FILL}","1","7","(512, 1, 1)","(1024, 1, 1)","0","8.0","88.00","90.25","12,500","16",'
    '"10.50"\n'
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [details(), RAW, "\ufeff" + details(), RAW.replace("\n", "\r\n")])
def test_both_pages_say_the_same(tmp_path: Path, text: str) -> None:
    first, second, third = read_ncu(write(tmp_path / "report.csv", text))
    assert (first.name, first.grid, first.seconds) == (GEMM, "64x8x1", pytest.approx(1e-3))
    assert (first.sm_percent, first.memory_percent, first.dram_percent) == (80, 40, 20)
    assert (second.grid, second.sm_percent, second.seconds) == ("16x8x1", 60, pytest.approx(5e-4))
    assert (third.name, third.memory_percent, third.seconds) == (FILL, 90.25, pytest.approx(12.5e-6))


def test_older_names_of_metrics(tmp_path: Path) -> None:
    old = details().replace("Compute (SM) Throughput", "SOL SM").replace('"Memory Throughput","%"', '"SOL Memory","%"')
    old = old.replace('"Duration","us"', '"Duration","usecond"')
    assert [(k.sm_percent, k.memory_percent) for k in read_ncu(write(tmp_path / "a.csv", old))] == [
        (80, 40),
        (60, 50),
        (10.5, 90.25),
    ]


def test_summary_that_ncu_has_averaged(tmp_path: Path) -> None:
    text = (
        '"Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
        '"CC","Invocations","Section Name","Metric Name","Metric Unit","Minimum","Maximum","Average"\n'
        f'"41","python3","n","{GEMM}","1","7","(128, 1, 1)","(64, 8, 1)","0","8.0","3","S","Compute (SM) Throughput",'
        '"%","70","90","80.5"\n'
    )
    (kernel,) = read_ncu(write(tmp_path / "a.csv", text))
    assert (kernel.sm_percent, kernel.memory_percent, kernel.seconds) == (80.5, None, None)


def test_figures_that_were_not_measured_are_unmeasured(tmp_path: Path) -> None:
    text = details().replace('"80.00"', '"n/a"').replace('"40.00"', '"nan"').replace('"20.00"', '""')
    first = read_ncu(write(tmp_path / "a.csv", text))[0]
    assert (first.sm_percent, first.memory_percent, first.dram_percent) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no CSV export of Nsight Compute"),
        ("step,loss\n1,2\n", "no CSV export of Nsight Compute"),
        ("\x00\x01PK\x03", "no CSV export of Nsight Compute"),
        (HEAD + "\n", "no SM or memory throughput"),
        (
            HEAD + "\n" + details_row(0, "k", "(1, 1, 1)", "S", "Registers Per Thread", "", "16") + "\n",
            "no SM or memory",
        ),
        (RAW.splitlines()[1] + "\n", "no SM or memory throughput"),
        # fields over csv's limit, and rows that end before the kernel's name
        ("x" * 200_000 + "\n", "no CSV export of Nsight Compute"),
        ('"ID","Metric Name","Kernel Name"\n"' + "x" * 200_000 + '"\n', "field larger than"),
        ('"ID","Metric Name","Metric Value","Kernel Name"\n"0","SM [%]","33"\n', "no SM or memory throughput"),
        ('"ID","sm__throughput.avg.pct_of_peak_sustained_elapsed","Kernel Name"\n"","%"\n', "no SM or memory"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(NcuError, match=reason) as caught:
        read_ncu(write(tmp_path / "a.csv", text))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NcuError, match="cannot read"):
        read_ncu(tmp_path / "none.csv")


def kernels() -> r.Kernels:
    def role(kind: str, name: str, seconds: float) -> r.KernelRole:
        return r.KernelRole(kind=kind, role=name, seconds=seconds, share=0.1, calls=1, **FORWARD)

    return r.Kernels(
        step=2,
        t_s=1.0,
        clock="cuda",
        window_s=1.0,
        busy_s=0.5,
        roles=(role("experts", "matmul_w1_w3", 0.3), role("experts", "matmul_w2", 0.1), role("experts", "gather", 0.2)),
        names=(
            r.KernelName(GEMM, "experts", "matmul_w1_w3", "forward", 0.2, 1, "64x8x1"),
            r.KernelName(GEMM, "experts", "matmul_w1_w3", "forward", 0.1, 1, "16x8x1"),
            r.KernelName(GEMM, "experts", "matmul_w2", "forward", 0.1, 1, "16x8x1"),
            r.KernelName(FILL_IN_TRACE, "experts", "gather", "forward", 0.05, 4, "9x1x1"),
        ),
    )


@pytest.mark.parametrize("text", [details(), RAW])
def test_roles_get_the_time_weighted_mean(tmp_path: Path, text: str) -> None:
    filled = attach(kernels(), read_ncu(write(tmp_path / "a.csv", text)))
    up, down, gather = filled.roles
    assert up.sm_percent == pytest.approx((0.2 * 80 + 0.1 * 60) / 0.3, abs=1e-3)
    assert up.memory_percent == pytest.approx((0.2 * 40 + 0.1 * 50) / 0.3, abs=1e-3)
    assert up.dram_percent == pytest.approx((0.2 * 20 + 0.1 * 30) / 0.3, abs=1e-3)
    assert up.ncu_coverage == 1
    # the same kernel, told apart by the size of its launch
    assert (down.sm_percent, down.memory_percent) == (60, 50)
    # written differently by both tools, and of a size that was not profiled
    assert (gather.sm_percent, gather.ncu_coverage) == (10.5, 0.25)
    assert kernels().roles[0].sm_percent is None


def test_a_launch_of_unknown_size_gets_the_kernels_mean(tmp_path: Path) -> None:
    names = (r.KernelName(GEMM, "experts", "matmul_w2", "forward", 0.1, 1, "1x1x1"),)
    filled = attach(msgspec.structs.replace(kernels(), names=names), read_ncu(write(tmp_path / "a.csv", details())))
    assert filled.roles[1].sm_percent == pytest.approx((1000 * 80 + 500 * 60) / 1500, abs=1e-3)
    assert filled.roles[0].sm_percent is None


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    report = read_ncu(write(tmp_path / "a.csv", details().replace("Kernel2", "Unknown").replace("vectorized", "v")))
    with pytest.raises(NcuError, match="no kernel of this report is in the log"):
        attach(kernels(), report)


def test_record_survives_the_log() -> None:
    text = msgspec.json.encode(kernels())
    assert msgspec.json.decode(text, type=r.Record) == kernels()


def finished_log(path: Path, *records: r.Base, over: bool = True) -> Path:
    lines = [header(), *steps(2), *records, *([end(2.0)] if over else [])]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_a_finished_run_gets_the_figures_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = finished_log(tmp_path / "run.jsonl", kernels())
    before = log.read_bytes()
    csv = write(tmp_path / "report.csv", details())
    assert main(["import-ncu", str(csv), str(log)]) == 0
    assert "SM and memory use of" in capsys.readouterr().out
    assert log.read_bytes().startswith(before)
    view, _ = read_run(log)
    assert view.kernels == attach(kernels(), read_ncu(csv))
    assert main(["report", str(log)]) == 0
    assert "SM (ncu)" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["no kernels", "still written", "no report"])
def test_bad_imports_are_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [] if case == "no kernels" else [kernels()]
    log = finished_log(tmp_path / "run.jsonl", *records, over=case != "still written")
    csv = tmp_path / "report.csv"
    if case != "no report":
        write(csv, details())
    assert main(["import-ncu", str(csv), str(log)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ft-insight: ")
    assert said.count("\n") == 1
