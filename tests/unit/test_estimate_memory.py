"""Peak memory against slots, from what an allocator tells that nobody resets: planted lines, and what is read of them.

A run is simulated as torch's allocator shows it: a running maximum, what is allocated when a step begins, and what was
read within each micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from makers import A40, CPU, GIB, header, micro, step, view

from ft_insight import records as r
from ft_insight.catalog import find_gpu
from ft_insight.estimate.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    Limit,
    largest,
    limit_here,
    limit_on,
    room_here,
    within,
    would_have_fitted,
)
from ft_insight.estimate.peak_fit import PeakMemory, fit_peak, truncated
from ft_insight.memory_points import MemoryPoint, MemoryView
from ft_insight.report.memory import memory_room_section
from ft_insight.run_view import RunView

FIXED, SLOPE, BASE = 10 * GIB, 1_000_000.0, 9 * GIB
STATES = 2 * GIB
MIB = 1 << 20


def simulate(
    sizes: Sequence[int],
    noise: float = 0.0,
    seed: int = 0,
    states: int = 0,
    before: int = 0,
    read: float = 0.8,
    failures: Sequence[r.OutOfMemory] = (),
) -> RunView:
    """Run micro-batches of these slots on a device whose peak is ``FIXED + SLOPE * slots`` and some noise.

    ``states`` appear at the end of the first step; ``before`` is a peak from before training; what is read within a
    micro-batch is ``read`` of what it needs above what was there.
    """
    rng = random.Random(seed)
    highest, items = before, []
    for number, slots in enumerate(sizes, 1):
        missing = states if number == 1 else 0
        peak = int(FIXED + SLOPE * slots + rng.gauss(0, noise)) - missing
        base = BASE - missing
        exact, highest = peak > highest, max(peak, highest)
        told = r.MicroMemory(highest, exact, int(base + read * (peak - base)))
        memory = r.Memory(allocated_bytes=BASE, peak_allocated_bytes=highest, base_bytes=base, micro=(told,))
        items.append(step(number, float(number), memory=memory, micro=(micro(4, slots),)))
    data = {"queries": 1000, "length_values": (100, 200, 400), "length_counts": (50, 30, 20), "longest": 400}
    return view([header(devices=(A40,), dataset=data), *items, *failures])


def fitted(seen: RunView) -> PeakMemory:
    found = fit_peak(seen.filling)
    assert isinstance(found, PeakMemory), found
    return found


def random_sizes(seed: int, count: int = 300) -> list[int]:
    """Sizes of micro-batches as padding makes them, few of them large."""
    rng = random.Random(seed)
    return [8 * round(min(4096, max(64, rng.lognormvariate(6.5, 0.7))) / 8) for _ in range(count)]


def test_only_what_rose_is_known_and_the_rest_is_bounded() -> None:
    points = simulate([100, 50, 200, 200]).filling.points
    known = [p for p in points if p.exact]
    assert [(p.slots, p.low_bytes) for p in known] == [(100, FIXED + 100 * SLOPE), (200, FIXED + 200 * SLOPE)]
    smaller, again = [p for p in points if not p.exact]
    assert (smaller.slots, smaller.high_bytes) == (50, FIXED + 100 * SLOPE)
    assert smaller.low_bytes == int(BASE + 0.8 * (FIXED + 50 * SLOPE - BASE))
    assert (again.slots, again.high_bytes) == (200, FIXED + 200 * SLOPE)


def test_a_planted_line_is_recovered() -> None:
    found = fitted(simulate([100, 300, 50, 700, 1500, 400, 2500]))
    assert found.fixed_bytes == pytest.approx(FIXED, rel=1e-6)
    assert found.bytes_per_slot == pytest.approx(SLOPE, rel=1e-6)
    assert found.points == 5
    middle, low, high = found.predict(4000)
    assert low <= middle <= high
    assert middle == pytest.approx(FIXED + 4000 * SLOPE, rel=1e-6)
    assert high - low < 0.01 * middle


def test_intervals_cover_what_was_planted() -> None:
    inside = {"fixed": 0, "slope": 0, "peak": 0}
    for seed in range(100):
        found = fitted(simulate(random_sizes(seed), noise=20 * MIB, seed=seed))
        inside["fixed"] += found.fixed_interval[0] <= FIXED <= found.fixed_interval[1]
        inside["slope"] += found.per_slot_interval[0] <= SLOPE <= found.per_slot_interval[1]
        _, low, high = found.predict(6000)
        inside["peak"] += low <= FIXED + 6000 * SLOPE <= high
    assert all(count >= 85 for count in inside.values()), inside


def test_a_large_first_batch_does_not_hide_what_the_states_take() -> None:
    """The first step runs without the optimizer's states, and its batch is never reached again."""
    sizes = [4000, *(s for s in random_sizes(3, 60) if s < 2500)]
    seen = simulate(sizes, states=STATES, read=0.8)
    assert sum(p.exact for p in seen.filling.points) < len(sizes)
    found = fitted(seen)
    # its peak as if the states had been there
    assert found.predict(4000)[0] == pytest.approx(FIXED + 4000 * SLOPE, rel=0.001)
    _, low, high = found.predict(8000)
    assert low <= FIXED + 8000 * SLOPE <= high
    assert found.per_slot_interval[0] <= SLOPE <= found.per_slot_interval[1]
    # without them it would seem that more fits than does
    assert found.predict(8000)[0] > FIXED + 8000 * SLOPE - STATES


