"""The ledger on a device that runs behind its host: a stand-in for CUDA events with a timeline of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_insight.callbacks import clock as clock_module
from ft_insight.callbacks.clock import CudaClock
from ft_insight.callbacks.phases import MAX_PENDING, ClosedStep, Ledger, StepTimes, idle_at_most


class Device:
    """Work is queued by the host and done later; ``done`` is how far the device has come."""

    def __init__(self) -> None:
        self.host = 0.0
        self.queued = 0.0
        self.done = 0.0
        self.synchronised = 0
        self.events = 0
        self.idle = 0.0

    def launch(self, device_s: float, host_s: float = 0.001) -> None:
        self.host += host_s
        # work starts when the host has asked for it and what was asked before is done
        self.idle += max(0.0, self.host - self.queued)
        self.queued = max(self.queued, self.host) + device_s


DEVICE = Device()


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        DEVICE.events += 1

    def record(self) -> None:
        self.at = max(DEVICE.queued, DEVICE.host)

    def query(self) -> bool:
        return DEVICE.done >= self.at

    def synchronize(self) -> None:
        DEVICE.synchronised += 1
        DEVICE.done = max(DEVICE.done, self.at)

    def elapsed_time(self, other: Any) -> float:
        assert self.query()
        assert other.query()
        return float((other.at - self.at) * 1e3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    DEVICE.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock_module, "perf_counter", lambda: DEVICE.host)
    return DEVICE


def run_step(ledger: Ledger, device: Device, index: int) -> None:
    ledger.open_step()
    ledger.enter("data_wait")
    device.host += 0.5  # the host waits for data; the device has nothing to do
    ledger.leave()
    ledger.begin_micro(0)
    for phase, seconds in (("forward", 2.0), ("backward", 4.0)):
        ledger.enter(phase)
        device.launch(seconds)
        ledger.leave()
    ledger.begin_micro(-1)
    ledger.enter("optimizer")
    device.launch(1.0)
    ledger.leave()
    ledger.close_step(0.0, index)


def test_phases_are_distances_on_the_devices_timeline(device: Device) -> None:
    told: list[tuple[ClosedStep, StepTimes]] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append((step, times)))
    run_step(ledger, device, 0)
    assert told == []  # the device has done none of it, and nobody waits
    device.done = device.queued
    run_step(ledger, device, 1)
    assert [step.facts for step, _ in told] == [0]
    times = told[0][1]
    assert (times.clock, times.confirmed) == ("cuda", True)
    measured = {name: round(s, 3) for name, s in times.phases_s.items() if round(s, 3)}
    # the first kernel starts 1 ms after the host was told so: that gap belongs to forward
    assert measured == {"data_wait": 0.5, "forward": 2.001, "backward": 4.0, "optimizer": 1.0}
    assert round(times.micro_s[0], 3) == 6.001
    # the host only asked for the work, but for the data that it waited for
    assert {name: round(s, 3) for name, s in times.host_s.items() if round(s, 3)} == {
        "data_wait": 0.5,
        "forward": 0.001,
        "backward": 0.001,
        "optimizer": 0.001,
    }
    assert device.synchronised == 0


def test_data_wait_that_the_device_does_not_notice_is_none(device: Device) -> None:
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    run_step(ledger, device, 0)  # the device is 7 s behind when the next data is fetched
    run_step(ledger, device, 1)
    ledger.resolve(wait=True)
    assert round(told[1].phases_s["data_wait"], 3) == 0.0
    assert round(sum(told[1].phases_s.values()), 3) == 7.0


def test_a_device_idles_while_its_host_waits_for_data(device: Device) -> None:
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    run_step(ledger, device, 0)
    device.done = device.queued
    ledger.resolve()
    # half a second without data, a millisecond before the first kernel; from then on it is behind
    assert told[0].idle_at_most_s == pytest.approx(0.501)
    assert device.idle == pytest.approx(0.501)


def test_a_device_that_is_behind_its_host_never_idles(device: Device) -> None:
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    run_step(ledger, device, 0)
    run_step(ledger, device, 1)  # it is 7 s behind when the data of this step is waited for
    ledger.resolve(wait=True)
    # at least 0.5 s behind, by the distances of its marks alone: only the first launch may have found it idle
    assert told[1].idle_at_most_s == pytest.approx(0.001)


@given(
    st.lists(
        st.tuples(st.sampled_from(["data", "launch", "wait"]), st.floats(0, 2), st.floats(0, 2)),
        min_size=1,
        max_size=30,
    )
)
def test_the_bound_holds_whatever_host_and_device_do(work: list[tuple[str, float, float]]) -> None:
    DEVICE.__init__()  # type: ignore[misc]
    marks = [(0.0, 0.0)]
    for kind, host_s, device_s in work:
        if kind == "launch":
            DEVICE.launch(device_s, host_s)
        elif kind == "data":
            DEVICE.host += host_s
        else:
            DEVICE.host = max(DEVICE.host, DEVICE.queued)  # as ``.item()`` does
        marks.append((DEVICE.host, max(DEVICE.queued, DEVICE.host)))
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
    idle = DEVICE.idle + max(0.0, DEVICE.host - DEVICE.queued)
    assert idle_at_most([h for h, _ in gaps], [d for _, d in gaps]) >= idle - 1e-9


def test_the_end_of_training_may_wait(device: Device) -> None:
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    run_step(ledger, device, 0)
    ledger.resolve(wait=True)
    assert [t.clock for t in told] == ["cuda"]
    assert device.synchronised == 1


def test_events_are_used_again(device: Device) -> None:
    ledger = Ledger(CudaClock(), lambda step, times: None)
    for index in range(20):
        run_step(ledger, device, index)
        device.done = device.queued
        ledger.resolve()
    assert device.events <= 2 * 20


def test_a_device_that_never_answers_costs_no_step(device: Device) -> None:
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    for index in range(MAX_PENDING + 10):
        run_step(ledger, device, index)
    # the oldest are told by the host's clock, the latest may still be told by the device
    assert len(told) == 10
    assert {(t.clock, t.confirmed) for t in told} == {("host", False)}
    assert device.synchronised == 0


def test_no_event_left_means_the_hosts_clock(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MAX_EVENTS", 5)
    told: list[StepTimes] = []
    ledger = Ledger(CudaClock(), lambda step, times: told.append(times))
    run_step(ledger, device, 0)
    assert [(t.clock, t.confirmed) for t in told] == [("host", False)]
    assert round(told[0].phases_s["data_wait"], 3) == 0.5
