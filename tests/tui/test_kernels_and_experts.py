"""Kernels by role and the page of experts, with planted records and numbers worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ft_insight import records as r
from ft_insight.tui.app import WatchApp
from tests.tui.made import encoded, experts, header, kernels, role, run, step, wait_for

# 1 s in all: experts 0.7, attention 0.16, optimizer 0.14
HOST = (
    role("experts", "matmul_w1_w3", "forward", 0.1, flops=2e11),
    role("experts", "matmul_w1_w3", "recompute", 0.1, flops=2e11),
    role("experts", "matmul_w1_w3", "backward", 0.2, flops=4e11),
    role("experts", "dequantise", "forward", 0.3, calls=1200),
    role("attention", "attention", "backward", 0.16),
    role("optimizer", "optimizer", "optimizer", 0.14, calls=1),
)
SEEN = {"sm_percent": 80.0, "memory_percent": 40.0}
CUDA = (
    # of peak: (0.1 x 30% + 0.3 x 50%) / 0.4 = 45%; occupancy (0.1 x 90 + 0.3 x 50) / 0.4 = 60; ncu saw one pass
    role(
        "experts",
        "matmul_w2",
        "forward",
        0.1,
        flops=5e12,
        flops_share=0.3,
        bandwidth_share=0.2,
        theoretical_occupancy_percent=90.0,
        **SEEN,
    ),
    role(
        "experts",
        "matmul_w2",
        "backward",
        0.3,
        flops=15e12,
        flops_share=0.5,
        bandwidth_share=0.2,
        theoretical_occupancy_percent=50.0,
    ),
    role("experts", "gather_scatter", "forward", 0.6, theoretical_occupancy_percent=25.0),
)


def _flat(shown: str) -> str:
    return re.sub(r"[\s━╸│]+", " ", shown)


async def test_kernels_on_the_host(log: Path) -> None:
    log.write_bytes(encoded([*run(4), kernels("host", HOST)]))
    async with WatchApp(log).run_test(size=(160, 40)) as pilot:
        await pilot.press("3")
        shown = _flat(await wait_for(pilot, "kernels by role"))
    assert "step 6 · operators on the host, without what they call" in shown
    # 1 of 1.25 s in operators
    assert "recorded 1.25 s under the profiler · in operators 80% · 4 roles · trace run.step6.trace.json" in shown
    assert "part role forward recompute backward other share calls TFLOP/s by part" in shown
    assert "of peak" not in shown
    assert "occupancy" not in shown
    # 8e11 in 0.4 s: 2 TFLOP/s
    assert "experts matmul w1 w3 100 ms 100 ms 200 ms - 40% 30 2.00 experts 70% 700 ms" in shown
    assert "experts dequantise 300 ms - - - 30% 1,200 - attention 16% 160 ms" in shown
    assert "attention attention - - 160 ms - 16% 10 - optimizer 14% 140 ms" in shown
    assert "optimizer optimizer - - - 140 ms 14% 1 -" in shown


async def test_kernels_on_the_device(log: Path) -> None:
    log.write_bytes(encoded([*run(4), kernels("cuda", CUDA, idle_s=0.25)]))
    async with WatchApp(log).run_test(size=(160, 40)) as pilot:
        await pilot.press("3")
        shown = _flat(await wait_for(pilot, "kernels by role"))
    assert "step 6 · kernels on the device" in shown
    assert "device idle 20%, busy 80% · 2 roles" in shown
    assert "by part · experts 100%" in shown
    assert "of of theoretical SM memory" in shown
    assert "share calls TFLOP/s peak bandwidth occupancy (ncu) (ncu)" in shown
    assert "gather scatter 600 ms - - - 60% 10 - - n/a 25% n/a n/a" in shown
    # 20e12 in 0.4 s: 50 TFLOP/s
    assert "matmul w2 100 ms - 300 ms - 40% 20 50.0 45% 20% 60% 80% 40%" in shown
    assert shown.index("gather scatter") < shown.index("matmul w2")


async def test_kernels_on_a_small_screen(log: Path) -> None:
    many = [role("model", f"role_{i:02}", "forward", (40 - i) / 820, calls=i) for i in range(40)]
    log.write_bytes(encoded([*run(4), kernels("cuda", [*CUDA, *many], idle_s=0.25)]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("3")
        shown = await wait_for(pilot, "kernels by role")
        hidden = "of bandwidth, SM (ncu), memory (ncu), theoretical occupancy, other, calls"
        assert f"too narrow for: {hidden}" in _flat(shown)
        assert "matmul w2" in shown
        assert "role 39" not in shown
        await pilot.press("end")
        shown = await wait_for(pilot, "role 39")
        assert "matmul w2" not in shown
        assert re.search(r"part +role +forward +recompute +backward +share +TFLOP/s +peak", shown)
        assert "device idle 20%" in shown


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_reason_for_no_kernels(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(encoded(run(4)))
    async with WatchApp(log).run_test(size=size) as pilot:
        await pilot.press("3")
        await wait_for(pilot, "n/a: off by default; FtInsightCallback(kernels=True) records one step")
        with log.open("ab") as file:
            file.write(encoded([r.Notice(t_s=9, collector="kernels", text="the run ended before step 6", off=True)]))
        shown = await wait_for(pilot, "n/a: the run ended before step 6")
        assert "by default" not in shown
        with log.open("ab") as file:
            file.write(encoded([kernels("host", HOST)]))
        await wait_for(pilot, "matmul w1 w3")


# 1,240 steps: the start ends with step 62, and what is of late begins 62 steps before the last counts
EVEN, UNEVEN = (25, 25, 25, 25), (70, 20, 10, 0)
GROWN = [
    experts(EVEN, EVEN, step=10, queries=10),
    experts(EVEN, UNEVEN, step=1000, queries=10),
]


def _moe(*records: r.Record) -> bytes:
    return encoded([header(), step(1), *records])


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 48)])
async def test_change_of_experts_since_the_start(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(_moe(*GROWN))
    async with WatchApp(log).run_test(size=size) as pilot:
        await pilot.press("4")
        shown = _flat(await wait_for(pilot, "share of tokens"))
        # both records together: (95, 45, 35, 25) of 200, over an even 50
        assert re.search(r"0 1.00 0 0 0 25% +25% 25% 25% 25% ", shown)
        assert re.search(r"▸ 1 1.90 0\.539 0 0 48% +48% 22% 18% 12% ", shown)
        await pilot.press("c")
        shown = _flat(await wait_for(pilot, "change since the start, in points"))
        # of late (70, 20, 10, 0) of 100, at the start 25 each
        assert "-45.0 +45.0 points" in re.sub(r" +", " ", shown)
        assert re.search(r" 0 1.00 → 1.00 - - +0 0 0 0 ", shown)
        assert re.search(r"▸ 1 1.00 → 2.80 0 \+45.0 3 -25.0 +\+45.0 -5.0 -15.0 -25.0 ", shown)
        await pilot.press("c")
        await wait_for(pilot, "share of tokens")


def _pass(mode: str, *layers: tuple[int, ...], step: int) -> r.Experts:
    return msgspec.structs.replace(experts(*layers, step=step, queries=10), mode=mode)


async def test_change_on_the_same_rows_before_and_after(log: Path) -> None:
    # 100 assignments of 10 rows in each pass, which are none of training's, even to the end
    passes = [_pass("before", EVEN, EVEN, step=0), *GROWN[:1], _pass("after", EVEN, (10, 20, 70, 0), step=1240)]
    log.write_bytes(_moe(*passes))
    async with WatchApp(log).run_test(size=(160, 48)) as pilot:
        await pilot.press("4")
        shown = _flat(await wait_for(pilot, "layer 0 · after the run · white mark: before it"))
        assert "the same 10 rows before and after the run" in shown
        # means of the layers: 17.5, 22.5, 47.5, 12.5 of 25 each, over 10 rows; 0.75² + 0.25² + 2.25² + 1.25² by 4
        assert "0 → 1.81" in shown
        await pilot.press("c")
        shown = _flat(await wait_for(pilot, "change since the start, in points"))
        assert re.search(r" 1 1.00 → 2.80 2 \+45.0 3 -25.0 +-15.0 -5.0 \+45.0 -25.0 ", shown)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_one_layer_in_detail(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(_moe(*GROWN))
    async with WatchApp(log).run_test(size=size) as pilot:
        await pilot.press("4")
        shown = await wait_for(pilot, "layer 1 · of late · white mark: at the start")
        flat = _flat(shown)
        assert "expert 0 takes 70% (even 25%) · max/mean 1.00 → 2.80" in flat
        # squares of 0.45, 0.05, 0.15, 0.25: 0.29 / 4, its root over 0.25; 0.8018 nats of 1.3863
        for figure in ("CV 0 → 1.08", "entropy 1.00 → 0.578", "dead 0 → 1"):
            assert figure in flat
        for number, share, change in ((0, "70%", "+45.0"), (1, "20%", "-5.0"), (2, "10%", "-15.0"), (3, "0%", "-25.0")):
            assert re.search(rf"{number} [━╸│]+ +{re.escape(share)} +{re.escape(change)}", shown)
        # the mark stands where a quarter of all is, on a scale that ends at 70%
        line = re.search(r"0 ([━╸│]+) +70%", shown)
        assert line is not None
        assert line[1].index("│") == int(0.25 / 0.7 * len(line[1]))


async def test_keys_choose_the_layer(log: Path) -> None:
    middle = (10, 20, 30, 40)
    log.write_bytes(_moe(experts(EVEN, UNEVEN, middle, step=10)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await wait_for(pilot, "layer 1 ·")
        for key, layer in (
            *(("down", 2), ("j", 2), ("k", 1), ("up", 0), ("up", 0), ("end", 2), ("home", 0)),
            # sorted: 1, 2, 0
            *(("s", 0), ("up", 2), ("k", 1), ("j", 2), ("j", 0)),
        ):
            await pilot.press(key)
            shown = await wait_for(pilot, f"layer {layer} ·")
            assert f"▸ {layer} " in shown


async def test_selection_stays_in_sight(log: Path) -> None:
    log.write_bytes(_moe(experts(*(UNEVEN if i == 3 else EVEN for i in range(80)), step=10)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await wait_for(pilot, lambda shown: "layer 3 ·" in shown and "rows 1 to " in shown)
        await pilot.press("end")
        shown = await wait_for(pilot, "layer 79 ·")
        assert "▸ 79 " in shown
        assert "to 80 of 80" in shown
        await pilot.press("pageup")
        assert "▸ 69 " in await wait_for(pilot, "layer 69 ·")


async def test_nothing_since_the_start(log: Path) -> None:
    log.write_bytes(_moe(GROWN[0]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("4", "c")
        await wait_for(pilot, "nothing since the start yet")


async def test_variance_over_the_run(log: Path) -> None:
    log.write_bytes(_moe(*GROWN))
    # means over layers and 10 queries: 2.5 each; then 4.75, 2.25, 1.75, 1.25, squares 5.0625 + 0.0625 + 0.5625 + 1.5625
    for size, wanted in (((120, 40), "0 → 1.81 · first and"), ((80, 24), "variance 0 → 1.81")):
        async with WatchApp(log).run_test(size=size) as pilot:
            await pilot.press("4")
            shown = await wait_for(pilot, wanted)
            assert ("variance over expert means" in shown) == (size[0] > 80)
            assert bool(re.search(r"10 +1,000", shown)) == (size[0] > 80)


async def test_variance_without_queries(log: Path) -> None:
    log.write_bytes(_moe(experts(EVEN, UNEVEN)))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await wait_for(pilot, "n/a: queries were not counted")


async def test_keys_of_the_experts_fit(log: Path) -> None:
    log.write_bytes(_moe(*GROWN))
    for size, wanted in (((80, 24), "s sort  c diff  ?  q"), ((120, 40), "s sort  c change  p pause  ? help  q quit")):
        async with WatchApp(log).run_test(size=size) as pilot:
            await pilot.press("4")
            shown = await wait_for(pilot, "layers and experts")
            assert wanted in shown
            await pilot.press("3")
            shown = await wait_for(pilot, "kernels by role")
            assert "c " not in shown.splitlines()[-1]
            assert "p pause" in shown
