"""The Cost tab: what-ifs by key, the curve of throughput by batch, and the same figures as ``project`` gives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ft_insight import records as r
from ft_insight.estimate import Ask, measure, project
from ft_insight.estimate.workload import workload_of
from ft_insight.run import RunState
from ft_insight.run_view import RunView
from ft_insight.tui.app import WatchApp
from ft_insight.tui.frame import Frame
from ft_insight.tui.what_if import AS_IT_WAS, Outlook, WhatIf, outlook, turned
from ft_insight.tui.widgets.cost_curve import batch_chart
from ft_insight.tui.widgets.costs import projection_lines, what_if_lines
from ft_insight.words import hours_text, largest_text, usd_text
from tests.tui.made import GIB, encoded, header, step
from tests.tui.test_app import wait_for

FIXED_S, PER_SLOT_S, REST_S = 0.8, 0.001, 0.2


def seconds(slots: float) -> float:
    return math.hypot(FIXED_S, PER_SLOT_S * slots)


def planted(steps: int = 40) -> list[r.Record]:
    """Build an A40's run at batch 4 whose micro-batches take ``hypot(0.8 s, 1 ms x slots)``, and each step 0.2 s."""
    records: list[r.Record] = [
        header(
            devices=(r.Device(kind="cuda", name="NVIDIA A40", memory_bytes=int(44.42 * GIB)),),
            model=r.ModelFacts(
                name="moe",
                experts=8,
                experts_per_token=2,
                parameters=10**9,
                active_parameters=10**9,
                trainable_parameters=10**6,
                layers=4,
            ),
            train=r.TrainFacts(
                trainer="SFTTrainer", method="lora", batch=4, accumulation=1, max_steps=steps, epochs=2.0
            ),
            dataset=r.DatasetFacts(queries=7200, length_values=(100, 500), length_counts=(3600, 3600)),
            price_usd_per_hour=0.5,
        )
    ]
    t_s = 0.0
    for number in range(1, steps + 1):
        slots = 400 * (1 + number % 5)
        micro_s = seconds(slots)
        wall_s = micro_s + REST_S
        micro = r.MicroBatch(4, slots, slots, slots, micro_s)
        phases = {"forward": micro_s / 3, "backward": micro_s * 2 / 3, "other": REST_S}
        records.append(step(number, t_s=t_s, wall_s=wall_s, phases_s=phases, micro=(micro,)))
        t_s += wall_s
    return records


@pytest.fixture(scope="module")
def view() -> RunView:
    return RunState().replay(planted())


@pytest.fixture(scope="module")
def found(view: RunView) -> Outlook:
    return outlook(view, AS_IT_WAS)


def test_as_it_was_is_what_project_says(view: RunView, found: Outlook) -> None:
    asked = Ask(workload_of(view), (), price_here=True)
    own = project(measure(view), asked).rows[0]
    assert found.here is not None
    # the marks depend on what it stands beside
    assert found.here.hours == own.hours
    assert found.here.usd == own.usd
    assert found.refusal is None


def test_the_curve_is_the_planted_one(found: Outlook) -> None:
    """At batch b, half of the rows 100 and half 500 tokens long, the longest is 500 but with probability 2^-b."""
    at = dict(found.curve)
    for batch in (1, 4, 8):
        slots = batch * (500 - 400 * 0.5**batch)
        assert at[float(batch)] == pytest.approx(batch / (seconds(slots) + REST_S), rel=0.01)
    assert all(
        low <= mid <= high for (_, low), (_, mid), (_, high) in zip(found.low, found.curve, found.high, strict=True)
    )
    assert found.present == 4


def test_twice_the_epochs_are_twice_the_hours(view: RunView, found: Outlook) -> None:
    more = outlook(view, WhatIf(epochs=4.0), found.measured)
    assert found.here is not None
    assert more.here is not None
    assert found.here.hours is not None
    assert more.here.hours is not None
    assert more.here.hours[0] == pytest.approx(2 * found.here.hours[0])
    assert more.measured is found.measured  # no fit is made twice


def test_another_gpu_stands_below_the_own_at_the_price_that_is_asked(view: RunView) -> None:
    asked = outlook(view, WhatIf(gpu="H200-SXM", price=2.5))
    assert asked.projection is not None
    own, focus, *others = asked.projection.rows
    assert (own.usd_per_hour, own.here) == (0.5, True)
    assert (focus.gpu, focus.usd_per_hour, focus.price_source) == ("H200-SXM", 2.5, "as given")
    assert {row.price_source for row in others}.isdisjoint({"as given"})


def test_a_price_without_a_gpu_is_of_the_own_machine(view: RunView) -> None:
    asked = outlook(view, WhatIf(price=9.0))
    assert asked.here is not None
    assert asked.here.usd_per_hour == 9.0
    own = outlook(view, WhatIf(gpu="A40", price=9.0)).here
    assert own is not None
    assert own.usd_per_hour == 9.0


