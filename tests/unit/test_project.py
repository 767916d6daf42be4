"""Hours and dollars of a job, against arithmetic done by hand; what cannot be known says why."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import A40, CPU, GIB, header, micro, step, steps, view

from ft_insight import records as r
from ft_insight.catalog import find_gpu, load_gpus, quote
from ft_insight.estimate import DEFAULT_GPUS, Ask, estimate_records, measure, project
from ft_insight.estimate.job_cost import marked
from ft_insight.estimate.memory import CONTEXT_BYTES, FRAGMENTATION
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.workload import Workload, WorkloadError, workload_of
from ft_insight.run_view import RunView

LENGTHS = {"length_values": (100, 200, 400), "length_counts": (50, 30, 20), "longest": 400}
JOB = {"queries": 15_000, **LENGTHS}


def run(
    wall_s: float = 10 / 1.0055, count: int = 10, device: r.Device = A40, micros: Any = None, **said: Any
) -> RunView:
    said = {"dataset": JOB, "train": {"epochs": 10.0, **said.pop("train", {})}, **said}
    return view([header(devices=(device,), **said), *steps(count, wall_s, micro=micros or (micro(),))])


def varied(device: r.Device = A40, batch: int = 4, h: float = 0.1, c: float = 1e-3, **said: Any) -> RunView:
    """A run of padded batches that take h + c * slots, 0.05 s beside, and 1 MiB a slot over 10 GiB."""
    rng = random.Random(3)
    items, t_s, most = [], 0.0, 0
    for number in range(1, 61):
        slots = batch * (100 * number if number in (1, 2, 4) else rng.choice([100, 200, 400] if number > 4 else [200]))
        most = max(most, slots)
        seconds = h + c * slots
        memory = r.Memory(allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + (most << 20))
        one = r.MicroBatch(batch, slots, slots // 2, slots // 2, seconds)
        phases = {"forward": seconds / 3, "backward": seconds * 2 / 3, "other": 0.05}
        memory_known = memory if device is A40 else None
        items.append(step(number, t_s, seconds + 0.05, phases_s=phases, micro=(one,), memory=memory_known))
        t_s += seconds + 0.05
    said = {"dataset": JOB, **said, "train": {"epochs": 2.0, "batch": batch, **said.get("train", {})}}
    return view([header(devices=(device,), **said), *items])


def ask(seen: RunView, *gpus: str, price: float | None = None, price_here: bool = False, **job: Any) -> r.Projection:
    gpu = tuple(find_gpu(name) for name in gpus)
    return project(measure(seen), Ask(workload_of(seen, **job), gpu, price, price_here))


# the job


def test_a_probe_is_priced_as_the_job_that_it_probes() -> None:
    job = workload_of(run(train={"max_steps": 20}))
    assert (job.queries, job.epochs, job.total) == (15_000, 10.0, 150_000)
    assert job.basis == "15,000 rows x 10 epochs"


def test_max_steps_beyond_the_epochs_is_what_is_priced() -> None:
    # 30,000 steps of 10 are 20 epochs of 15,000
    job = workload_of(run(train={"max_steps": 30_000}))
    assert (job.queries, job.epochs) == (15_000, 20.0)
    assert "30,000 steps as set by max_steps" in job.basis


def test_a_data_set_without_a_length() -> None:
    job = workload_of(run(dataset={}, train={"max_steps": 500}))
    assert (job.queries, job.epochs, job.longest) == (5_000, 1.0, None)
    assert "without a length" in job.basis
    with pytest.raises(WorkloadError, match="--queries"):
        workload_of(run(dataset={}))


def test_what_the_user_says_goes_first() -> None:
    seen = run(train={"max_steps": 30_000})
    job = workload_of(seen, queries=200)
    assert (job.queries, job.epochs, job.basis) == (200, 10.0, "200 rows x 10 epochs")
    job = workload_of(seen, epochs=0.5)
    assert (job.queries, job.epochs, job.basis) == (15_000, 0.5, "15,000 rows x 0.5 epochs")
    job = workload_of(run(dataset={}, train={"max_steps": 9}), queries=7)
    assert (job.queries, job.epochs, job.basis) == (7, 1.0, "7 rows x 1 epoch")
    job = workload_of(seen, queries=1, epochs=3, seq_len=77)
    assert (job.queries, job.epochs, job.longest, job.slots(4)) == (1, 3, 77, 308)
    assert job.basis == "1 row x 3 epochs; every row 77 tokens long"


def test_before_the_first_step_the_batch_is_as_configured() -> None:
    seen = view(
        [header(dataset={"queries": 100}, world_size=2, train={"max_steps": 50, "accumulation": 3, "epochs": 1.0})]
    )
    # 50 steps of 10 x 3 x 2
    assert workload_of(seen).total == pytest.approx(3000)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_slots_of_a_padded_batch_against_all_that_can_be_drawn(batch: int) -> None:
    job = Workload(10, 1.0, "", (3, 7, 8, 20), (4, 1, 3, 2))
    rows = [3] * 4 + [7] + [8] * 3 + [20] * 2
    draws = list(itertools.product(rows, repeat=batch)) if batch < 5 else None
    if draws is None:
        rng = random.Random(0)
        draws = [tuple(rng.choices(rows, k=batch)) for _ in range(100_000)]
    brute = sum(batch * max(d) for d in draws) / len(draws)
    assert job.slots(batch) == pytest.approx(brute, rel=1e-9 if batch < 5 else 0.01)


def test_slots_without_padding() -> None:
    assert Workload(10, 1.0, "", (3, 20), (1, 1), padded=False).slots(4) == 46
    assert Workload(10, 1.0, "").slots(4) is None
    assert workload_of(run()).padded
    assert not workload_of(run(train={"padding_free": True})).padded
    assert not workload_of(run(train={"packing": "bfd"})).padded
    assert workload_of(run(train={"packing": "wrapped"})).padded


@pytest.mark.parametrize("odd", [((1, 2), (1,)), ((0, 2), (1, 1)), ((1, 2), (0, 0)), ((1, 2), (-1, 3))])
def test_lengths_that_make_no_sense_are_not_used(odd: Any) -> None:
    data = {"queries": 10, "length_values": odd[0], "length_counts": odd[1]}
    assert workload_of(run(dataset=data)).slots(3) is None


# memory


def test_a_cpu_has_no_gpu_memory() -> None:
    rows = ask(run(device=CPU), "h100").rows
    assert [row.largest_batch for row in rows] == [None, None]
    assert all("CPU" in row.unknown["largest_batch"] for row in rows)


# hours and dollars


def test_the_paper_s_row_by_hand() -> None:
    here = ask(run(price_usd_per_hour=0.79)).rows[0]
    # 150,000 queries at 1.0055 a second are 149,179.5 s, 41.44 h; at $0.79 an hour $32.74
    assert here.here
    assert here.queries_per_s is not None
    assert here.hours is not None
    assert here.usd is not None
    assert here.queries_per_s[0] == pytest.approx(1.0055)
    assert here.hours[0] == pytest.approx(41.4387, abs=1e-3)
    assert round(here.usd[0], 2) == 32.74
    assert here.price_source == "as given to the callback"
    assert here.gpu == "A40"
    assert here.basis == "measured at batch 10"


def test_evaluations_and_saves_are_added() -> None:
    items = [
        header(
            devices=(A40,), dataset=JOB, train={"epochs": 1.0, "eval_every_steps": 100.0, "save_every_steps": 500.0}
        ),
        *steps(4, 2.0),
        r.Span(kind="evaluation", t_s=8.0, wall_s=30.0, step=4),
        r.Span(kind="saving", t_s=38.0, wall_s=12.0, step=4),
    ]
    here, there = ask(view(items), "h100").rows
    assert here.hours is not None
    # 1,500 steps of 2 s, 15 evaluations of 30 s, 3 saves of 12 s
    assert here.hours[0] == pytest.approx((3000 + 450 + 36) / 3600)
    assert there.hours is not None
    # half a second computes: 32 layers of 4.7 ms are launched as ever, the products of 46.7 B parameters fill the
    # rest, at 0.8 x 149.7 TFLOPS here and 794.5 there; 1.5 s wait for data as ever
    micro_s = 32 * 0.0047 + (0.5 - 32 * 0.0047) * 0.8 * 149.7 / 794.5
    assert there.hours[0] == pytest.approx((1500 * (micro_s + 1.5) + 450 * micro_s / 0.5 + 36) / 3600)
    assert there.bound_by == "data"
    unseen = ask(view(items[:5])).rows[0]
    assert "left out" in unseen.unknown["evaluation"]
    assert "evaluation" not in here.unknown


@pytest.mark.parametrize(
    ("gpus", "price_here", "callback", "here", "there"),
    [
        (("h100",), False, None, "catalogue", 2.0),
        (("h100",), False, 0.5, 0.5, 2.0),
        (("h100", "l40s"), True, 0.5, 2.0, "catalogue"),
        (("a40",), False, 0.5, 2.0, None),
    ],
)
def test_whose_price_it_is(gpus: Any, price_here: bool, callback: Any, here: Any, there: Any) -> None:
    rows = ask(run(price_usd_per_hour=callback), *gpus, price=2.0, price_here=price_here).rows

    def expected(row: r.ProjectionRow, said: Any) -> float:
        offer = quote(row.gpu)
        assert offer is not None
        return offer.usd_per_hour if said == "catalogue" else said

    assert rows[0].usd_per_hour == expected(rows[0], here)
    for row in rows[1:]:
        assert row.usd_per_hour == expected(row, there)
    assert len(rows) == 1 + len(gpus) - ("a40" in gpus)
    for row in rows:
        assert row.usd is not None
        assert row.hours is not None
        assert row.usd_per_hour is not None
        assert row.usd == pytest.approx(tuple(h * row.usd_per_hour for h in row.hours))


def test_catalogue_prices_are_of_all_gpus_of_the_run() -> None:
    offer = quote("A40")
    assert offer is not None
    seen = view([header(devices=(A40, A40), world_size=2, dataset=JOB, train={"epochs": 1.0}), *steps(5)])
    assert ask(seen).rows[0].usd_per_hour == pytest.approx(4 * offer.usd_per_hour)


def test_the_largest_batch_is_what_another_gpu_runs_at() -> None:
    seen = varied()
    model = measure(seen).step_time
    assert not isinstance(model, NotIdentifiable)
    assert model.curve.fixed_s == pytest.approx(0.1, rel=1e-3)
    here, there = ask(seen, "h100").rows
    h100, a40 = find_gpu("h100"), find_gpu("a40")
    batch = there.largest_batch
    room = h100.usable_memory_bytes * (1 - FRAGMENTATION) - CONTEXT_BYTES - 10 * GIB
    assert batch == math.floor(room / (400 << 20))
    slots = workload_of(seen).slots(batch)
    assert slots is not None
    # 0.1 s are fixed and the host's; the products of 46.7 B parameters are all else of a micro-batch, and overlap
    products = math.sqrt((0.1 + 1e-3 * slots) ** 2 - 0.1**2) * a40.matmul_tflops * 0.8 / 794.5
    expected = batch / (math.hypot(0.1, products) + 0.05)
    assert there.queries_per_s is not None
    assert there.queries_per_s[0] == pytest.approx(expected, rel=1e-3)
    assert str(batch) in str(there.basis)
    assert (there.batch, there.accumulation, there.global_batch) == (batch, 1, batch)
    assert there.bound_by == "matmul"
    assert here.queries_per_s is not None
    assert here.queries_per_s[0] == pytest.approx(seen.rates.queries_per_s)


def test_a_batch_that_does_not_fit_is_not_projected() -> None:
    small = min((g for g in load_gpus() if g.vendor == "NVIDIA" and g.memory_gb >= 16), key=lambda g: g.memory_gb)
    seen = varied(batch=32)
    there = ask(seen, small.name).rows[1]
    assert there.largest_batch is not None
    assert 0 < there.largest_batch < 32
    assert f"batch {there.largest_batch}" in str(there.basis)
    # without a step-time model nobody knows what a smaller batch takes
    memory = r.Memory(allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + (12_800 << 20))
    items = [step(i, i, memory=memory, micro=(micro(32, 12_800),)) for i in range(1, 12)]
    blind = view([header(devices=(A40,), dataset=JOB, train={"epochs": 1.0, "batch": 32}), *items])
    there = ask(blind, small.name).rows[1]
    assert there.queries_per_s is None
    assert "batch 32 does not fit" in there.unknown["queries_per_s"]
    there = ask(blind, small.name, seq_len=100_000).rows[1]
    assert there.largest_batch == 0
    assert "100,000 tokens does not fit" in there.unknown["queries_per_s"]


def test_rows_too_long_for_the_run_s_own_batch_are_accumulated_or_refused() -> None:
    here = ask(varied(), seq_len=10_000).rows[0]
    assert here.largest_batch == 3
    assert (here.batch, here.accumulation, here.global_batch) == (2, 2, 4)
    none = ask(varied(), seq_len=100_000).rows[0]
    assert (none.largest_batch, none.queries_per_s, none.hours) == (0, None, None)
    assert "100,000 tokens does not fit" in none.unknown["queries_per_s"]


def test_rows_that_are_as_good_as_each_other_have_no_marks() -> None:
    row = r.ProjectionRow(gpu="A40", hours=(2.0, 1.0, 3.0), usd=(1.0, 0.5, 1.5))
    assert [x.marks for x in marked([row, row])] == [(), ()]
    quicker = r.ProjectionRow(gpu="H100", hours=(1.0, 0.5, 1.5), usd=(1.0, 0.5, 1.5))
    assert [x.marks for x in marked([row, quicker])] == [(), ("fastest", "best value")]
    nearly = r.ProjectionRow(gpu="H200", hours=(1.001, 0.5, 1.5), usd=(1.001, 0.5, 1.5))
    assert [x.marks for x in marked([row, quicker, nearly])] == [(), (), ()]
    assert [x.marks for x in marked([row])] == [()]


def test_other_lengths_need_a_model_of_step_time() -> None:
    longer = ask(varied(), seq_len=800).rows[0]
    assert longer.queries_per_s is not None
    assert longer.queries_per_s[0] == pytest.approx(4 / (0.1 + 1e-3 * 3200 + 0.05), rel=1e-3)
    # one shape of 10 x 100 slots: as long rows as were seen are as measured, others are unknown
    same = ask(run(), seq_len=100).rows[0]
    assert same.queries_per_s is not None
    assert same.queries_per_s[0] == pytest.approx(1.0055)
    other = ask(run(), seq_len=500).rows[0]
    assert other.queries_per_s is None
    assert "one batch shape seen" in other.unknown["queries_per_s"]


def test_from_a_cpu_the_work_counts_not_the_speed() -> None:
    slow, fast = (ask(run(wall_s, device=CPU), "h100").rows[1] for wall_s in (100.0, 1.0))
    assert slow.queries_per_s == fast.queries_per_s
    assert slow.queries_per_s is not None
    # 1,000 slots x 4 x 46.7e9 FLOPs at 12.6% of the peak, and 32 layers x 4.7 ms
    compute = 1000 * 4 * 46.7e9 / (find_gpu("h100").matmul_tflops * 1e12 * 0.126)
    assert slow.queries_per_s[0] == pytest.approx(10 / math.hypot(compute, 32 * 0.0047))
    assert "FLOPs" in str(slow.basis)


def test_from_two_cpu_ranks_two_gpus_follow() -> None:
    one = run(device=CPU)
    two = view([header(devices=(CPU,), dataset=JOB, world_size=2, train={"epochs": 10.0}), *steps(10, 10.0)])
    from ft_insight.ranks import combine

    other = view([header(devices=(CPU,), dataset=JOB, world_size=2, rank=1, train={"epochs": 10.0}), *steps(10, 10.0)])
    rate_one = ask(one, "h100").rows[1].queries_per_s
    rate_two = ask(combine([two, other]), "h100").rows[1].queries_per_s
    assert rate_one is not None
    assert rate_two is not None
    assert rate_two == pytest.approx(tuple(2 * x for x in rate_one))


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (run(count=1), "fewer than two steps"),
        (run(micros=(micro(None, None, None),)), "do not tell how many queries"),
        (run(micros=(micro(0, 0, 0),)), "do not tell how many queries"),
        (run(device=r.Device(kind="cuda", name="Secret GPU")), None),
    ],
)
def test_what_is_unknown_has_its_reason(seen: RunView, why: str | None) -> None:
    rows = ask(seen, "h100", "a100", "mi300x").rows
    if why:
        assert why in rows[0].unknown["queries_per_s"]
    for row in rows:
        for name in ("queries_per_s", "largest_batch"):
            assert (getattr(row, name) is None) == (name in row.unknown), (row.gpu, name)
            assert row.unknown.get(name, "x")
        assert (row.usd is None) == ("usd" in row.unknown or "queries_per_s" in row.unknown)
        assert (row.hours is None) == ("queries_per_s" in row.unknown)


def test_the_end_of_a_run_writes_its_fit_and_projection() -> None:
    fit, projection = estimate_records(varied(), 5.0)
    assert isinstance(fit, r.Fit)
    assert isinstance(projection, r.Projection)
    assert fit.identifiable
    assert fit.points == 59
    assert fit.rest_s == pytest.approx(0.05)
    assert [row.here for row in projection.rows] == [True] + [False] * (len(DEFAULT_GPUS) - 1)
    (alone,) = estimate_records(run(dataset={}), 5.0)
    assert isinstance(alone, r.Fit)
    assert not alone.identifiable
    assert "one batch shape" in str(alone.reason)


measured_s = st.floats(1e-6, 1e4) | st.sampled_from([0.0, -1.0, 1e-12, 1e9])
counts = st.integers(-2, 10**6) | st.none()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_intervals_are_ordered_whatever_was_logged(data: st.DataObject) -> None:
    draw = data.draw
    items: list[r.Record] = []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        one = r.MicroBatch(draw(counts), draw(counts), draw(counts), draw(counts), draw(measured_s | st.none()))
        memory = r.Memory(allocated_bytes=draw(counts), peak_allocated_bytes=draw(counts))
        items.append(
            step(number, draw(measured_s), draw(measured_s), micro=(one,) * draw(st.integers(0, 3)), memory=memory)
        )
    if draw(st.booleans()):
        items.append(r.Span(kind="evaluation", t_s=0.0, wall_s=draw(measured_s), step=1))
    train = {
        "epochs": draw(st.sampled_from([None, 0.5, 3.0])),
        "eval_every_steps": 2.0,
        "max_steps": draw(st.sampled_from([None, 5, 10**6])),
    }
    dataset = draw(st.sampled_from([JOB, {"queries": 3}, {"queries": 0}]))
    seen = view([header(devices=(draw(st.sampled_from([A40, CPU])),), dataset=dataset, train=train), *items])
    job = {"seq_len": draw(st.sampled_from([None, 1, 5000])), "queries": draw(st.sampled_from([None, 1, 10**9]))}
    for row in ask(seen, "h100", "t4", price=draw(st.sampled_from([None, 0.0, 2.0])), price_here=True, **job).rows:
        for triple in (row.queries_per_s, row.hours, row.usd):
            if triple is not None:
                middle, low, high = triple
                assert low <= middle <= high
                assert all(math.isfinite(x) for x in triple)
        if row.queries_per_s is not None:
            assert row.queries_per_s[1] > 0


def test_a_device_ahead_of_the_host_gives_no_time_back() -> None:
    # the device says 2 s of a step that took the host 1 s
    items = [step(i, i, micro=(micro(4, 100 * i, compute_s=2.0),)) for i in range(1, 20)]
    measured = measure(view([header(devices=(A40,), dataset=JOB), *items]))
    assert measured.view.rest_s[0] == -1.0
    assert measured.rest_s == 0.0
