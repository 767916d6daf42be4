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
from ft_insight.experts import LayerLoad
from ft_insight.runlog import LogWriter
from ft_insight.tui.app import WatchApp
from ft_insight.tui.widgets.chrome import HeaderBar
from tests.tui.made import MOE_LAYERS, encoded, experts, gpu, header, layers, logs, run, step, wait_for

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
        await wait_for(pilot, "silent for 4")


async def test_news_that_arrives_while_the_app_is_left(log: Path) -> None:
    log.write_bytes(encoded(run(7)))
    app = WatchApp(log)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "step 7 / 1,240")
        newest = app._newest
        assert newest is not None
        await app.query_one(HeaderBar).remove()  # as its widgets go, one by one
        app.post_message(WatchApp.Read(newest))
        await pilot.pause(0.1)
        assert app.is_running
    assert not app.return_code


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
    wanted = (
        "throughput",
        "phases of a step",
        "n/a: off by default; FtInsightCallback(kernels=True) records one step",
        "layers and experts",
        "use by phase n/a: no sample lies within a step yet",
        "what fills memory",
        "the whole job",
    )
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "step 40 /")
        for key, text in zip("1234567", wanted, strict=True):
            await pilot.press(key)
            await wait_for(pilot, text)
        await pilot.press("right")
        await wait_for(pilot, wanted[0])
        await pilot.press("left")
        await wait_for(pilot, wanted[6])
        await pilot.press("tab", "tab")
        await wait_for(pilot, wanted[1])
        await pilot.click("#key-experts")
        await wait_for(pilot, wanted[3])


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
        await pilot.press("4")
        shown = await wait_for(pilot, "in the model's order")
        rows = re.findall(r"^│ [▸ ] ([01]) ", shown, re.MULTILINE)
        assert rows == ["0", "1"]
        await pilot.press("s")
        shown = await wait_for(pilot, "most uneven first")
        rows = re.findall(r"^│ [▸ ] ([01]) ", shown, re.MULTILINE)
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
            await pilot.press("7")
            shown = " ".join((await wait_for(pilot, "H100-SXM 80GB")).split())
        assert "the whole job · 15,000 rows x 10 epochs" in shown
        assert "4.90 [4.30-5.50] 8.50 h [7.60-9.60]" in shown
        assert "$17.90 [$16.00-$20.00]" in shown
        assert "n/a: hours on B200: no measured peak of [this] card" in shown
        assert "fixed 600 ms" in shown
        assert "median error 2.4%" in shown


async def test_reasons_are_said_once(log: Path) -> None:
    why = {"largest_batch": "no GPU memory was measured", "queries_per_s": "no fit"}
    rows = tuple(r.ProjectionRow(gpu=name, unknown=why) for name in ("A40", "L40S", "B200"))
    log.write_bytes(encoded([*run(4), r.Projection(t_s=80, queries=15000, epochs=10, rows=rows)]))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await pilot.press("7")
        shown = await wait_for(pilot, "n/a: largest batch: no GPU memory was measured")
        assert shown.count("was measured") == 1
        assert "n/a: throughput: no fit" in shown
        assert "_" not in shown


# MoE 0.4 of 0.8 s, experts 0.37, router 0.03, attention 0.2, head and loss 0.16, norms 0.04
KINDS = (
    ("MoE", "50%", "400 ms"),
    ("experts", "46%", "370 ms"),
    ("router", "3.8%", "30.0 ms"),
    ("attention", "25%", "200 ms"),
    ("head and loss", "20%", "160 ms"),
    ("norms", "5.0%", "40.0 ms"),
)


@pytest.mark.parametrize("size", [(120, 40), (160, 48), (80, 48)])
@pytest.mark.parametrize("on_gpu", [True, False])
async def test_layers_on_the_overview(log: Path, size: tuple[int, int], on_gpu: bool) -> None:
    records = [*run(40), layers(3, MOE_LAYERS), layers(20, MOE_LAYERS)]
    log.write_bytes(encoded(x for x in records if on_gpu or not isinstance(x, r.Gpu)))
    async with WatchApp(log).run_test(size=size) as pilot:
        shown = await wait_for(pilot, lambda shown: all(" ".join(k) in " ".join(shown.split()) for k in KINDS))
        shown = " ".join(shown.split())
        assert "time per kind of layer · 2 sampled steps, per micro-batch" in shown or (
            "layers · 2 steps, per micro-batch" in shown
        )
        assert "expert 0 takes 70% (even 25%)" in shown
        if not on_gpu:
            gpu_panel, layer_panel = pilot.app.query_one(".gpu"), pilot.app.query_one("#overview .layers")
            assert gpu_panel.region.height <= 6
            assert layer_panel.region.height >= 8


