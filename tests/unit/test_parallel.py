"""Several GPUs: batch and accumulation that keep the global batch, and what gradients cost on the way, by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from makers import A40, CPU, GIB, header, step, view

from ft_insight import records as r
from ft_insight.catalog import find_gpu, quote
from ft_insight.estimate import Ask, Measured, measure, project
from ft_insight.estimate.parallel import exposed_s, gradient_bytes, refuse_count, setting_for
from ft_insight.estimate.workload import workload_of
from ft_insight.run_view import RunView

ADAPTERS = 10_000_000


def run(
    batch: int = 4,
    accumulation: int = 1,
    world: int = 1,
    lengths: tuple[int, ...] = (100, 200, 400),
    moving: int = 1 << 20,
    **said: Any,
) -> RunView:
    """Padded batches of 0.1 s + 1 ms a slot, 0.05 s beside them, and so many bytes a slot over 10 GiB."""
    rng, items, t_s = random.Random(1), [], 0.0
    most = 0
    for number in range(1, 41):
        micros = []
        for _ in range(accumulation):
            slots = batch * rng.choice(lengths)
            most = max(most, slots)
            micros.append(r.MicroBatch(batch, slots, slots // 2, slots // 2, 0.1 + 1e-3 * slots))
        compute = sum(m.compute_s or 0.0 for m in micros)
        wall, phases = compute + 0.05, {"forward": compute / 3, "backward": compute * 2 / 3, "other": 0.05}
        memory = r.Memory(allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + most * moving)
        items.append(step(number, t_s, wall, phases_s=phases, micro=tuple(micros), memory=memory))
        t_s += wall
    counts = tuple(1 for _ in lengths)
    said = {"dataset": {"queries": 12_000, "length_values": lengths, "length_counts": counts}, **said}
    model = {"trainable_parameters": ADAPTERS, "parameters": 1_000_000_000, **said.pop("model", {})}
    train = {"batch": batch, "accumulation": accumulation, "epochs": 1.0, **said.pop("train", {})}
    return view([header(devices=(A40,), world_size=world, model=model, train=train, **said), *items])


@pytest.mark.parametrize(
    ("batch", "accumulation", "world", "gpus", "largest", "wanted", "expected"),
    [
        # what the run accumulated, it keeps: 32 queries a step
        (4, 8, 1, 1, 17, None, (16, 2)),
        (4, 8, 1, 1, 100, None, (32, 1)),
        (4, 8, 1, 1, 3, None, (3, 11)),
        (4, 8, 1, 2, 17, None, (16, 1)),
        (4, 8, 1, 8, 17, None, (4, 1)),
        (4, 8, 4, 4, 16, None, (16, 2)),
        (4, 8, 4, 1, 16, None, (16, 8)),
        (4, 8, 1, 1, 4, None, (4, 8)),
        (4, 8, 1, 1, None, None, (4, 8)),
        # a run that did not is taken to run at what fits; a card that holds less accumulates
        (4, 1, 1, 1, 17, None, (17, 1)),
        (4, 1, 1, 2, 17, None, (17, 1)),
        (32, 1, 1, 1, 10, None, (8, 4)),
        # a batch that is asked for
        (4, 8, 1, 1, 17, 8, (8, 4)),
        (4, 1, 1, 1, 17, 17, (17, 1)),
        (16, 1, 1, 1, 17, 4, (4, 4)),
    ],
)
def test_the_global_batch_is_kept(
    batch: int, accumulation: int, world: int, gpus: int, largest: Any, wanted: Any, expected: tuple[int, int]
) -> None:
    measured = measure(run(batch, accumulation, world))
    found = setting_for(measured, gpus, largest, wanted)
    assert found is not None
    assert (found.batch, found.accumulation) == expected
    assert found.gpus == gpus
    if accumulation > 1 and largest != 3:
        assert found.global_batch == batch * accumulation * world


def test_a_projection_keeps_what_was_accumulated() -> None:
    seen = run(4, 8)
    gpus = (find_gpu("h100"), find_gpu("l40s"))
    rows = project(measure(seen), Ask(workload_of(seen, seq_len=150), gpus)).rows
    for row in rows:
        assert row.global_batch == 32
        assert (row.batch or 0) * (row.accumulation or 0) == 32
    there = rows[1]
    assert there.largest_batch is not None
    assert there.largest_batch > 32
    assert (there.batch, there.accumulation) == (32, 1)
    # the run's own batch stays in sight, and is slower: its fixed time is paid eight times
    assert there.present_queries_per_s is not None
    assert there.queries_per_s is not None
    assert there.present_queries_per_s[0] < there.queries_per_s[0]
    assert rows[0].present_queries_per_s == rows[0].queries_per_s


def test_gradients_on_the_way_by_hand() -> None:
    full = header(train={"method": "full"}, model={"parameters": 1_000_000_000, "dtype": "torch.bfloat16"})
    assert gradient_bytes(full) == 2e9
    a100, l40s = find_gpu("a100"), find_gpu("l40s")
    # 2 x 3/4 x 2 GB over 80% of 300 GB/s are 12.5 ms: all but the last 25 MiB hide behind half a second of backward
    assert exposed_s(full, a100, 4, 1.0) == pytest.approx(0.0125 * 25 * 2**20 / 2e9)
    # over PCIe's 32 GB/s 117 ms, of which a micro-batch of 0.1 s hides 50
    assert exposed_s(full, l40s, 4, 0.1) == pytest.approx(3e9 / (32e9 * 0.8) - 0.05)
    assert exposed_s(full, l40s, 1, 0.1) == 0.0
    adapters = header(model={"trainable_parameters": 1000, "dtype": "torch.bfloat16"})
    assert gradient_bytes(adapters) == 4000  # PEFT keeps them in fp32
    assert gradient_bytes(header()) is None


def test_rows_of_several_gpus() -> None:
    seen = run(4, lengths=(199, 200, 400), moving=32 << 20)
    offer = quote("L40S")
    assert offer is not None
    asked = Ask(workload_of(seen, seq_len=400), (find_gpu("l40s"), find_gpu("a40")), batch=2, counts=(1, 2, 8))
    rows = project(measure(seen), asked).rows
    assert [(x.gpu, x.gpus) for x in rows[1:]] == [("L40S", 1), ("L40S", 2), ("L40S", 8), ("A40", 2), ("A40", 8)]
    one, two, eight = rows[1:4]
    # the run's 4 queries a step are two micro-batches of 2 on one GPU, and one on each of two
    assert [(x.batch, x.accumulation, x.global_batch) for x in (one, two)] == [(2, 2, 4), (2, 1, 4)]
    assert eight.global_batch == 16
    assert [x.usd_per_hour for x in (one, two, eight)] == pytest.approx([offer.usd_per_hour * n for n in (1, 2, 8)])
    assert one.queries_per_s is not None
    assert two.queries_per_s is not None
    assert eight.queries_per_s is not None
    assert one.queries_per_s[0] < two.queries_per_s[0] < eight.queries_per_s[0] < 4.0001 * two.queries_per_s[0]
    # A40: 2 x 400 slots in 0.9 s, 0.05 s beside, and 40 MB of gradients twice over 25.6 GB/s, all but half hidden
    a40 = rows[4]
    assert a40.queries_per_s is not None
    last = 40e6 / 25.6e9 * 25 * 2**20 / 40e6
    assert a40.queries_per_s[0] == pytest.approx(4 / (0.9 + 0.05 + last), rel=1e-3)
    assert a40.queries_per_s[1] < a40.queries_per_s[0] < a40.queries_per_s[2]


def test_all_ranks_wait_for_the_longest_row() -> None:
    seen = run(1, lengths=(100, 250, 400), moving=1)
    asked = Ask(workload_of(seen), (find_gpu("a40"),), batch=1, counts=(4,))
    (there,) = project(measure(seen), asked).rows[1:]
    # of 81 draws of four rows the longest is 100 in one, 250 in 15 and 400 in 65; a row alone is 250 on average
    longest = (100 + 15 * 250 + 65 * 400) / 81
    assert there.queries_per_s is not None
    header_s = (0.1 + 1e-3 * longest) / (0.1 + 1e-3 * 250)
    here = project(measure(seen), asked).rows[0].queries_per_s
    assert here is not None
    micro_s = (1 / here[0] - 0.05) * header_s
    last = 2 * 3 / 4 * 40e6 / 25.6e9 * 25 * 2**20 / 40e6
    assert there.queries_per_s[0] == pytest.approx(4 / (micro_s + 0.05 + last), rel=1e-3)


def test_what_padding_costs_a_large_batch_is_not_chosen() -> None:
    # one row in ten is fifty times as long: a batch of many holds one of them, and pads all others
    seen = run(1, 8, lengths=(20, *[30] * 8, 1500), moving=1 << 10, model={"parameters": 10_000_000})
    there = project(measure(seen), Ask(workload_of(seen), (find_gpu("l40s"),))).rows[1]
    assert there.largest_batch is not None
    assert there.largest_batch > 8
    assert (there.batch, there.accumulation, there.global_batch) == (1, 8, 8)
    assert there.queries_per_s == there.present_queries_per_s


def test_the_price_of_the_own_machine_is_that_of_each_gpu() -> None:
    seen = run(price_usd_per_hour=0.79)
    asked = Ask(workload_of(seen), (find_gpu("a40"),), counts=(1, 2))
    here, two = project(measure(seen), asked).rows
    assert here.usd_per_hour == 0.79
    assert two.usd_per_hour == pytest.approx(1.58)
    given = Ask(workload_of(seen), (find_gpu("a40"),), price=3.0, counts=(2,))
    assert [x.usd_per_hour for x in project(measure(seen), given).rows] == [0.79, 3.0]


def refused(measured: Measured, gpus: int) -> str:
    return refuse_count(measured, gpus) or ""


def test_numbers_of_gpus_that_cannot_be_told() -> None:
    assert refused(measure(run()), 4) == ""
    assert "more than 8" in refused(measure(run()), 16)
    assert refused(measure(run(world=16)), 16) == ""
    assert "splits its model" in refused(measure(run(world=4, data_parallel_size=2)), 2)
    assert "trainable" in refused(measure(run(model={"trainable_parameters": None})), 2)
    seen = run(world=4, data_parallel_size=2)
    row = project(measure(seen), Ask(workload_of(seen), (find_gpu("h100"),), counts=(2,))).rows[1]
    assert "splits its model" in row.unknown["queries_per_s"]


def test_memory_is_what_bounds_a_card_that_would_be_faster_with_more_of_it() -> None:
    # half of a micro-batch of one row of 100 slots is fixed: twice the batch is a third faster
    seen = run(1, lengths=(80, 100, 120), moving=120 << 20)
    rows = project(measure(seen), Ask(workload_of(seen), (find_gpu("l40s"),))).rows
    assert rows[1].batch == rows[1].largest_batch
    assert rows[1].bound_by == "memory capacity"
    # with batches so large that the fixed part is nothing, more memory gains nothing; 4 GFLOP a slot take an A40 33 us
    seen = run(64, lengths=(80, 100, 120), moving=1 << 20)
    assert project(measure(seen), Ask(workload_of(seen), (find_gpu("l40s"),))).rows[1].bound_by == "memory bandwidth"


def test_marks_name_the_cheapest_the_fastest_and_the_best_value() -> None:
    seen = run(price_usd_per_hour=0.5)
    rows = project(measure(seen), Ask(workload_of(seen), (find_gpu("h100"), find_gpu("l40s")), counts=(1, 8))).rows
    usd = {mark: row for row in rows for mark in row.marks}
    assert set(usd) == {"cheapest", "fastest", "best value"}
    known = [row for row in rows if row.usd and row.hours]
    assert usd["cheapest"].usd == min(row.usd for row in known if row.usd)
    assert usd["fastest"].hours == min(row.hours for row in known if row.hours)
    worth = [row.usd[0] * row.hours[0] for row in known if row.usd and row.hours]
    best = usd["best value"]
    assert best.usd is not None
    assert best.hours is not None
    assert best.usd[0] * best.hours[0] == min(worth)
    (alone,) = project(measure(seen), Ask(workload_of(seen), ())).rows
    assert alone.marks == ()


def test_another_batch_on_the_run_s_own_machine() -> None:
    seen = run(4)
    measured = measure(seen)
    job = workload_of(seen, seq_len=400)
    (row,) = project(measured, Ask(job, (), batch=8)).rows
    assert row.queries_per_s is not None
    assert row.queries_per_s[0] == pytest.approx(8 / (0.1 + 1e-3 * 3200 + 0.05), rel=1e-3)
    assert (row.batch, row.accumulation) == (8, 1)
    assert row.present_queries_per_s is not None
    assert row.present_queries_per_s[0] == pytest.approx(4 / (0.1 + 1e-3 * 1600 + 0.05), rel=1e-3)
    (row,) = project(measured, Ask(job, (), batch=100_000)).rows
    assert row.queries_per_s is None
    assert "does not fit" in row.unknown["queries_per_s"]


def test_start_up_is_added_as_measured() -> None:
    items = [
        header(devices=(CPU,), dataset={"queries": 100}, train={"epochs": 1.0}),
        step(1, 60.0, before_s={"startup": 60.0}),
        *(step(n, 60.0 + n) for n in range(2, 6)),
    ]
    here = project(measure(view(items)), Ask(workload_of(view(items)), ())).rows[0]
    # 10 steps of a second, of 10 queries each, after a minute of start-up
    assert here.hours is not None
    assert here.hours[0] == pytest.approx(70 / 3600)
