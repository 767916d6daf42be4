"""The GPU page: what it names, what it says of phases, of limits and of what is not known; one GPU and eight."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_insight import records as r
from ft_insight.run import RunState
from ft_insight.tui.app import WatchApp
from ft_insight.verdict import findings
from tests.tui.made import GIB, encoded, header, wait_for

SIZES = [(80, 24), (120, 40), (160, 48)]
USE = {"data_wait": 2.0, "forward": 60.0, "backward": 85.0, "optimizer": 20.0}
STEP = {"data_wait": 0.3, "forward": 1.6, "backward": 3.4, "optimizer": 0.7}


def use_at(t_s: float) -> float:
    """Return what a GPU does at a moment of a run of steps of 6 s."""
    at = t_s % 6.0
    for name, seconds in STEP.items():
        if at < seconds:
            return USE[name]
        at -= seconds
    return 0.0


def sample(uuid: str, t_s: float, place: int = 0, **changes: object) -> r.GpuSample:
    mean = sum(use_at(t_s - 0.5 + k / 200) for k in range(100)) / 100
    fields: dict[str, object] = {
        "uuid": uuid,
        "gpu_percent": 97.0,
        "sm_percent": mean,
        "sm_occupancy_percent": mean / 3,
        "tensor_percent": mean / 2,
        "dram_percent": mean / 4,
        "counters": "gpm",
        "window_s": (t_s - 0.5, t_s),
        "memory_controller_percent": 44.0,
        "memory_used_bytes": 40 * GIB,
        "memory_total_bytes": 80 * GIB,
        "process_memory_bytes": 38 * GIB,
        "power_w": 300.0 + 4 * mean + place,
        "power_limit_w": 700.0,
        "energy_j": 1000.0 + 600.0 * t_s,
        "temperature_c": 60.0 + place,
        "sm_clock_mhz": 1740.0,
        "memory_clock_mhz": 2619.0,
        "throttle": ("software power cap",) if int(t_s) % 4 == 0 else (),
        "pcie_tx_bytes_per_s": 3.0 * GIB,
        "pcie_rx_bytes_per_s": 5.0 * GIB,
        "ecc_corrected": 3,
        "ecc_uncorrected": 0,
        "xid": (),
        "unknown": {"nvlink_tx_bytes_per_s": "Not Supported", "nvlink_rx_bytes_per_s": "Not Supported"},
    }
    return r.GpuSample(**{**fields, **changes})  # type: ignore[arg-type]


def made_run(gpus: int = 1, steps: int = 30, **changes: object) -> Iterator[r.Record]:
    names = [f"GPU-{n}" for n in range(gpus)]
    yield header(devices=tuple(r.Device(kind="cuda", name="NVIDIA H100 80GB HBM3", index=0, uuid=n) for n in names))
    at = 0.51
    rng = random.Random(0)
    for number in range(1, steps + 1):
        while at < 6.0 * number:
            yield r.Gpu(t_s=at, samples=tuple(sample(n, at, i, **changes) for i, n in enumerate(names)))
            at += 0.5 + rng.uniform(0, 0.004)
        yield r.Step(step=number, t_s=6.0 * (number - 1), wall_s=6.0, phases_s=STEP)


def plain(shown: str) -> str:
    return " ".join(shown.split())


async def page(log: Path, size: tuple[int, int], wanted: str, height: int = 400) -> str:
    """Return all of the page: the screen is made as high as it takes."""
    async with WatchApp(log).run_test(size=(size[0], height)) as pilot:
        await pilot.press("5")
        return plain(await wait_for(pilot, wanted))


@pytest.mark.parametrize("size", SIZES)
async def test_one_gpu(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(encoded(made_run()))
    shown = await page(log, size, "use by phase")
    for part in (
        "5 GPU",
        "GPU 0 NVIDIA H100 80GB HBM3",
        "counters by GPM",
        "this process 38.0 GiB",
        "SM active",
        "DRAM bandwidth",
        "tensor cores",
        "of 700 W",
        "temperature 60 °C",
        "SM clock 1,740 MHz",
        "PCIe out 3.0 GiB/s",
        "NVLink out n/a",
        "utilisation 97%",
        "clocks held down by: software power cap",
        "ECC corrected 0, uncorrected 0; Xid none",  # three before the first sample are none of this run's
        "n/a: NVLink out, NVLink in (Not Supported)",
    ):
        assert part in shown, part
    assert "utilisation (any kernel)" not in shown
    words = shown.split()
    row = words.index("backward", words.index("phase", words.index("[80%")))
    share, mean, interval = words[row + 1 : row + 4]
    assert share == "57%"  # 3.4 of 6 s
    assert int(mean.strip("%")) == pytest.approx(USE["backward"], abs=2)
    low, high = interval.strip("[]").split("-")
    assert int(low) <= USE["backward"] <= int(high)


async def test_without_counters_it_is_called_what_it_is(log: Path) -> None:
    why = "NVML has GPM counters from Hopper on; DCGM: no host engine answers"
    nothing = dict.fromkeys(("sm_percent", "sm_occupancy_percent", "tensor_percent", "dram_percent", "window_s"))
    changes = {**nothing, "counters": None, "unknown": dict.fromkeys(("sm_percent", "dram_percent"), why)}
    log.write_bytes(encoded(made_run(steps=2, **changes)))
    shown = await page(log, (120, 40), "use by phase")
    assert "utilisation (any kernel) 97%" in shown
    assert "memory controller 44%" in shown
    assert "SM active" not in shown.replace("n/a: SM active", "")
    assert "use by phase n/a: too few samples yet" in shown
    assert f"n/a: SM active, DRAM bandwidth ({why})" in shown


@pytest.mark.parametrize("size", SIZES[:2])
async def test_eight_gpus(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(encoded(made_run(gpus=8, steps=6)))
    shown = await page(log, size, "GPU 7 NVIDIA")
    for number in range(8):
        assert f"GPU {number} NVIDIA H100" in shown
        assert f"temperature {60 + number} °C" in shown
    assert shown.count("use by phase") == 8


async def test_at_its_real_size_it_scrolls(log: Path) -> None:
    log.write_bytes(encoded(made_run(gpus=8, steps=4)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await wait_for(pilot, "GPU 0 NVIDIA")
        await pilot.press("end")
        await wait_for(pilot, "n/a: NVLink out")


async def test_a_run_on_a_cpu_shows_its_process(log: Path) -> None:
    notice = r.Notice(t_s=0.1, collector="gpu", text="no GPU: of the machine, only this process is sampled")
    host = r.Gpu(t_s=0.5, host=r.HostSample(cpu_percent=187.5, rss_bytes=3 * GIB))
    log.write_bytes(encoded([header(devices=(r.Device(kind="cpu", name="a CPU"),)), notice, host]))
    shown = await page(log, (80, 24), "the training process")
    assert "no GPU statistics: no GPU: of the machine" in shown
    assert "CPU 188% of one core" in shown
    assert "resident 3.0 GiB" in shown


def test_what_stands_out() -> None:
    def seen(**changes: object) -> list[str]:
        view = RunState().replay(made_run(steps=4, **changes))
        return [f.text for f in findings(view) if f.topic == "gpu"]

    quarter = seen()
    assert len(quarter) == 1
    assert quarter[0].startswith("the power limit held the clocks of GPU 0 down in 2")  # one second in four
    assert seen(throttle=()) == []
    assert seen(throttle=("idle", "clocks set by a user")) == []
    assert seen(throttle=("hardware thermal slowdown",))[0].startswith("heat held the clocks of GPU 0 down in 100%")
    assert any("reported Xid 79" in text for text in seen(throttle=(), xid=(79,)))
    assert seen(throttle=None) == []


def test_a_lost_gpu_keeps_its_last_figures() -> None:
    records = [*made_run(steps=2), r.Gpu(t_s=13.0, samples=(r.GpuSample(uuid="GPU-0", lost=True),))]
    view = RunState().replay(records)
    assert view.gpus[0].lost_at_s == 13.0
    assert view.gpus[0].latest.power_limit_w == 700.0
    told = [f.evidence for f in findings(view) if f.topic == "gpu"]
    assert told[0] == "GPU 0 was lost by its driver 13.0 s into the run"