def test_the_first_step_alone_counts_the_states_that_come_at_its_end() -> None:
    found = fitted(simulate([4000], states=STATES))
    assert found.predict(4000)[0] == pytest.approx(FIXED + 4000 * SLOPE, rel=1e-6)


def test_one_odd_peak_does_not_decide() -> None:
    seen = simulate([100, 300, 700, 1500, 2500, 3000, 3500, 4000], noise=5 * MIB)
    steps = list(seen.filling.points)
    odd = MemoryPoint(2000, FIXED + int(2000 * SLOPE) + 3 * GIB, FIXED + int(2000 * SLOPE) + 3 * GIB)
    found = fit_peak(MemoryView(points=(*steps, odd), base_bytes=BASE))
    assert isinstance(found, PeakMemory)
    assert found.predict(6000)[0] == pytest.approx(FIXED + 6000 * SLOPE, rel=0.03)


def test_one_size_takes_what_stays_as_fixed() -> None:
    found = fitted(simulate([1000] * 20, read=0.5))
    rise = FIXED + 1000 * SLOPE - BASE
    assert found.predict(1000)[0] == pytest.approx(FIXED + 1000 * SLOPE)
    assert found.bytes_per_slot == pytest.approx(rise / 1000)
    assert found.fixed_bytes == pytest.approx(BASE)
    # what was read within the micro-batch went with its slots for certain
    assert found.per_slot_interval == pytest.approx((rise / 2 / 1000, rise / 1000), rel=1e-6)
    assert found.predict(500)[2] > found.predict(500)[0]
    assert found.predict(2000)[1] < found.predict(2000)[0]


def test_two_sizes_give_a_slope() -> None:
    found = fitted(simulate([1000, 1000, 2000, 1000, 2000]))
    assert found.bytes_per_slot == pytest.approx(SLOPE)
    assert found.fixed_bytes == pytest.approx(FIXED)
    assert found.points == 2


def test_a_higher_peak_before_training_leaves_only_bounds() -> None:
    seen = simulate([500, 1000, 2000, 700], before=20 * GIB, read=0.9)
    assert not any(p.exact for p in seen.filling.points)
    found = fitted(seen)
    assert found.points == 0
    for slots in (500, 2000):
        _, low, high = found.predict(slots)
        assert low <= FIXED + slots * SLOPE <= high or low <= BASE + 0.9 * (FIXED + slots * SLOPE - BASE)
    assert found.predict(2000)[2] == pytest.approx(20 * GIB)
    assert "bounds" in found.basis