async def test_layers_in_one_line_on_a_small_screen(log: Path) -> None:
    log.write_bytes(encoded([*run(40), layers(3, MOE_LAYERS)]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        shown = await wait_for(pilot, "layers  MoE 50%  attention 25%  head and loss 20%  norms 5.0%")
        assert "GPU 0 NVIDIA A40 · util 91%" in shown
        assert "expert 0 takes 70%" in shown
        assert "padding fills 25%" in shown


async def test_layers_appear_while_watching(log: Path) -> None:
    records = [header(model=r.ModelFacts(name="dense")), step(1), step(2)]
    log.write_bytes(encoded(records))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "from the third step on")
        dense = {(0, "mlp"): (0.1, 0.0, 0.2), (0, "attention"): (0.03, 0.0, 0.07)}
        with log.open("ab") as file:
            file.write(encoded([step(3), layers(3, dense, micro=1)]))
        # with neither GPU nor experts the panel is laid out anew, across both columns: a frame later than its text
        wanted = ("1 sampled step, per micro-batch", "MLP 75% 300 ms", "attention 25% 100 ms")
        shown = await wait_for(pilot, lambda shown: all(w in " ".join(shown.split()) for w in wanted))
        assert "third step" not in shown


async def test_reason_for_no_layers(log: Path) -> None:
    off = r.Notice(t_s=0, collector="layers", text="no list of decoder layers", off=True)
    log.write_bytes(encoded([*run(40), off]))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "n/a: no list of decoder layers")
        await pilot.press("2")
        await wait_for(pilot, "n/a: no list of decoder layers")


async def test_layers_on_the_time_tab(log: Path) -> None:
    log.write_bytes(encoded([*run(40), layers(3, MOE_LAYERS)]))
    async with WatchApp(log).run_test(size=(120, 48)) as pilot:
        await pilot.press("2")
        shown = " ".join((await wait_for(pilot, "decoder layers")).split())
    # forward, recomputation and backward of two micro-batches, halved
    assert "MoE 108 ms 87.5 ms 205 ms 400 ms 50%" in shown
    assert "experts 100 ms 80.0 ms 190 ms 370 ms 46%" in shown
    assert "router 7.50 ms 7.50 ms 15.0 ms 30.0 ms 3.8%" in shown
    assert "attention 50.0 ms 50.0 ms 100 ms 200 ms 25%" in shown
    assert "head and loss 50.0 ms 0 s 110 ms 160 ms 20%" in shown
    assert "post-attention norm 5.00 ms 5.00 ms 10.0 ms 20.0 ms 2.5%" in shown
    assert "a micro-batch 218 ms 147 ms 435 ms 800 ms" in shown or "a micro-batch 218 ms 148 ms 435 ms" in shown
    # layer 0: (0.2 + 0.18 + 0.02) / 2; layer 1: (0.2 + 0.04 + 0.04 + 0.56 + 0.04) / 2
    assert "slowest layer 1 440 ms · mean 320 ms" in shown
    assert re.search(r"0 ━+ 200 ms", shown)
    assert re.search(r"1 ━+ 440 ms ◂", shown)


async def test_many_decoder_layers(log: Path) -> None:
    times = {(i, "mlp"): (0.1 if i != 33 else 0.3, 0.0, 0.1) for i in range(80)}
    log.write_bytes(encoded([*run(4), layers(3, times, micro=1)]))
    async with WatchApp(log).run_test(size=(120, 48)) as pilot:
        await pilot.press("2")
        # 79 of 0.2 s and one of 0.4 s
        shown = await wait_for(pilot, "slowest layer 33 400 ms · mean 202 ms")
        assert "layers 0 to 79, each column the slowest of 2" in shown


