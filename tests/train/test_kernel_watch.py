"""Kernels through the callback: one step is recorded, told in the background, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trl import SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.kernel_table import by_role
from ft_insight.reader import read_run
from ft_insight.report import render
from tests.train.conftest import Log, MakeTrainer, moe_model
from tests.train.test_harmless import assert_nothing_left, losses_and_weights


def test_one_step_is_recorded_and_counts_in_no_rate(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trainer = make_trainer([FtInsightCallback(path, kernels=3, trace=True)], model=moe_model(), max_steps=5)
    trainer.train()
    log = Log(path)
    assert log.notices == []
    kernels = log.of(r.Kernels)
    assert [k.step for k in kernels] == [3]
    # in the second step memory was counted, which makes a step longer on a CPU
    assert [s.profiled for s in log.steps] == [None, True, True, None, None]
    assert json.loads((tmp_path / str(kernels[0].trace)).read_text())["traceEvents"]
    # the third step is the first that layers would be timed in: one close look at a time
    assert [x.step for x in log.of(r.Layers)] == [4]
    view, status = read_run(path)
    rates = [s for s in log.steps[1:] if not s.profiled]
    expected = sum(m.queries for s in rates for m in s.micro) / sum(s.wall_s for s in rates)
    assert view.rates.queries_per_s == pytest.approx(expected)
    roles = {(k.kind, k.role) for k in by_role(kernels[0].roles)}
    assert {("experts", "matmul_w1_w3"), ("experts", "matmul_w2"), ("router", "matmul_router")} <= roles
    assert sum(k.share for k in kernels[0].roles) == pytest.approx(1, abs=1e-4)
    assert "Kernels by role" in render(view, status)
    assert "matmul w1 w3" in render(view, status)
    assert_nothing_left(trainer)


def test_losses_are_bit_identical_with_everything_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "moe", "checkpointing": True, "gradient_accumulation_steps": 2}
    without, weights = losses_and_weights(make_trainer, [], settings)
    ours = FtInsightCallback(tmp_path / "run.jsonl", layers_every=1, kernels=2)
    observed, observed_weights = losses_and_weights(make_trainer, [ours], settings)
    assert observed == without
    assert all(bool((a == b).all()) for a, b in zip(weights, observed_weights, strict=True))


def test_a_run_that_ends_before_its_step_says_so(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path, kernels=50)], max_steps=2).train()
    assert Log(path).notices == ["the run ended before step 50, whose kernels were to be recorded"]


def test_a_fault_in_the_recorded_step_leaves_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Failing(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 1:
                raise KeyboardInterrupt
            return loss

    path = tmp_path / "run.jsonl"
    trainer = make_trainer([FtInsightCallback(path, kernels=2)], trainer_class=Failing)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert_nothing_left(trainer)
    assert Log(path).end.status == "interrupted"
    # the profiler is free again
    trainer = make_trainer([FtInsightCallback(tmp_path / "second.jsonl", kernels=2)])
    trainer.train()
    assert len(Log(tmp_path / "second.jsonl").of(r.Kernels)) == 1


@pytest.mark.parametrize("kernels", [-1, 2.5, "yes"])
def test_a_bad_step_is_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="kernels must be"):
        FtInsightCallback(kernels=kernels)