def failure(slots: int, queries: int = 8, **said: Any) -> r.OutOfMemory:
    return r.OutOfMemory(step=1, t_s=1.0, phase="forward", message="out", queries=queries, slots=slots, **said)


def test_a_failure_bounds_its_peak_from_below() -> None:
    """The line through one size says 100 slots take 1 GiB; 400 were too many for 4.5 GiB above what stays."""
    exact = MemoryPoint(100, BASE + GIB, BASE + GIB, BASE)
    failed = MemoryPoint(400, BASE + 4 * GIB + GIB // 2, None)
    found = fit_peak(MemoryView(points=(exact, failed), base_bytes=BASE))
    assert isinstance(found, PeakMemory)
    assert found.predict(400)[0] == pytest.approx(BASE + 4.5 * GIB)
    assert found.predict(400)[2] >= BASE + 4.5 * GIB
    # one that the line is above of already changes nothing
    weaker = fit_peak(MemoryView(points=(exact, MemoryPoint(400, BASE + 3 * GIB, None)), base_bytes=BASE))
    assert isinstance(weaker, PeakMemory)
    assert weaker.bytes_per_slot == pytest.approx(GIB / 100)


def test_a_failure_counts_in_a_regression() -> None:
    sizes = [100, 200, 300, 400, 500]
    calm = simulate(sizes, noise=30 * MIB, seed=5)
    need = FIXED + int(3000 * SLOPE)
    told = failure(3000, allocated_bytes=need, requested_bytes=0)
    with_failure = simulate(sizes, noise=30 * MIB, seed=5, failures=[told])
    line = fitted(calm).predict(3000)[0]
    bounded = fitted(with_failure).predict(3000)[0]
    assert bounded >= line
    assert bounded >= need - 60 * MIB


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ((), "no memory of a micro-batch"),
        ((MemoryPoint(1000, 5, 5),), "outside of its steps"),
        ((MemoryPoint(0, 9, 9),), "no memory of a micro-batch"),
        ((MemoryPoint(10, 9, None),), "no memory of a micro-batch"),
        (tuple(MemoryPoint(100 * i, 9 * GIB - i, 9 * GIB - i) for i in range(1, 9)), "does not grow"),
    ],
)
def test_what_tells_nothing_says_why(points: Any, why: str) -> None:
    found = fit_peak(MemoryView(points=points, base_bytes=5))
    assert isinstance(found, str)
    assert why in found


def test_without_micro_batches_the_step_s_largest_is_taken() -> None:
    """A log that only has the running maximum of each step."""

    def at(number: int, slots: int, peak: int) -> r.Step:
        memory = r.Memory(allocated_bytes=100, peak_allocated_bytes=peak)
        return step(number, float(number), memory=memory, micro=(micro(slots=10), micro(slots=slots)))

    seen = view([header(), at(1, 50, 500), at(2, 40, 600), at(3, 80, 900), at(4, 30, 900)])
    assert [(p.slots, p.low_bytes, p.high_bytes) for p in seen.filling.points] == [
        (40, 600, 600),
        (80, 900, 900),
        (30, 100, 900),
    ]


def test_under_accumulation_the_first_micro_batch_lacks_the_gradients() -> None:
    told = (r.MicroMemory(500, True, 400), r.MicroMemory(600, True, 450))
    memory = r.Memory(allocated_bytes=100, base_bytes=100, micro=told)
    seen = view([header(), step(1, 0.0, memory=memory, micro=(micro(slots=50), micro(slots=40)))])
    assert [(p.slots, p.low_bytes) for p in seen.filling.points] == [(40, 600)]


