"""Use of the GPU by phase, on runs whose use at every millisecond is planted.

The run is drawn millisecond by millisecond and the samples are means over that drawing, so nothing here knows how
``gpu_phases`` lays a step out or solves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ft_insight import records as r
from ft_insight.gpu_phases import MOST_BLOCKS, GpuPhases, PhaseUse

USE = {"data_wait": 2.0, "forward": 60.0, "loss": 35.0, "backward": 85.0, "optimizer": 20.0, "other": 5.0}
GAP = 10.0


@dataclass
class Drawn:
    """A run at every millisecond, as the device lived it, and as the log tells it."""

    lag_s: float = 0.0
    use: list[float] = field(default_factory=list)
    steps: list[r.Step] = field(default_factory=list)
    spans: list[r.Span] = field(default_factory=list)

    def draw(self, part_use: float, seconds: float) -> float:
        self.use += [part_use] * round(seconds * 1000)
        return round(seconds * 1000) / 1000

    def step(self, rng: random.Random, micros: int, size: float, spread: float = 0.0) -> None:
        begin = len(self.use) / 1000
        phases = dict.fromkeys(("data_wait", "forward", "loss", "recompute", "backward", "optimizer", "other"), 0.0)
        phases["data_wait"] = self.draw(USE["data_wait"], 0.06 * size)
        told = []
        for _ in range(micros):
            length = size * rng.uniform(1 - spread, 1 + spread) / micros
            offset = len(self.use) / 1000 - begin
            now = {"forward": 0.26, "loss": 0.05}
            seconds = {p: self.draw(USE[p], share * length) for p, share in now.items()}
            for _layer in range(4):  # recomputation and backward take turns
                for name, share in (("recompute", 0.04), ("backward", 0.08)):
                    seconds[name] = seconds.get(name, 0.0) + self.draw(USE["backward"], share * length)
            told.append(r.MicroBatch(1, 10, 10, 9, sum(seconds.values()), offset))
            for name, s in seconds.items():
                phases[name] += s
            phases["other"] += self.draw(USE["other"], 0.02 * length)
        optimizer = len(self.use) / 1000 - begin
        phases["optimizer"] = self.draw(USE["optimizer"], 0.12 * size)
        wall = len(self.use) / 1000 - begin
        number = len(self.steps) + 1
        self.steps.append(
            r.Step(
                step=number,
                t_s=begin - self.lag_s,  # when the host began it
                wall_s=wall,
                phases_s=phases,
                micro=tuple(told),
                optimizer_begin_s=optimizer,
                lag_s=self.lag_s or None,
            )
        )
        self.draw(GAP, 0.02)

    def told(self, noise: float = 1.0, seed: int = 0, window_s: float = 0.5, counters: bool = True) -> GpuPhases:
        """Sample the drawing and give samples and steps to what is tested, in the order of a log."""
        rng = random.Random(seed)
        phases = GpuPhases()
        ends = [s.t_s + s.wall_s + self.lag_s for s in self.steps]
        events: list[tuple[float, object]] = [(end, s) for end, s in zip(ends, self.steps, strict=True)]
        events += [(s.t_s + s.wall_s, s) for s in self.spans]
        at = 0.0137
        while at + window_s < len(self.use) / 1000:
            a, b = round(at * 1000), round((at + window_s) * 1000)
            mean = sum(self.use[a:b]) / (b - a) + rng.gauss(0, noise)
            mean = min(100.0, max(0.0, mean))
            values = {"sm_percent": mean, "dram_percent": mean / 2} if counters else {"gpu_percent": mean}
            window = (a / 1000, b / 1000) if counters else None
            events.append((b / 1000, r.GpuSample(uuid="u", window_s=window, **values)))
            at += 0.5 + rng.uniform(0, 0.004)
        if counters:  # the first reading of counters has no window
            events.append((self.steps[1].t_s + 1.2, r.GpuSample(uuid="u", gpu_percent=99.0)))
        for t_s, event in sorted(events, key=lambda pair: pair[0]):
            if isinstance(event, r.Step):
                phases.add_step(event)
            elif isinstance(event, r.Span):
                phases.add_span(event)
            else:
                assert isinstance(event, r.GpuSample)
                phases.add_sample(t_s, event)
        return phases


def by_part(phases: GpuPhases) -> dict[str, PhaseUse]:
    found, reason = phases.uses("u", final=True)
    assert reason is None
    return {use.phase: use for use in found}


def check(found: dict[str, PhaseUse], parts: tuple[str, ...], within: float = 3.0) -> None:
    for part in parts:
        mean, low, high = found[part].means["sm_percent"]
        assert mean == pytest.approx(USE[part], abs=within), part
        assert low <= mean <= high
        assert high - low <= 20.0
        half = found[part].means["dram_percent"]
        assert half[0] == pytest.approx(USE[part] / 2, abs=within), part


def drawn(count: int, micros: int, size: float, spread: float = 0.0, lag_s: float = 0.0, seed: int = 0) -> Drawn:
    run, rng = Drawn(lag_s), random.Random(seed)
    for _ in range(count):
        run.step(rng, micros, size, spread)
    return run


def test_steps_longer_than_the_window() -> None:
    found = by_part(drawn(40, 1, 5.0).told())
    check(found, ("forward", "backward", "optimizer"), within=2.0)
    # its share of the drawing: 0.48 of a step of 0.99, and the gap of 20 ms
    assert found["backward"].share == pytest.approx(0.48 * 5 / (0.99 * 5 + 0.02), abs=0.01)


def test_steps_shorter_than_the_window_are_solved() -> None:
    check(by_part(drawn(400, 1, 0.7, spread=0.4).told()), ("forward", "backward"), within=4.0)


def test_micro_batches_lie_where_they_began() -> None:
    found = by_part(drawn(30, 4, 8.0, spread=0.5).told())
    check(found, ("forward", "backward", "optimizer"))


def test_a_device_that_is_behind_its_host() -> None:
    check(by_part(drawn(60, 1, 3.0, lag_s=0.4).told()), ("forward", "backward", "optimizer"), within=2.5)


def test_what_cannot_be_told_apart_is_not_told() -> None:
    run, rng = Drawn(), random.Random(0)
    while len(run.steps) < 800:  # 250 ms to the millisecond: two in every window, whatever its place
        run.step(rng, 1, 0.22)
        while len(run.use) % 250:
            run.use.append(GAP)
    assert all(s.t_s == 0.25 * i for i, s in enumerate(run.steps))
    found = by_part(run.told())
    assert all(not use.means for use in found.values())
    assert all(use.reason for use in found.values())


def test_an_evaluation_has_a_part_of_its_own() -> None:
    run, rng = Drawn(), random.Random(0)
    for number in range(30):
        run.step(rng, 1, 2.0)
        if number % 3 == 0:
            begin = len(run.use) / 1000
            run.draw(95.0, 3.0)
            run.spans.append(r.Span(kind="evaluation", t_s=begin, wall_s=3.0, step=number))
    found = by_part(run.told())
    check(found, ("forward", "backward"))
    assert found["evaluation"].means["sm_percent"][0] == pytest.approx(95.0, abs=2.0)


def test_the_interval_covers_the_truth() -> None:
    covered = []
    for seed in range(30):
        found = by_part(drawn(50, 1, 1.1, spread=0.3, seed=seed).told(noise=6.0, seed=seed))
        for part in ("forward", "backward"):
            if "sm_percent" in found[part].means:
                _, low, high = found[part].means["sm_percent"]
                covered.append(low <= USE[part] <= high)
    assert len(covered) >= 40
    assert sum(covered) / len(covered) >= 0.75  # 80% is meant; of 60, three standard errors below are 65%


def test_too_few_samples() -> None:
    assert drawn(3, 1, 3.0).told().uses("u", final=True) == ((), "too few samples yet")


def test_without_counters_only_phases_longer_than_the_drivers_window() -> None:
    # NVML's figure here is a mean over 200 ms, which nobody is told
    run = drawn(60, 1, 14.0)
    found = by_part(run.told(window_s=0.2, counters=False))
    for part in ("forward", "backward"):
        assert found[part].means["gpu_percent"][0] == pytest.approx(USE[part], abs=1.0), part
    short = drawn(100, 1, 1.0).told(window_s=0.2, counters=False)
    assert short.uses("u", final=True) == ((), "no phase lasts for longer than the driver may average over (1 s)")


def test_a_long_run_costs_no_more_memory() -> None:
    phases = GpuPhases()
    for second in range(6000):
        for half in (0.0, 0.5):
            t_s = second + half + 0.4
            phases.add_sample(t_s, r.GpuSample(uuid="u", sm_percent=50.0, window_s=(t_s - 0.5, t_s)))
        phases.add_step(r.Step(step=second, t_s=float(second), wall_s=1.0, phases_s={"forward": 0.4, "backward": 0.6}))
    blocks = phases._gpus["u"]._sums["sm_percent"][0]
    assert len(blocks.blocks) <= MOST_BLOCKS
    assert len(phases._intervals) < 50
    assert len(phases._pending) < 10
    # one of several stands for all: their weight is that of all samples, but for the last few
    assert blocks.total().weight == pytest.approx(12_000, abs=20)


def test_samples_without_steps_wait_in_bounded_memory() -> None:
    phases = GpuPhases()
    for i in range(10_000):
        phases.add_sample(i / 2, r.GpuSample(uuid="u", sm_percent=50.0, window_s=(i / 2 - 0.5, i / 2)))
    assert len(phases._pending) <= 4096
    assert phases.uses("u", final=True) == ((), None)


def test_nonsense_in_a_log_is_left_out() -> None:
    phases = GpuPhases()
    for window, value in (((5.0, 5.0), 50.0), ((6.0, 5.0), 50.0), ((0.0, 1e300), 50.0), ((1.0, 1.5), 1e308)):
        phases.add_sample(2.0, r.GpuSample(uuid="u", window_s=window, sm_percent=value))
    for number in range(20):
        phases.add_step(r.Step(step=number, t_s=number * 1.0, wall_s=1.0, phases_s={"forward": -1.0, "backward": 0.0}))
    assert len(phases._pending) == 0
    assert phases.uses("u", final=True) == ((), None)
