"""Where in a step its micro-batches and its optimizer began, and how far the device was behind: by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ft_insight.callbacks.phases import ClosedStep, Stretch, _times
from tests.train.conftest import Log, MakeTrainer


class At:
    """An event at a time of the device, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def elapsed_time(self, other: At) -> float:
        return (other.seconds - self.seconds) * 1e3


# bucket, micro-batch, seconds of the host, seconds of the device
STRETCHES = [
    ("data_wait", -1, 0.10, 0.05),
    ("forward", 0, 0.20, 0.45),
    ("backward", 0, 0.40, 0.50),
    ("other", -1, 0.05, 0.01),
    ("forward", 1, 0.20, 0.40),
    ("backward", 1, 0.90, 0.60),
    ("other", -1, 0.05, 0.01),
    ("clip", -1, 0.01, 0.02),
    ("optimizer", -1, 0.02, 0.30),
]


def times(begin: Any, *, device: bool) -> Any:
    at, stretches = 0.0, []
    for bucket, micro, host_s, device_s in STRETCHES:
        at += device_s
        stretches.append(Stretch(bucket, micro, host_s, At(at) if device else None))  # type: ignore[arg-type]
    return _times(ClosedStep(0.0, 1.93, begin, stretches, {}), "cuda" if device else "host")


def test_by_the_hosts_clock() -> None:
    told = times(None, device=False)
    assert told.micro_begin_s == pytest.approx({0: 0.10, 1: 0.75})
    assert told.optimizer_begin_s == pytest.approx(1.90)
    assert told.lag_s is None


def test_by_the_devices_clock() -> None:
    told = times(At(0.0), device=True)
    assert told.micro_begin_s == pytest.approx({0: 0.05, 1: 1.01})
    assert told.optimizer_begin_s == pytest.approx(2.02)
    # the host is ahead of its own start by 0.05, -0.20, -0.30, -0.26, -0.46, -0.16, -0.12 ... s after each stretch:
    # the device can never be ahead of it, so that it was 0.05 s behind at least when the step began
    assert told.lag_s == pytest.approx(0.05)


def test_in_a_real_run(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    from ft_insight import FtInsightCallback

    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path)], gradient_accumulation_steps=3, max_steps=1).train()
    for step in Log(path).steps:
        begins = [m.begin_s for m in step.micro]
        assert len(begins) == 3
        assert step.phases_s["data_wait"] <= begins[0] + 1e-6
        for before, after in zip(step.micro, step.micro[1:], strict=False):
            assert before.begin_s + before.compute_s <= after.begin_s + 1e-6
        last = step.micro[-1]
        assert last.begin_s + last.compute_s <= step.optimizer_begin_s + 1e-6
        after = step.optimizer_begin_s + step.phases_s["clip"] + step.phases_s["optimizer"]
        assert after <= step.wall_s + 1e-6