def test_keys_step_through_their_values(found: Outlook) -> None:
    assert turned(AS_IT_WAS, "epochs", 1, found).epochs == 3  # the run has 2
    assert turned(WhatIf(epochs=7.0), "epochs", -1, found).epochs == 6
    assert found.projection is not None
    # what max_steps asks for is not num_train_epochs
    longer = replace(found, projection=structs.replace(found.projection, epochs=99.2))
    assert turned(AS_IT_WAS, "epochs", 1, longer).epochs == 100
    assert turned(AS_IT_WAS, "batch", 1, found).batch == 5
    assert turned(WhatIf(batch=1), "batch", -1, found).batch == 1
    assert turned(AS_IT_WAS, "top_k", 1, found).top_k == 3
    assert turned(WhatIf(top_k=8), "top_k", 1, found).top_k == 8
    assert turned(AS_IT_WAS, "price", 1, found).price == 0.55
    assert turned(WhatIf(price=0.55), "price", -1, found).price == 0.5
    assert turned(WhatIf(price=0.02), "price", 1, found).price == 0.03  # a tenth of it would be rounded away
    assert turned(WhatIf(price=0.05), "price", -1, found).price == 0.04
    assert turned(WhatIf(price=0.01), "price", -1, found).price == 0.01
    first = turned(AS_IT_WAS, "gpu", 1, found)
    assert first.gpu is not None
    assert turned(first, "gpu", -1, found).gpu is None
    assert turned(replace(first, price=3.0), "gpu", 1, found).price is None  # it was the other card's


def test_no_curve_of_another_top_k(view: RunView) -> None:
    """The fitted time of a micro-batch is that of the run's own number of experts per token."""
    assert outlook(view, WhatIf(top_k=2)).curve
    assert not outlook(view, WhatIf(top_k=4)).curve


def test_top_k_is_asked_only_of_a_model_with_experts(view: RunView) -> None:
    dense = RunState().replay([header(model=r.ModelFacts(name="dense"))])
    texts = [" ".join(line.plain for line in what_if_lines(Frame(view=each), 80)) for each in (view, dense)]
    assert ["t top-k" in text for text in texts] == [True, False]


def test_every_width_shows_every_figure(view: RunView, found: Outlook) -> None:
    assert found.projection is not None
    rows = tuple(structs.replace(row, gpus=8) for row in found.projection.rows)
    frame = Frame(view=view, outlook=replace(found, projection=structs.replace(found.projection, rows=rows)))
    for width in (58, 78, 116, 196):
        lines = [line.plain for line in projection_lines(frame, width, 40)]
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        for row in rows:
            assert f"8x {row.gpu}" in text
            for figure in (hours_text(row.hours), usd_text(row.usd), largest_text(row)):
                assert figure in text
        assert text.count("largest batch") == 1


def test_a_largest_batch_beyond_the_axis_is_not_told_as_drawn(view: RunView, found: Outlook) -> None:
    assert found.projection is not None
    last = max(x for x, _ in found.curve)
    for largest, sign in ((int(last), "│"), (int(last) + 1, "→")):
        rows = tuple(structs.replace(r, largest_batch=largest) if r.here else r for r in found.projection.rows)
        shown = replace(found, projection=structs.replace(found.projection, rows=rows))
        assert f"{sign} largest {largest}" in batch_chart(Frame(view=view, outlook=shown), 120, 20)[0].plain


def test_nothing_is_known_before_the_first_step() -> None:
    assert outlook(RunState().replay([header()]), AS_IT_WAS).refusal == "there is no finished step yet"
    assert turned(AS_IT_WAS, "top_k", 1, None) == AS_IT_WAS


async def test_keys_ask_and_0_takes_it_back(log: Path) -> None:
    log.write_bytes(encoded(planted()))
    async with WatchApp(log).run_test(size=(130, 44)) as pilot:
        await wait_for(pilot, "throughput")
        await pilot.press("7")
        shown = await wait_for(pilot, "throughput by batch")
        assert "7,200 rows x 2 epochs" in shown
        assert "present batch 4" in shown
        await pilot.press("e", "g", "b")
        shown = await wait_for(pilot, "7,200 rows x 3 epochs")
        assert "e epochs 3" in shown
        assert "b batch 5" in shown
        assert "g GPU A10 " in shown
        await pilot.press("0")
        await wait_for(pilot, "7,200 rows x 2 epochs")


async def test_a_live_run_has_an_outlook_too(log: Path) -> None:
    records = planted()
    log.write_bytes(encoded(records[:20]))
    async with WatchApp(log).run_test(size=(80, 24)) as pilot:
        await wait_for(pilot, "throughput")
        await pilot.press("7")
        await wait_for(pilot, "the whole job · 7,200 rows x 2 epochs")


async def test_what_cannot_be_told_has_its_reason(log: Path) -> None:
    records = planted(6)
    records[0] = header(dataset=r.DatasetFacts(), train=r.TrainFacts(trainer="Trainer", method="full"))
    log.write_bytes(encoded(records))
    async with WatchApp(log).run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, "throughput")
        await pilot.press("7")
        await wait_for(pilot, "the run does not say how many rows its training set has")
