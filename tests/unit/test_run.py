"""Every figure of a view, against a small run worked out by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
from makers import A40, CPU, GIB, end, header, micro, step, steps, view

from ft_insight import records as r
from ft_insight.experts import LayerLoad
from ft_insight.ranks import combine
from ft_insight.run import RunState
from ft_insight.run_view import RunView


def parts(shares: Any) -> dict[str, tuple[float, float]]:
    return {p.name: (pytest.approx(p.seconds), pytest.approx(p.share)) for p in shares}


def test_nothing_yet() -> None:
    state = RunState()
    empty = state.view()
    assert empty.header is None
    assert (empty.title, empty.device, empty.step) == ("waiting for a run", "unknown device", 0)
    assert empty.totals.padding_share is None
    assert empty.rates.queries_per_s is None


def test_a_small_run_by_hand() -> None:
    run = [
        header(train={"max_steps": 10}, price_usd_per_hour=3.6, devices=(A40, A40)),
        step(1, 2.0, 8.0, before_s={"startup": 2.0}, self_s=0.08),  # a slow first step
        step(2, 10.0, 2.0, micro=(micro(6, 600, 500), micro(4, 400, 300)), self_s=0.02),
        r.Logs(step=2, t_s=12.0, values={"loss": 2.0}),
        r.Span(kind="evaluation", t_s=12.0, wall_s=3.0, step=2),
        r.Span(kind="evaluation", t_s=15.0, wall_s=1.0, step=2),
        step(3, 16.5, 3.0, before_s={"between": 0.25}, skipped=True),
    ]
    seen = view(run)
    assert seen.step == 3
    assert seen.total_steps == 10
    assert seen.clock_s == seen.elapsed_s == 19.5
    assert seen.totals == type(seen.totals)(3, 30, 3000, 2400, 2400)
    assert seen.totals.padding_share == pytest.approx(0.2)
    # the first step is left out: 20 queries in 5 s
    assert seen.rates.queries_per_s == pytest.approx(4.0)
    assert seen.rates.slots_per_s == pytest.approx(400)
    assert seen.rates.real_tokens_per_s == seen.rates.loss_tokens_per_s == pytest.approx(320)
    assert seen.recent == seen.rates
    assert seen.step_s == 3.0
    assert parts(seen.phases) == {"data_wait": (1.3, 0.1), "forward": (3.9, 0.3), "backward": (7.8, 0.6)}
    assert [p.name for p in seen.phases] == ["data_wait", "forward", "backward"]
    assert seen.ledger_gap == pytest.approx(0)
    assert parts(seen.outside) == {
        "startup": (2.0, 2 / 19.5),
        "evaluation": (4.0, 4 / 19.5),
        "between": (0.25, 0.25 / 19.5),
    }
    # 19.5 - 13 in steps - 6.25 outside
    assert seen.unaccounted_s == pytest.approx(0.25)
    assert seen.mean_evaluation_s == 2.0
    assert seen.mean_save_s is None
    assert seen.accumulation == pytest.approx(4 / 3)
    assert seen.skipped_steps == 1
    assert seen.self_share == pytest.approx(0.1 / 13)
    # (19.5 - 10) / 2 a step with the evaluations in between, 7 steps to go
    assert seen.to_go_s == pytest.approx(7 * 4.75)
    assert seen.usd_so_far == pytest.approx(0.0195)
    assert seen.usd_at_end == pytest.approx((19.5 + 33.25) / 1000)
    assert seen.curves["queries_per_s"] == ((2, 5.0), (3, pytest.approx(10 / 3)))
    assert seen.curves["loss"] == ((2, 2.0),)
    # two micro-batches of step 2 and one of step 3, half a second each
    assert len(seen.micro) == 3
    assert seen.rest_s == (1.0, 2.5)
    assert (seen.title, seen.device) == ("mixtral LoRA", "2x NVIDIA A40")


def test_a_ledger_that_does_not_add_up_says_so() -> None:
    seen = view([header(), step(1, 0, 2.0, phases_s={"forward": 1.5}), step(2, 2, 2.0, phases_s={"forward": 1.7})])
    assert seen.ledger_gap == pytest.approx(3.2 / 4 - 1)


def test_only_the_first_step_is_better_than_nothing() -> None:
    assert view([header(), *steps(1, 2.0)]).rates.queries_per_s == 5.0


@pytest.mark.parametrize(("field", "total"), [("queries", "queries"), ("real", "real_tokens"), ("slots", "slots")])
def test_one_unknown_count_makes_the_sum_unknown_not_too_small(field: str, total: str) -> None:
    odd = step(2, 1.0, micro=(micro(), micro(**{field: None})))
    seen = view([header(), step(1, 0.0), odd, step(3, 2.0)])
    assert getattr(seen.totals, total) is None
    assert getattr(seen.rates, f"{total}_per_s") is None
    assert seen.totals.loss_tokens == (None if field == "real" else 3200)
    assert view([header(), step(1, 0.0, micro=())]).totals.queries is None


def test_unmeasured_own_cost_is_none() -> None:
    assert view([header(), *steps(3)]).self_share is None
    assert view([header(), *steps(3, self_s=0.0)]).self_share == 0.0


def test_curves_stay_bounded_over_50_000_steps() -> None:
    state = RunState()
    state.fold(header())
    for i in range(1, 50_001):
        state.fold(r.Logs(step=i, t_s=float(i), values={"loss": float(i)}))
    for item in steps(5_000):
        state.fold(item)
        state.fold(r.Gpu(t_s=item.t_s, samples=(r.GpuSample(uuid="u", gpu_percent=50.0),)))
    seen = state.view()
    assert all(len(c) <= 513 for c in seen.curves.values())
    assert len(seen.gpus[0].curve("gpu_percent")) <= 513
    assert seen.curves["loss"][-1][0] == 50_000
    assert len(seen.micro) <= 4096


def test_a_resumed_run() -> None:
    first = [
        header(price_usd_per_hour=3600.0),
        *steps(10),
        *(r.Logs(step=i, t_s=i, values={"loss": i}) for i in range(1, 11)),
    ]
    again = [header(segment=1, first_step=6, price_usd_per_hour=3600.0)]
    seen = view(first + again)
    assert seen.step == 6
    assert seen.segments == 2
    assert seen.totals.steps == 0
    assert seen.curves["loss"] == tuple((i, float(i)) for i in range(1, 7))
    assert seen.curves["step_s"][-1][0] == 6
    assert seen.elapsed_s == 10.0
    assert seen.clock_s == 0
    seen = view(first + again + steps(4, 2.0, first=7))
    assert seen.elapsed_s == 18.0
    assert seen.usd_so_far == pytest.approx(18.0)
    assert seen.totals.queries == 40
    assert seen.rates.queries_per_s == 5.0
    assert [x for x, _ in seen.curves["step_s"]] == [2, 3, 4, 5, 6, 8, 9, 10]


def test_a_retry_counts_for_time_alone() -> None:
    failed = [header(), *steps(3), r.Logs(step=1, t_s=0, values={"loss": 9.0}), end(3.0, "retried")]
    seen = view([*failed, header(segment=1, train={"batch": 5}), *steps(2)])
    assert (seen.segments, seen.step, seen.totals.steps, seen.elapsed_s) == (2, 2, 2, 5.0)
    assert "loss" not in seen.curves
    assert [x for x, _ in seen.curves["step_s"]] == [2]
    assert seen.end is None


def test_time_to_go_follows_the_recent_pace() -> None:
    slow_then_fast = [header(train={"max_steps": 100}), *steps(30, 10.0), *steps(20, 1.0, first=31, t_s=300.0)]
    assert view(slow_then_fast).to_go_s == pytest.approx(50.0)
    assert view(slow_then_fast[:2]).to_go_s is None
    assert view([header(), *steps(5)]).to_go_s is None
    assert view([*slow_then_fast, end(320.0)]).to_go_s == 0.0
    assert view([*slow_then_fast, end(320.0, "failed")]).to_go_s is None
    past = view([header(train={"max_steps": 5}), *steps(8)])
    assert past.to_go_s == 0.0


def test_notices_are_said_once_and_kept_over_a_resume() -> None:
    notice = r.Notice(t_s=1.0, collector="gpu", text="no NVML")
    later = dataclasses_replace(notice, t_s=9.0)
    seen = view([header(), notice, later, header(segment=1, first_step=1), later])
    assert seen.notices == (notice,)


def dataclasses_replace(notice: r.Notice, **change: Any) -> r.Notice:
    return r.Notice(**{f: getattr(notice, f) for f in notice.__struct_fields__} | change)


def test_nan_is_told_until_the_same_name_is_finite_again() -> None:
    nan = r.Logs(step=1, t_s=0.0, values={"loss": None, "lr": 0.1}, nonfinite=("loss",))
    evaluation = r.Logs(step=1, t_s=0.0, values={"eval_loss": 1.0})
    fine = r.Logs(step=2, t_s=0.0, values={"loss": 1.0})
    assert view([header(), nan]).nonfinite == ("loss",)
    assert view([header(), nan, nan]).nonfinite == ("loss",)
    assert view([header(), nan, evaluation]).nonfinite == ("loss",)
    assert view([header(), nan, evaluation, fine]).nonfinite == ()
    assert view([header(), nan]).latest_logs == {"loss": None, "lr": 0.1}


def test_a_view_does_not_change_afterwards() -> None:
    state = RunState()
    views, copies = [], []
    story: list[r.Record] = [
        header(),
        *steps(3),
        r.Logs(step=3, t_s=3.0, values={"loss": 1.0}),
        r.Gpu(t_s=1.0, samples=(r.GpuSample(uuid="u", power_w=1.0),)),
        r.Experts(step=3, t_s=3.0, mode="train", layers=("a",), counts=((1, 2),), tokens=(3,)),
        r.Notice(t_s=0.0, collector="c", text="t"),
        *steps(700, first=4, t_s=3.0),
        r.Logs(step=9, t_s=3.0, values={"loss": 3.0, "x": 1.0}),
        r.Gpu(t_s=2.0, samples=(r.GpuSample(uuid="u", power_w=9.0), r.GpuSample(uuid="v"))),
        r.Experts(step=9, t_s=3.0, mode="train", layers=("a",), counts=((5, 5),), tokens=(3,)),
        end(800.0),
        header(segment=1),
    ]
    for record in story:
        now = state.apply(record)
        if len(views) < 12 or not isinstance(record, r.Step):
            views.append(now)
            copies.append(repr(now))
    assert [repr(v) for v in views] == copies
    with pytest.raises(AttributeError):
        views[0].step = 5  # type: ignore[misc]


# ranks


def rank(number: int, world: int = 2, wall_s: float = 1.0, count: int = 3, **said: Any) -> RunView:
    tokens = r.Experts(step=1, t_s=0.0, mode="train", layers=("a",), counts=((number + 1, 1),), tokens=(2,))
    gpu = r.Gpu(t_s=0.0, samples=(r.GpuSample(uuid=f"gpu{number}"),))
    notice = r.Notice(t_s=0.0, collector="c", text="same on all")
    head = header(rank=number, world_size=world, devices=(A40,), **said)
    return view([head, *steps(count, wall_s), tokens, gpu, notice])


def test_ranks_add_up() -> None:
    both = combine([rank(0, data_parallel_size=2), rank(1, wall_s=2.0)])
    assert both.ranks == both.data_ranks == 2
    assert both.totals == type(both.totals)(3, 60, 6000, 4800, 4800)
    assert both.rates.queries_per_s == 15.0
    assert both.experts == (LayerLoad("a", (3, 2), 4),)
    assert [g.latest.uuid for g in both.gpus] == ["gpu0", "gpu1"]
    assert len(both.notices) == 1
    assert both.curves["queries_per_s"] == ((2, 15.0), (3, 15.0))
    assert both.step_s == 1.0
    assert both.device == "2x NVIDIA A40"


def test_ranks_that_share_their_data_count_once() -> None:
    tensor = combine([rank(n, data_parallel_size=1) for n in (0, 1)])
    assert (tensor.ranks, tensor.data_ranks) == (2, 1)
    assert tensor.totals.queries == 30
    assert tensor.rates.queries_per_s == 10.0
    assert tensor.experts == (LayerLoad("a", (1, 1), 2),)
    assert len(tensor.gpus) == 2
    # two by two: ranks 0 and 1 share, ranks 2 and 3 share
    mesh = combine([rank(n, world=4, data_parallel_size=2) for n in range(4)])
    assert mesh.totals.queries == 60
    assert mesh.experts == (LayerLoad("a", (1 + 3, 2), 4),)


def test_a_rank_without_counts_makes_the_sum_unknown() -> None:
    blind = view([header(rank=1, world_size=2), step(1, 0.0, micro=(micro(None),)), step(2, 1.0, micro=(micro(None),))])
    both = combine([rank(0), blind])
    assert both.totals.queries is None
    assert both.rates.queries_per_s is None
    assert both.totals.slots == 5000


def test_ranks_that_are_missing_are_told() -> None:
    assert [n.collector for n in combine([rank(0, world=4), rank(2, world=4)]).notices] == ["c", "ranks"]
    assert "1 of 2 ranks" in combine([rank(0)]).notices[-1].text


def test_curves_of_ranks_are_summed_by_step_not_by_place() -> None:
    # 513 steps and 512: the first has thinned its curve to half already
    ahead, behind = rank(0, count=513), rank(1, count=512)
    assert len(ahead.curves["queries_per_s"]) < len(behind.curves["queries_per_s"])
    both = combine([ahead, behind])
    assert both.curves["queries_per_s"]
    assert {y for _, y in both.curves["queries_per_s"]} == {20.0}
    known = dict(behind.curves["queries_per_s"])
    assert all(x in known for x, _ in both.curves["queries_per_s"])


def test_devices_in_words() -> None:
    assert view([header(devices=(CPU,))]).device == "a CPU"
    assert view([header(devices=(CPU,), world_size=2)]).device == "2x a CPU"
    assert view([header(devices=(A40, CPU))]).device == "NVIDIA A40, a CPU"
    assert view([header(devices=(), train={"method": "qlora", "lora_rank": 16})]).title == "mixtral QLoRA r16"


def test_speed_of_a_replay() -> None:
    memory = r.Memory(allocated_bytes=GIB, peak_allocated_bytes=2 * GIB)
    story: list[r.Record] = [header(train={"max_steps": 20_000})]
    for i in range(1, 10_001):
        story += [step(i, i, memory=memory), r.Logs(step=i, t_s=i, values={"loss": 1.0, "grad_norm": 1.0, "lr": 1.0})]
    begun = time.perf_counter()
    seen = RunState().replay(story)
    print(f"replay of {len(story):,} records: {time.perf_counter() - begun:.3f} s")
    assert seen.totals.steps == 10_000


def test_time_and_money_are_of_all_segments() -> None:
    again = [header(segment=n, first_step=n) for n in (1, 2)]
    seen = view([header(), *steps(4), again[0], *steps(2, first=2), again[1], *steps(3, first=3)])
    assert seen.elapsed_s == 9.0
    assert seen.clock_s == 3.0


def test_idle_time_of_the_device_is_of_steps_that_tell_it() -> None:
    timed = steps(4, wall_s=2.0, clock="cuda", idle_at_most_s=0.5)
    assert view([header(), *timed]).idle_at_most == pytest.approx(0.25)
    assert view([header(), *steps(4)]).idle_at_most is None  # a CPU: not 0, unmeasured
