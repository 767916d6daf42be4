"""A micro-batch by what limits it, on the card it was measured on and on another, against arithmetic done by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import A40, CPU, GIB, header, step, view

from ft_insight import records as r
from ft_insight.catalog import find_gpu, load_gpus
from ft_insight.estimate import Ask, measure, project
from ft_insight.estimate.buckets import FP32, HALF, Buckets, KernelShares, kernel_shares, memory_share_of, split
from ft_insight.estimate.probe import rescaled
from ft_insight.estimate.transfer import TransferError, refusal
from ft_insight.estimate.work import Work, header_work, work_of
from ft_insight.estimate.workload import workload_of
from ft_insight.layer_times import LayerTime
from ft_insight.run_view import RunView
from ft_insight.validate.checked import Checked
from ft_insight.validate.pairs import check

TABLE = Path(__file__).resolve().parents[2].parent / "shared" / "field" / "validation.csv"
A40_GPU, H100, A100 = find_gpu("a40"), find_gpu("h100"), find_gpu("a100")
MIXTRAL: dict[str, Any] = {"parameters": 46.7e9, "active": 12.9e9, "method": "qlora", "recomputed": True, "experts": 8}


# the work


def test_the_work_of_a_mixture_by_hand() -> None:
    work = work_of(**MIXTRAL, slots=1000, layers=32, trainable=2e8)
    assert work.flops == 6 * 12.9e9 * 1000  # 2 forward, 2 recomputed, 2 backward
    assert work.dequantised_bytes == 2.5 * 46.7e9 * 3
    assert work.weight_bytes == 2 * 46.7e9 * 3
    assert work.optimizer_bytes == 16 * 2e8
    assert work.launch_s == pytest.approx(0.0047 * 32 * 6)
    full = work_of(parameters=1e9, slots=10)
    assert (full.flops, full.dequantised_bytes, full.optimizer_bytes) == (6e10, 0, 16e9)
    assert work_of(parameters=1e9).flops is None


def test_dequantisation_is_traced_as_the_paper_measured_it() -> None:
    # 358.6 us for each of three matrices of 8 experts in 32 layers, in three passes
    measured = 358.6e-6 * 3 * 8 * 32 * 3
    traced = split(10.0, work_of(**MIXTRAL, slots=100, layers=32), A40_GPU, fixed_s=9.0)
    reading = 2 * 46.7e9 * 3 / (696e9 * 0.8) - traced.matmul_s
    assert traced.dequantise_s - reading == pytest.approx(measured, rel=0.05)


def test_the_work_of_a_header() -> None:
    said = {"parameters": 47_000, "active_parameters": 13_000, "expert_parameters": 45_000, "experts": 8}
    seen = header(model={**said, "experts_per_token": 2, "layers": 2}, train={"method": "full"})
    work = header_work(seen, 10.0)
    assert work is not None
    assert work.flops == 6 * 13_000 * 10
    dense = header_work(seen, 10.0, density=1.0)
    assert dense is not None
    assert dense.flops == 6 * (13_000 + 0.75 * 45_000) * 10
    assert header_work(header(model={"parameters": None}), 10.0) is None


# the split


def test_a_split_by_hand() -> None:
    work = Work(1.2e12, 0.0, 0.0, 0.0, 0.4)
    found = split(1.0, work, A40_GPU)
    # 1.2 TFLOP at 0.8 x 149.7 TFLOPS are 10.02 ms; launches take 0.4 s; what is left is memory's
    assert found.host_s == 0.4
    assert found.matmul_s == pytest.approx(1.2 / 119.76)
    assert found.memory_s == pytest.approx(0.6 - 1.2 / 119.76)
    assert found.basis == "total"
    there = found.on(A40_GPU, H100)
    assert there.host_s == 0.4
    assert there.matmul_s == pytest.approx(1.2 / 794.5)
    assert there.memory_s == pytest.approx((0.6 - 1.2 / 119.76) * 696 / 3350)
    assert there.total_s == pytest.approx(there.host_s + there.matmul_s + there.memory_s)
    assert there.bound_by() == "host"


def test_what_a_fit_says_is_fixed_is_the_host_s_unless_the_device_explains_it() -> None:
    work = Work(1.2e12, 0.0, 696e9 * 0.59, 0.0, None)  # a second of dequantisation on an A40
    found = split(5.0, work, A40_GPU, fixed_s=3.0)
    assert (found.host_s, found.dequantise_s) == (pytest.approx(2.0), pytest.approx(1.0))
    assert found.matmul_s + found.memory_s == pytest.approx(4.0)  # 3, 4, 5: fixed and per-slot time overlap
    assert found.total_s == pytest.approx(5.0)
    there = found.on(A40_GPU, H100)
    slots = 1.2 / 794.5 + (4 - 1.2 / 119.76) * 696 / 3350
    assert there.total_s == pytest.approx(math.hypot(2 + 696 / 3350, slots))
    # no model's size makes the host's part vanish
    greedy = split(5.0, msgspec.structs.replace(work, dequantised_bytes=1e15), A40_GPU, fixed_s=3.0)
    assert greedy.host_s == pytest.approx(0.3)


def test_layers_that_hold_no_large_product_bound_the_products() -> None:
    layers = (LayerTime(0, "attention", 1.0, 0.0, 2.0), LayerTime(0, "input_norm", 0.5, 0.0, 0.5))
    assert memory_share_of(layers) == 0.25
    assert memory_share_of(()) is None
    found = split(1.0, Work(1e18, 0.0, 0.0, 0.0, None), A40_GPU, memory_share=0.25)
    assert (found.matmul_s, found.memory_s, found.basis) == (0.75, 0.25, "layers")


def role(name: str, seconds: float, when: str = "forward", **said: Any) -> r.KernelRole:
    return r.KernelRole(kind="experts", role=name, pass_name=when, seconds=seconds, share=0.1, calls=1, **said)


def kernels(*roles: r.KernelRole, **said: Any) -> r.Kernels:
    return r.Kernels(
        **{"step": 3, "t_s": 1.0, "clock": "cuda", "window_s": 10.0, "busy_s": 8.0, "roles": roles, **said}
    )


def test_kernels_say_what_limits_them() -> None:
    seen = kernels(
        role("matmul_w1_w3", 3.0, flops=1e15, bytes=1e9),  # 8.4 s of products against 1.4 ms of bytes
        role("matmul_router", 1.0, flops=1e9, bytes=1e11),  # the other way round
        role("dequantise", 2.0, flops=1e15),
        role("norm", 2.0),
        role("optimizer", 50.0, "optimizer"),
    )
    assert kernel_shares(seen, A40_GPU) == KernelShares(3 / 8, 2 / 8, 0.8, HALF)
    found = split(1.0, Work(None, 0.0, 0.0, 0.0, None), A40_GPU, seen=kernel_shares(seen, A40_GPU))
    parts = (found.host_s, found.matmul_s, found.dequantise_s, found.memory_s)
    assert parts == pytest.approx((0.2, 0.3, 0.2, 0.3))
    assert found.basis == "kernels"
    assert found.work_known
    assert kernel_shares(None, A40_GPU) is None
    assert kernel_shares(kernels(clock="host"), A40_GPU) is None
    assert kernel_shares(kernels(), A40_GPU) is None


def test_kernels_without_tensor_cores_are_fp32() -> None:
    def named(name: str) -> KernelShares | None:
        names = (r.KernelName(name, "mlp", "matmul", "forward", 1.0, 1),)
        return kernel_shares(kernels(role("matmul", 1.0, flops=1e15), names=names), A40_GPU)

    forms = [named(n) for n in ("ampere_sgemm_128x64_tn", "cutlass_simt_sgemm", "ampere_bf16_s16816gemm", "tf32_sgemm")]
    assert [f.number_format if f else None for f in forms] == [FP32, FP32, HALF, HALF]


def test_quantised_products_in_fp32_give_themselves_away() -> None:
    # published: Llama-3.1 8B, 2 x 8192 slots on an A100, LoRA in 11.5 s, QLoRA in 57.6 s
    size: dict[str, Any] = {"parameters": 8.03e9, "recomputed": True, "slots": 16_384, "layers": 32}
    assert split(57.6, work_of(**size, method="qlora"), A100).number_format == FP32
    assert split(11.5, work_of(**size, method="lora"), A100).number_format == HALF
    assert split(57.6, work_of(**size, method="lora"), A100).number_format == HALF
    # published: Llama-2 7B by LitGPT in bf16, a row of some 130 tokens on an A100: launches and unpacking explain it
    few = work_of(parameters=7e9, slots=130, layers=32, method="qlora")
    assert split(0.2208, few, find_gpu("a100-40")).number_format == HALF


positive = st.floats(1e-6, 1e6)
GPUS = [gpu for gpu in load_gpus() if gpu.vendor == "NVIDIA"]


@given(
    total=positive,
    fixed=st.none() | st.floats(0, 2e6),
    flops=st.none() | st.floats(0, 1e20),
    moved=st.floats(0, 1e15),
    launch=st.none() | st.floats(0, 1e3),
    quantised=st.booleans(),
    gpus=st.tuples(st.sampled_from(GPUS), st.sampled_from(GPUS)),
)
def test_a_split_adds_up_and_moves_within_the_ratios(
    total: float, fixed: Any, flops: Any, moved: float, launch: Any, quantised: bool, gpus: Any
) -> None:
    source, target = gpus
    found = split(total, Work(flops, moved, moved, moved, launch, quantised), source, fixed_s=fixed)
    parts = (found.host_s, found.dequantise_s, found.matmul_s, found.memory_s)
    assert min(parts) >= 0
    assert found.total_s == pytest.approx(total, rel=1e-6)
    assert found.on(source, source).total_s == pytest.approx(total, rel=1e-6)
    assert found.on(source, target).host_s == found.host_s
    compute = source.sustained_tflops / target.sustained_tflops
    plain = source.sustained_fp32_tflops / target.sustained_fp32_tflops
    memory = source.bandwidth_gbs / target.bandwidth_gbs
    ratio = found.on(source, target).total_s / total
    low, high = (pick(1.0, memory, plain if found.number_format == FP32 else compute) for pick in (min, max))
    assert low * (1 - 1e-6) <= ratio <= high * (1 + 1e-6)
    assert 0 < found.spread < 0.5


def test_intervals_are_wider_where_less_is_known() -> None:
    def wide(basis: str, **more: Any) -> float:
        return Buckets(1.0, 0.0, 1.0, 1.0, 1.0, basis, **more).spread

    assert wide("fit") == wide("kernels") < wide("layers") == wide("total") < wide("total", work_known=False)
    # a host that is another machine's is the least certain
    assert Buckets(1.0, 0.0, 0.0, 0.0, 1.0, "fit").spread == pytest.approx(0.36)
    assert Buckets(0.0, 0.0, 1.0, 0.0, 1.0, "fit").spread == pytest.approx(0.15)


# what does not carry over


@pytest.mark.parametrize(
    ("target", "precision", "why"),
    [
        ("h100", "bf16", None),
        ("mi300x", "bf16", "do not carry over to AMD"),
        ("h100", "bf16 fp8", "fp8 or fp4"),
        ("h100", "torch.float8_e4m3fn", "fp8 or fp4"),
        ("h100", "bf16 nvfp4", "fp8 or fp4"),
        ("h100", "nf4 bf16", None),
        ("t4", "bf16", "the T4 only emulates"),
        ("t4", "fp16", None),
        ("a40", "fp8", None),  # the card that it was measured on
    ],
)
def test_what_is_refused_names_the_way_out(target: str, precision: str, why: str | None) -> None:
    found = refusal(A40_GPU, find_gpu(target), precision)
    if why is None:
        assert found is None
    else:
        assert isinstance(found, TransferError)
        assert why in found.reason
        assert "--probe" in found.reason


# probes


def measured_run(
    device: r.Device, h: float, c: float, sizes: tuple[int, ...], rest_s: float = 0.05, **said: Any
) -> RunView:
    items, t_s = [], 0.0
    for number in range(1, 31):
        slots = sizes[number % len(sizes)]
        seconds = h + c * slots
        one = r.MicroBatch(4, slots, slots, slots, seconds)
        memory = r.Memory(allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB) if device.kind == "cuda" else None
        items.append(step(number, t_s, seconds + rest_s, micro=(one,), memory=memory))
        t_s += seconds + rest_s
    data = {"queries": 1000, "length_values": (100, 400), "length_counts": (1, 1)}
    train = {"batch": 4, "epochs": 1.0, **said.pop("train", {})}
    return view([header(devices=(device,), dataset=data, train=train, **said), *items])


H100_DEVICE = r.Device(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=int(79.1 * GIB))


def test_a_probe_rescales_the_run() -> None:
    run = measure(measured_run(A40, 0.1, 1e-3, (400, 800, 1600)))
    probe = measure(measured_run(H100_DEVICE, 0.04, 4e-4, (400, 1600)))
    scale = rescaled(run, probe)
    assert not isinstance(scale, TransferError)
    assert scale.factor == pytest.approx(0.4, rel=1e-3)
    assert scale.spread == pytest.approx(0.05, abs=0.005)
    assert "H100" in scale.basis
    asked = Ask(workload_of(run.view), (H100, A100), probe=probe, batch=4)
    row = {x.gpu: x for x in project(run, asked).rows}
    # 4 queries in 0.4 of the run's micro-batch, and the probe's own rest of a step
    micro_s = 4 / (run.view.rates.queries_per_s or 0) - 0.05
    assert (row["H100-80GB-SXM"].queries_per_s or (0,))[0] == pytest.approx(4 / (0.4 * micro_s + 0.05), rel=2e-3)
    assert "probe of" in str(row["H100-80GB-SXM"].basis)
    assert "scaled from A40" in str(row["A100-80GB-SXM"].basis)


def test_a_probe_is_what_carries_over_where_rates_do_not() -> None:
    fp8 = {"train": {"precision": "fp8"}}
    run = measure(measured_run(A40, 0.1, 1e-3, (400, 800, 1600), **fp8))
    work = workload_of(run.view)
    refused = project(run, Ask(work, (H100,), batch=4)).rows[1]
    assert "fp8" in refused.unknown["queries_per_s"]
    probe = measure(measured_run(H100_DEVICE, 0.04, 4e-4, (400, 1600), **fp8))
    assert project(run, Ask(work, (H100,), batch=4, probe=probe)).rows[1].queries_per_s is not None


def test_a_probe_of_other_sizes_says_nothing_of_a_run_of_one() -> None:
    run = measure(measured_run(A40, 0.1, 1e-3, (800,)))
    alike = rescaled(run, measure(measured_run(H100_DEVICE, 0.0, 3e-4, (800, 790))))
    assert not isinstance(alike, TransferError)
    assert alike.factor == pytest.approx(800 * 3e-4 / 0.9, rel=0.02)
    other = rescaled(run, measure(measured_run(H100_DEVICE, 0.0, 3e-4, (400, 1600))))
    assert isinstance(other, TransferError)
    # a CPU's model of step time has another shape: only equal sizes count
    cpu = measure(measured_run(CPU, 1.0, 1e-2, (400, 800, 1600)))
    assert isinstance(rescaled(cpu, measure(measured_run(H100_DEVICE, 0.0, 3e-4, (600,)))), TransferError)


# published pairs


def row(gpu: str, seconds: float, **said: str) -> dict[str, str]:
    base = {
        "source": "s",
        "model": "Llama 3.1 8B",
        "params_b": "8.03",
        "method": "LoRA",
        "precision": "bf16",
        "grad_ckpt": "yes",
        "gpu": gpu,
        "n_gpus": "1",
        "batch_per_gpu": "2",
        "seq_len": "8192",
        "step_time_s": str(seconds),
        "sweep_id": "",
        "pair_id": "p",
        "notes": "",
    }
    return {**base, **said}


def test_a_pair_by_hand() -> None:
    checks, notes = check([row("A100-80GB", 11.5), row("H100-80GB", 6.4)])
    assert notes == []
    forth, back = checks
    host, products = 0.0047 * 32, 6 * 8.03e9 * 16_384 / 271.2e12
    expected = host + products * 271.2 / 794.5 + (11.5 - host - products) * 2039 / 3350
    assert (forth.measured, forth.unit, forth.method) == (6.4, "s", "cross-GPU")
    assert forth.predicted == pytest.approx(expected)
    assert forth.gpu == "H100-80GB-SXM"
    assert back.measured == 11.5
    assert forth.low is not None
    assert forth.high is not None
    assert forth.low < forth.predicted < forth.high


def test_a_sweep_tells_what_is_fixed() -> None:
    # a source whose time hardly grows with its batch is bound by its host, wherever it runs
    flat = {"seq_len": "64", "method": "LoRA", "grad_ckpt": "no"}
    sweep = [
        row("A100-80GB", 2.0 + 1e-3 * b, batch_per_gpu=str(b), sweep_id="w", pair_id="p" if b == 2 else "", **flat)
        for b in (1, 2, 4, 8)
    ]
    (forth, *_), _ = check([*sweep, row("H100-80GB", 1.0, **flat)])
    alone, _ = check([row("A100-80GB", 2.002, **flat), row("H100-80GB", 1.0, **flat)])
    assert forth.predicted == pytest.approx(2.0, rel=0.02)
    assert alone[0].predicted < 1.5
    assert "fit" in forth.label
    assert "total" in alone[0].label


def test_pairs_that_cannot_be_checked_are_counted() -> None:
    odd = [
        row("A100-80GB", 11.5),
        row("Abacus 3000", 1.0),
        row("MI300X", 5.0),
        row("H100-80GB", 6.4, n_gpus="8"),
        row("H100-80GB", 6.4, step_time_s=""),
        row("H100-80GB", 6.4, batch_per_gpu="4"),
    ]
    checks, notes = check(odd)
    assert checks == []
    assert sum(int(note.split()[0]) for note in notes) == 30
    text = "\n".join(notes)
    for why in ("unknown GPU", "AMD", "another number of GPUs", "no step time", "another batch or length"):
        assert why in text
    assert check([row("A100-80GB", 11.5, pair_id="")]) == ([], [])
    assert check([row("A100-80GB", 11.5)]) == ([], ["1 rows left out that are alone with their pair_id: p"])


def test_a_pair_without_method_or_size_is_left_out() -> None:
    for said in ({"method": ""}, {"params_b": ""}):
        checks, notes = check([row("A100-80GB", 11.5, **said), row("H100-80GB", 6.4, **said)])
        assert checks == []
        assert notes == ["2 pairs left out: the size of the model or the method is not stated"]


def test_a_limit_is_no_length() -> None:
    """Rows cut at 512 may all be of 20: their products are not those of 512."""

    def predicted(length: str) -> float:
        pair = [row("A100-80GB", 2.0, seq_len=length), row("H100-80GB", 1.0, seq_len=length)]
        return check(pair)[0][0].predicted

    assert predicted("<=512") == predicted("") == predicted("some words")
    assert predicted("512") != predicted("")
    assert predicted("<=768 (mean ~512)") == predicted("512(median)") == predicted("512")


def test_a_throughput_alone_is_a_time() -> None:
    """2 rows at 0.25 a second are 8 s; of 8 GPUs at 2 a second too."""
    plain = check([row("A100-80GB", 8.0), row("H100-80GB", 4.0)])[0]
    said = {"step_time_s": "", "unit": "samples/s"}
    one = check([row("A100-80GB", 0, throughput="0.25", **said), row("H100-80GB", 0, throughput="0.5", **said)])[0]
    assert [c.measured for c in one] == [4.0, 8.0]
    assert [c.predicted for c in one] == [c.predicted for c in plain]


@pytest.mark.skipif(not TABLE.exists(), reason="the table of published runs is not beside this checkout")
def test_published_pairs_are_predicted_within_the_stated_error() -> None:
    with TABLE.open(encoding="utf-8", newline="") as file:
        checks, notes = check(list(csv.DictReader(file)))
    assert len(checks) == 168
    assert [note.split(":")[0] for note in notes] == ["7 rows left out that are alone with their pair_id"]
    errors = [abs(c.error) for c in checks]
    assert np.median(errors) < 0.10
    assert np.mean(errors) < 0.15
    assert 0.7 < np.mean([c.covered for c in checks]) < 0.9
    # each source of runs judged by intervals that the other sources alone would give
    held_out = [ok for source in {_family(c) for c in checks} for ok in _covered_without(checks, source)]
    assert 0.7 < np.mean(held_out) < 0.9


def _family(checked: Checked) -> str:
    return checked.source.split("#")[0].split()[0]


def _width(checked: Checked) -> float:
    """Error in units of the stated half-width."""
    return abs(math.log(checked.predicted / checked.measured)) / math.log((checked.high or 0) / checked.predicted)


def _covered_without(checks: list[Checked], source: str) -> list[bool]:
    limit = float(np.quantile([_width(c) for c in checks if _family(c) != source], 0.8))
    return [_width(c) <= limit for c in checks if _family(c) == source]