async def test_long_name_of_a_layer_leaves_the_finding(log: Path) -> None:
    name = "base_model.model." + "model.wrapped." * 20 + "layers.2.mlp.gate"
    counted = r.Experts(step=10, t_s=20.0, mode="train", layers=(name,), counts=((140, 20, 20, 20),), tokens=(100,))
    log.write_bytes(encoded([*(x for x in run(40) if not isinstance(x, r.Experts)), counted]))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "layers.2.mlp.gate: expert 0 takes 70% of tokens")


async def test_cost_before_the_end(log: Path) -> None:
    log.write_bytes(encoded(run(40)))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await pilot.press("7")
        # every step the same: what is known is the rate, and that no more is
        shown = await wait_for(pilot, "the whole job · 100 rows x 99.2 epochs; 1,240 steps as set by max_steps")
        assert "4.00 measured" in shown


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
        await pilot.press("5")
        await wait_for(pilot, "no GPU statistics: no NVIDIA driver")
        await pilot.press("7")
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
        r.Experts(step=900, t_s=84.0, mode="train", layers=(evil,), counts=((0, 9),), tokens=(9,), queries=3),
        r.Kernels(
            step=41,
            t_s=84.0,
            clock=evil,
            window_s=0.0,
            busy_s=0.0,
            roles=(r.KernelRole(kind=evil, role=evil, pass_name=evil, seconds=1.0, share=1.0, calls=1),),
            trace=evil,
        ),
        layers(41, {(0, evil): (1.0, 0.0, 1.0), (-5, "[/]"): (0.0, 0.0, 0.0)}),
        r.Notice(t_s=1, collector="layers", text=evil),
        r.Fit(t_s=84, identifiable=False, reason=evil),
        r.Projection(t_s=84, job=evil, rows=(r.ProjectionRow(gpu=evil, here=True, unknown={evil: evil}),)),
        r.End(t_s=85, status="failed", step=41, reason=evil),
    ]
    log.write_bytes(encoded(records))
    app = WatchApp(log)
    async with app.run_test(size=size) as pilot:
        shown = await wait_for(pilot, "failed: [red]x")
        assert "[red]x[/] [/b] [31mESC]0;t tab" in shown
        for key in ("1", "2", "3", "4", "s", "c", "down", "5", "6", "n", "escape", "question_mark", "escape"):
            await pilot.press(key)
            await pilot.pause(0.1)
            shown = await wait_for(pilot, lambda _: True)
            assert not any(ord(c) < 32 and c != "\n" for c in shown)
            assert "\u202e" not in shown
    assert app.return_value is None


async def test_many_experts_and_gpus(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 layers of 256 experts and 8 GPUs on every tab, without working out one layer's shares again and again."""
    drawn, shares = [0], LayerLoad.shares.fget

    def counting(load: LayerLoad) -> tuple[float, ...]:
        drawn[0] += 1
        return shares(load)

    monkeypatch.setattr(LayerLoad, "shares", property(counting))
    many = tuple(r.GpuSample(uuid=f"GPU-{i}", gpu_percent=50.0 + i) for i in range(8))
    wide = tuple(1000 if e == 200 else 10 for e in range(256))
    log.write_bytes(encoded([*run(2), r.Gpu(t_s=4, samples=many), experts(*((wide,) * 60))]))
    for size in SIZES:
        async with WatchApp(log).run_test(size=size) as pilot:
            await wait_for(pilot, "step 2 /")
            for key in ("1", "2", "3", "4", "c", "s", "end", "5", "6"):
                before = drawn[0]
                await pilot.press(key)
                await pilot.pause(0.05)
                # a redraw looks at each of 60 layers a few times, and a key or the clock redraws some panels
                assert drawn[0] - before < 60 * 60


async def test_leaving_when_over(log: Path) -> None:
    log.write_bytes(encoded([*run(4), r.End(t_s=9, status="completed", step=4)]))
    app = WatchApp(log, until=lambda: False)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "completed")
        for _ in range(300):
            await pilot.pause(0.1)
            if not app.is_running:
                break
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