def test_moments_of_a_truncated_normal() -> None:
    """Against sums over a fine grid."""
    for mean, sigma, low, high in [(0, 1, -1, 2), (5, 2, 6, math.inf), (1, 0.5, -math.inf, 0.2), (0, 1, 3, 4)]:
        ends = max(low, mean - 12 * sigma), min(high, mean + 12 * sigma)
        grid = [ends[0] + (ends[1] - ends[0]) * (i + 0.5) / 20_000 for i in range(20_000)]
        weights = [math.exp(-(((x - mean) / sigma) ** 2) / 2) for x in grid]
        first = sum(w * x for w, x in zip(weights, grid, strict=True)) / sum(weights)
        second = sum(w * (x - first) ** 2 for w, x in zip(weights, grid, strict=True)) / sum(weights)
        assert truncated(mean, sigma, low, high) == pytest.approx((first, second), abs=1e-3)
    assert truncated(0, 1, -math.inf, -50) == (-50, 0.0)
    assert truncated(0, 1, 50, math.inf) == (50, 0.0)


# the largest batch


LINE = PeakMemory(10 * GIB, float(MIB), (9 * GIB, 11 * GIB), (0.9 * MIB, 1.1 * MIB), 9, "planted")


def test_largest_batch_by_hand() -> None:
    a40 = find_gpu("a40")
    limit = limit_on(a40)
    free = a40.usable_memory_bytes - CONTEXT_BYTES
    assert limit.margin == FRAGMENTATION * a40.usable_memory_bytes
    found = largest(LINE, limit.tensors, lambda batch: batch * 400.0)
    room_bytes = [free - share * FRAGMENTATION * a40.usable_memory_bytes - 10 * GIB for share in (1, 2, 0)]
    assert found == tuple(math.floor(each / (400 * MIB)) for each in room_bytes)
    # an A40 shows 44.4 GiB: 42.6 usable, 0.68 of context, 10 fixed leave 31.9 GiB, of 0.39 GiB a row
    assert 78 <= found[0] <= 84
    assert largest(LINE, limit.tensors, lambda batch: batch * 40_000.0) == (0, 0, 0)


def test_other_processes_and_the_context_count_as_measured() -> None:
    seen = simulate([100, 300, 700, 1500, 2500])
    assert seen.memory is not None
    items: list[Any] = [header(devices=(r.Device(kind="cuda", name="NVIDIA A40", uuid="U", memory_bytes=44 * GIB),))]
    memory = r.Memory(allocated_bytes=BASE, reserved_bytes=20 * GIB, peak_allocated_bytes=12 * GIB)
    items.append(step(1, 0.0, memory=memory))
    assert limit_here(view(items)) == Limit(44 * GIB, CONTEXT_BYTES)
    sample = r.GpuSample(uuid="U", memory_used_bytes=24 * GIB, process_memory_bytes=20 * GIB + 400 * MIB)
    items.append(r.Gpu(t_s=1.0, samples=(sample,)))
    limit = limit_here(view(items))
    assert limit == Limit(44 * GIB, 400 * MIB, 4 * GIB - 400 * MIB)
    assert limit.tensors[2] == 40 * GIB
    assert limit_on(find_gpu("h100"), limit).context == 400 * MIB
    assert limit_here(view([header(devices=(CPU,))])) is None


def test_room_here_is_at_the_longest_padded_row_and_at_the_typical_one() -> None:
    found = room_here(simulate([400, 800, 1200, 1600]))
    assert not isinstance(found, str)
    assert found.longest == 400  # 1600 slots of 4 queries
    assert A40.memory_bytes is not None
    free = A40.memory_bytes * (1 - FRAGMENTATION) - CONTEXT_BYTES - FIXED
    assert found.batch == math.floor(free / (400 * SLOPE))
    assert found.low < found.batch < found.high
    assert found.typical is not None
    # rows of 100, 200 and 400 tokens: a large batch has one of 400 nearly always
    assert found.typical[0] == found.batch
    assert found.use_bytes == pytest.approx(FIXED + found.batch * 400 * SLOPE + CONTEXT_BYTES, rel=1e-6)
    longer = room_here(simulate([408, 816, 1224, 1632]))
    assert not isinstance(longer, str)
    assert longer.longest == 408  # padded to a multiple of 8


