"""The real app under Textual's pilot, on logs that grow, end, break and lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ft_insight import records as r
from ft_insight.runlog import LogWriter
from ft_insight.tui.app import WatchApp
from tests.tui.made import encoded, experts, gpu, header, logs, run, step, wait_for

SIZES = [(80, 24), (120, 40), (160, 48)]


@pytest.mark.parametrize("size", SIZES)
async def test_overview_shows_the_numbers(log: Path, size: tuple[int, int]) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=size) as pilot:
        shown = await wait_for(pilot, "● live")
    # 40 steps of 2 s, each 2 x 4 queries and 2 x 750 of 2 x 1,000 slots; 3.6 $/h; 1,200 steps left
    assert "tiny-moe QLoRA r16 · NVIDIA A40" in shown
    assert "step 40 / 1,240 · 1:2" in shown
    assert "40:00 to go · $0.08 of $2.48" in shown
    assert "step 2.00 s · median of the last 20" in shown
    assert "forward 25%" in shown
    for name, share, per_step in (
        ("data wait", "1.0%", "20.0 ms"),
        ("forward", "25%", "500 ms"),
        ("loss", "4.0%", "80.0 ms"),
        ("backward", "60%", "1.20 s"),
        ("optimizer", "5.0%", "100 ms"),
    ):
        assert f"■ {name} {share} {per_step}" in " ".join(shown.split())
    assert "queries/s 4.00 now, 4.00 mean" in shown
    assert "tokens/s 750 · slots/s 1,000 · padding 25% of slots" in shown
    assert "loss 1.50 · " in shown
    assert "eval 1.25" in shown
    assert "grad norm 0.750 · lr 0.000200" in shown
    assert "40.0 GiB of 45.0 GiB" in shown
    assert "271 of 300 W" in shown
    assert "62 °C" in shown
    assert "torch peak 12.0 GiB · reserved 14.0 GiB" in shown
    # 140 of 200 assignments, over an even 1/4
    assert "layer 1, least even of 2" in shown
    assert "expert 0 takes 70% (even 25%) · max/mean 2.80" in shown


async def test_growth_shows_up(log: Path) -> None:
    async with WatchApp(log).run_test(size=(100, 30)) as pilot:
        shown = await wait_for(pilot, "waiting for")
        assert "run.jsonl" in shown
        began = time.monotonic()
        writer = LogWriter(log, clock=lambda: time.monotonic() - began)
        writer.put(header())
        writer.flush()
        await wait_for(pilot, "no step yet")
        for number in (1, 2, 3):
            writer.put(step(number))
        writer.flush()
        await wait_for(pilot, "step 3 / 1,240")
        writer.put(step(4))
        writer.put(logs(4, loss=0.125))
        writer.flush()
        shown = await wait_for(pilot, "step 4 / 1,240")
        assert "loss 0.125" in shown
        writer.put(r.End(t_s=8.0, status="completed", step=4))
        writer.close()
        await wait_for(pilot, "✔ completed")


def _seconds(shown: str) -> int:
    return int(re.findall(r"1:(\d\d) elapsed", shown)[0])


async def test_elapsed_time_goes_on_between_records(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        shown = await wait_for(pilot, "elapsed")
        first = _seconds(shown)
        assert first >= 20
        await wait_for(pilot, lambda shown: _seconds(shown) >= first + 2)


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        (r.End(t_s=81, status="completed", step=40), "✔ completed"),
        (
            r.End(t_s=81, status="failed", step=40, reason="CUDA out\x1b[2J of memory"),
            "▲ failed: CUDA out[2J of",
        ),
        (r.End(t_s=81, status="interrupted", step=40), "▲ interrupted"),
    ],
)
async def test_finished_runs(log: Path, end: r.End, wanted: str) -> None:
    log.write_bytes(encoded([*run(40), end]))
    async with WatchApp(log).run_test(size=(100, 30)) as pilot:
        shown = await wait_for(pilot, wanted)
        assert "to go" not in shown


async def test_dead_writer(log: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    log.write_bytes(encoded(run(7, pid=child.pid)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "▲ stopped without an end record, after step 7")


async def test_silent_writer(log: Path) -> None:
    log.write_bytes(encoded(run(7)))
    os.utime(log, (time.time() - 40, time.time() - 40))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "▲ silent for 4")


async def test_truncated_and_replaced_log(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "step 40 / 1,240")
        log.write_bytes(encoded(run(3)))
        await wait_for(pilot, "step 3 / 1,240")
        fresh = log.with_suffix(".new")
        fresh.write_bytes(encoded(run(50, model=r.ModelFacts(name="other-model"))))
        fresh.replace(log)
        shown = await wait_for(pilot, "step 50 / 1,240")
        assert "other-model" in shown


async def test_pause_freezes_and_catches_up(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "step 40 /")
        await pilot.press("p")
        await wait_for(pilot, "paused")
        with log.open("ab") as file:
            file.write(encoded([step(41)]))
        await pilot.pause(1.5)
        shown = await wait_for(pilot, "paused")
        assert "step 40 /" in shown
        await pilot.press("p")
        shown = await wait_for(pilot, "step 41 /")
        assert "paused" not in shown


async def test_every_tab_by_key(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    wanted = ("throughput", "phases of a step", "layers and experts", "torch peak reserved", "the whole job")
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "step 40 /")
        for key, text in zip("12345", wanted, strict=True):
            await pilot.press(key)
            await wait_for(pilot, text)
        await pilot.press("right")
        await wait_for(pilot, wanted[0])
        await pilot.press("left")
        await wait_for(pilot, wanted[4])
        await pilot.press("tab", "tab")
        await wait_for(pilot, wanted[1])
        await pilot.click("#key-experts")
        await wait_for(pilot, wanted[2])


async def test_time_tab(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        shown = " ".join((await wait_for(pilot, "outside of steps")).split())
    # 1 s of startup in a segment of 80 s, overlapping the steps; 2 ms of each 2 s step is ft-insight's
    assert "■ backward 1.20 s 60% 1.20 s 60%" in shown
    assert "startup 1.00 s 1.2%" in shown or "startup 1.00 s 1.3%" in shown
    assert "a step 2.00 s 2.00 s" in shown
    assert "ledger gap 0% · ft-insight itself 0.1%" in shown or "ledger gap <0.1%" in shown
    assert "unaccounted -1.00 s" in shown


async def test_sorting_the_experts(log: Path) -> None:
    log.write_bytes(encoded([*run(2), experts((0, 0, 0, 1), (1, 1, 1, 1))]))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        shown = await wait_for(pilot, "in the model's order")
        rows = [line.split()[1] for line in shown.splitlines() if line[:4] in ("│ 0 ", "│ 1 ")]
        assert rows == ["0", "1"]
        await pilot.press("s")
        shown = await wait_for(pilot, "most uneven first")
        rows = [line.split()[1] for line in shown.splitlines() if line[:4] in ("│ 0 ", "│ 1 ")]
        assert rows == ["1", "0"]


async def test_help_opens_and_closes(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "step 40 /")
        await pilot.press("question_mark")
        shown = await wait_for(pilot, "not measured")
        assert "leave; the run is not touched" in shown
        await pilot.press("2")
        await pilot.press("escape")
        await wait_for(pilot, lambda shown: "not measured" not in shown and "throughput" in shown)


async def test_projection_and_fit(log: Path) -> None:
    rows = (
        r.ProjectionRow(
            gpu="H100-SXM 80GB",
            memory_gb=80,
            largest_batch=17,
            queries_per_s=(4.9, 4.3, 5.5),
            hours=(8.5, 7.6, 9.6),
            usd=(17.9, 16.0, 20.0),
            usd_per_hour=2.1,
            price_source="bundled",
        ),
        r.ProjectionRow(gpu="B200", unknown={"hours": "no measured peak of [this] card"}),
    )
    fit = r.Fit(t_s=80, identifiable=True, exponent=2, fixed_s=0.6, per_slot_s=0.0009, rest_s=0.05, error=0.024)
    log.write_bytes(encoded([*run(40), fit, r.Projection(t_s=80, queries=15000, epochs=10, rows=rows)]))
    for size in ((80, 48), (120, 40)):
        async with WatchApp(log).run_test(size=size) as pilot:
            await pilot.press("5")
            shown = " ".join((await wait_for(pilot, "H100-SXM 80GB")).split())
        assert "the whole job · 15,000 rows x 10 epochs" in shown
        assert "4.90 [4.30-5.50] 8.5 h [7.60-9.60]" in shown
        assert "$17.90 [16.0-20.0]" in shown
        assert "B200 hours n/a: no measured peak of [this] card" in shown
        assert "fixed 600 ms" in shown
        assert "median error 2.4%" in shown


async def test_cost_before_the_end(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("5")
        await wait_for(pilot, "comes at the end of the run; or: ft-insight project RUN")


async def test_loss_that_is_not_finite(log: Path) -> None:
    log.write_bytes(encoded([*run(40), logs(41, loss=float("nan"), grad_norm=float("inf"))]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        shown = await wait_for(pilot, "loss NaN/inf")
        assert "grad norm NaN/inf" in shown


async def test_missing_gpu_and_dense_model(log: Path) -> None:
    records: list[r.Record] = [
        header(
            model=r.ModelFacts(name="dense"),
            devices=(r.Device(kind="cpu", name="EPYC"),),
            price_usd_per_hour=None,
        ),
        r.Notice(t_s=0, collector="gpu", text="no NVIDIA driver", off=True),
        step(1, memory=r.Memory(rss_bytes=3 * 1024**3), micro=(r.MicroBatch(4, None, None, None, 1.0),)),
        step(2, memory=r.Memory(rss_bytes=3 * 1024**3), micro=(r.MicroBatch(4, None, None, None, 1.0),)),
    ]
    log.write_bytes(encoded(records))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        shown = await wait_for(pilot, "step 2 /")
        assert "memory of the process 3.0 GiB RSS" in shown
        assert "no GPU statistics: no NVIDIA driver" in shown
        assert "n/a: no MoE layer" in shown
        assert "tokens/s n/a · slots/s n/a · padding n/a" in shown
        assert "loss n/a · eval n/a" in shown
        assert "$" not in shown
        await pilot.press("4")
        await wait_for(pilot, "no GPU statistics: no NVIDIA driver")
        await pilot.press("5")
        await wait_for(pilot, "so far n/a")


async def test_unmeasured_gpu_figures(log: Path) -> None:
    log.write_bytes(encoded([*run(40), gpu(81, power_w=None, gpu_percent=None, temperature_c=None)]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        shown = await wait_for(pilot, "GPU 0 NVIDIA A40 · util n/a · SM n/a · power n/a")
        assert "0 W" not in shown


@pytest.mark.parametrize("size", SIZES)
async def test_hostile_text_is_literal(log: Path, size: tuple[int, int]) -> None:
    evil = "[red]x[/] [/b] \x1b[31mESC\x1b]0;t\x07\n\ttab\u202e [@click=app.quit]go[/] " + "long" * 300
    records = [
        *run(40, model=r.ModelFacts(name=evil), devices=(r.Device(kind="cuda", name=evil, uuid="GPU-1"),)),
        r.Notice(t_s=1, collector="[/]", text=evil, off=True),
        step(41, phases_s={"[/x]": 1.0, "forward": 1.0}),
        r.Span(kind="[bold]span[/", t_s=83, wall_s=1.0, step=41),
        logs(41, **{"eval_[/]_loss": 1.0, evil: 2.0}),
        r.Experts(step=41, t_s=84.0, mode="train", layers=(evil,), counts=((9, 0),), tokens=(9,), method=evil),
        r.Fit(t_s=84, identifiable=False, reason=evil),
        r.Projection(t_s=84, job=evil, rows=(r.ProjectionRow(gpu=evil, here=True, unknown={evil: evil}),)),
        r.End(t_s=85, status="failed", step=41, reason=evil),
    ]
    log.write_bytes(encoded(records))
    app = WatchApp(log)
    async with app.run_test(size=size) as pilot:
        shown = await wait_for(pilot, "failed: [red]x")
        assert "[red]x[/] [/b] [31mESC]0;t tab" in shown
        for key in ("1", "2", "3", "s", "4", "5", "n", "escape", "question_mark", "escape"):
            await pilot.press(key)
            await pilot.pause(0.1)
            shown = await wait_for(pilot, lambda _: True)
            assert not any(ord(c) < 32 and c != "\n" for c in shown)
            assert "\u202e" not in shown
    assert app.return_value is None


async def test_many_experts_and_gpus(log: Path) -> None:
    many = tuple(r.GpuSample(uuid=f"GPU-{i}", gpu_percent=50.0 + i) for i in range(8))
    wide = tuple(1000 if e == 200 else 10 for e in range(256))
    log.write_bytes(encoded([*run(2), r.Gpu(t_s=4, samples=many), experts(*((wide,) * 60))]))
    for size in SIZES:
        async with WatchApp(log).run_test(size=size) as pilot:
            await wait_for(pilot, "step 2 /")
            for key in "12345":
                await pilot.press(key)
                await pilot.pause(0.05)


async def test_leaving_when_over(log: Path) -> None:
    log.write_bytes(encoded([*run(4), r.End(t_s=9, status="completed", step=4)]))
    app = WatchApp(log, until=lambda: False)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "completed")
        began = time.monotonic()
        while app.is_running and time.monotonic() - began < 6:
            await pilot.pause(0.1)
        assert not app.is_running
    assert app.return_value is None


async def test_q_leaves(log: Path) -> None:
    log.write_bytes(encoded(run(4)))
    app = WatchApp(log)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "step 4 /")
        await pilot.press("question_mark", "q")
        for _ in range(100):
            await pilot.pause(0.05)
            if not app.is_running:
                break
        assert not app.is_running


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"just some text\n", "is not an ft-insight run log"),
        (b'{"type":"header","schema":99}\n', "has schema 99"),
    ],
)
async def test_not_a_log(log: Path, content: bytes, wanted: str) -> None:
    log.write_bytes(content)
    app = WatchApp(log)
    async with app.run_test(size=(80, 24)) as pilot:
        for _ in range(200):
            await pilot.pause(0.05)
            if app.return_value:
                break
    assert app.return_value is not None
    assert wanted in app.return_value
    assert "\n" not in app.return_value


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, ft_insight.tui.app; heavy = {'torch', 'transformers', 'ft_insight.callbacks'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