def test_what_fitted_and_what_failed_bound_the_answer() -> None:
    filling = MemoryView(fits_slots=2000, fails_slots=3000)
    assert within((20, 15, 30), filling, 400) == (7, 7, 7)
    assert within((6, 3, 30), filling, 400) == (6, 5, 7)
    assert within((2, 1, 3), filling, 400) == (5, 5, 5)
    assert within((2, 1, 30), MemoryView(fails_slots=3000), 400) == (2, 1, 7)
    assert within((2, 1, 30), MemoryView(), 400) == (2, 1, 30)


def test_a_failure_is_kept_over_retries_and_forgotten_when_it_fits_after_all() -> None:
    first: list[Any] = [header(), failure(800), r.End(t_s=1.0, status="retried", step=0)]
    seen = view([*first, header(segment=1), step(1, 0.0, micro=(micro(7, 700),))])
    assert (seen.filling.fits_slots, seen.filling.fails_slots) == (700, 800)
    assert len(seen.filling.failures) == 1
    seen = view([*first, header(segment=1), step(1, 0.0, micro=(micro(8, 800),))])
    assert seen.filling.fails_slots is None


def test_what_would_have_fitted() -> None:
    nothing = would_have_fitted(view([header()]), failure(800))
    assert (nothing.fits, nothing.unknown) == (None, "no smaller micro-batch was computed before it")
    seen = view([header(), step(1, 0.0, micro=(micro(4, 400),))])
    # rows of 100 slots: 4 were computed, 8 failed
    assert would_have_fitted(seen, failure(800)).fits == (4, 4, 7)
    outside = r.OutOfMemory(step=1, t_s=1.0, phase="evaluation", message="out")
    assert would_have_fitted(seen, outside).unknown == "it was not a micro-batch that failed"
    # 10 GiB and 1 MB a slot in 20 GiB, less 4%: 9846 slots of 1,000 a row
    fits = would_have_fitted(
        simulate([100, 300, 700, 1500, 2500]),
        failure(16_000, 16, device_free_bytes=5 * GIB, reserved_bytes=15 * GIB),
    ).fits
    assert fits is not None
    assert fits[0] == math.floor((20 * GIB * 0.96 - FIXED) / SLOPE / 1000) == 9
    assert fits[1] <= 9 <= fits[2] <= 15


def test_the_papers_equation_stands_beside_by_both_readings() -> None:
    """An A40, 2 of 8: 82 x 24.65 / (79 (0.05 + 0.95 / 4)) = 88.9, and 62 x 24.65 / (512 (0.11 + 0.89 / 4)) = 8.9."""
    data = {"queries": 10, "length_values": (79, 512), "length_counts": (6, 4)}
    model = {"kind": "mixtral", "experts": 8, "experts_per_token": 2}
    items: list[Any] = [header(devices=(A40,), model=model, dataset=data)]
    for n in range(1, 20):
        slots = 512 * (1 + n % 4)
        memory = r.Memory(
            allocated_bytes=25 * GIB,
            peak_allocated_bytes=26 * GIB + slots * (1 << 20),
            base_bytes=25 * GIB,
            micro=(r.MicroMemory(26 * GIB + slots * (1 << 20), True, 26 * GIB),),
        )
        items.append(step(n, float(n), micro=(micro(1 + n % 4, slots, slots),), memory=memory))
    lines = memory_room_section(view(items)).lines
    assert any(
        "eq. (1), fitted to another run: 88 as printed (median row of 79 tokens), 8 as its tables need it" in line
        for line in lines
    )
    items[0] = header(devices=(A40,), model={**model, "kind": "llama"}, dataset=data)
    assert not any("eq. (1)" in line for line in memory_room_section(view(items)).lines)
