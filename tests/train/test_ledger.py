"""The step ledger against planted truth.

Work is planted in every part of a step on a virtual clock that nothing else advances, so that each phase has one
right value, to the last digit, through the real SFTTrainer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from trl import SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight import records as r
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, moe_model, token_rows
from tests.train.planted import Book, VirtualClock, plant

FETCH, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, CALLBACK, EVALUATE, SAVE, LOG = (
    1.0,
    2.0,
    0.25,
    4.0,
    0.125,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
)


class WorkInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, clock: VirtualClock) -> torch.Tensor:
        ctx.clock = clock
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.work(BACKWARD)
        return grad, None


class PlantedHead(nn.Module):
    """Stands at the end of the backbone: works in forward, and once in backward."""

    def __init__(self, inner: nn.Module, clock: VirtualClock) -> None:
        super().__init__()
        self.inner = inner
        self.clock = clock

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.clock.work(FORWARD)
        return WorkInBackward.apply(self.inner(hidden), self.clock)


class OtherCallback(TrainerCallback):
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.work(CALLBACK)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.work(LOG)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.work(CALLBACK)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.work(EVALUATE)


def planted_trainer(virtual: VirtualClock) -> type[SFTTrainer]:
    class Planted(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            if self.model.training:
                virtual.work(LOSS)
            return result

        def _clip_grad_norm(self, model: Any) -> Any:
            virtual.work(CLIP)
            return super()._clip_grad_norm(model)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            virtual.work(SAVE)
            return super()._save_checkpoint(*args, **kwargs)

    return Planted


def run_planted(virtual: VirtualClock, make_trainer: MakeTrainer, path: Path, **settings: Any) -> Log:
    model = settings.pop("model", None) or moe_model()
    model.model.norm = PlantedHead(model.model.norm, virtual)
    trainer = make_trainer(
        [OtherCallback(virtual), FtInsightCallback(path)],
        model=model,
        trainer_class=settings.pop("trainer_class", None) or planted_trainer(virtual),
        **settings,
    )
    collate = trainer.data_collator

    def slow_collate(rows: Any) -> Any:
        virtual.work(FETCH)
        return collate(rows)

    trainer.data_collator = slow_collate
    trainer.create_optimizer()
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (virtual.work(OPTIMIZER), step(*a, **k))[1]
    trainer.train()
    return Log(path)


def expected_phases(micro_batches: int, fetched: int | None = None) -> dict[str, float]:
    return {
        "data_wait": FETCH * (micro_batches if fetched is None else fetched),
        "forward": FORWARD * micro_batches,
        "loss": LOSS * micro_batches,
        "backward": BACKWARD * micro_batches,
        "clip": CLIP,
        "optimizer": OPTIMIZER,
    }


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 2, "rows": token_rows([8] * 12)},
    "checkpointing": {"checkpointing": True},
    "lora": {"peft_config": lora()},
    "lora with checkpointing and accumulation": {
        "peft_config": lora(),
        "checkpointing": True,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
    },
    "bf16": {"bf16": True},
    "padding-free": {"padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("case", CASES)
def test_phases_are_exact(case: str, virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = dict(CASES[case])
    accumulation = settings.get("gradient_accumulation_steps", 1)
    log = run_planted(virtual, make_trainer, tmp_path / "run.jsonl", **settings)
    assert len(log.steps) == settings.get("max_steps", 4)
    # the dataloader fetches one batch ahead, so the first fetch of an epoch brings one more and the last one less
    fetched = sum(s.phases_s["data_wait"] for s in log.steps) / FETCH
    assert fetched >= accumulation * len(log.steps)
    for step in log.steps:
        measured = {k: v for k, v in step.phases_s.items() if v and k != "data_wait"}
        expected = expected_phases(accumulation)
        del expected["data_wait"]
        assert measured == expected
        assert math.isclose(sum(step.phases_s.values()), step.wall_s)
        assert [m.compute_s for m in step.micro] == [FORWARD + LOSS + BACKWARD] * accumulation
    assert log.notices == []


def test_short_last_group_counts_its_own_micro_batches(
    virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    # 5 batches in groups of 3: a step of 3 micro-batches and one of 2
    log = run_planted(
        virtual,
        make_trainer,
        tmp_path / "run.jsonl",
        rows=token_rows([8] * 10),
        gradient_accumulation_steps=3,
        max_steps=-1,
        num_train_epochs=1,
    )
    assert [len(s.micro) for s in log.steps] == [3, 2]
    assert [s.phases_s["backward"] for s in log.steps] == [3 * BACKWARD, 2 * BACKWARD]
    assert [s.phases_s["optimizer"] for s in log.steps] == [OPTIMIZER, OPTIMIZER]


def test_what_is_outside_of_steps_is_apart(virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run_planted(
        virtual,
        make_trainer,
        tmp_path / "run.jsonl",
        eval_rows=token_rows([8] * 4),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        gradient_accumulation_steps=2,
    )
    phases = expected_phases(2)
    del phases["data_wait"]
    assert all({k: v for k, v in s.phases_s.items() if v and k != "data_wait"} == phases for s in log.steps)
    spans = {kind: [s.wall_s for s in log.of(r.Span) if s.kind == kind] for kind in ("evaluation", "saving")}
    # two batches of evaluation rows: collated, predicted and told of, then logged
    assert spans["evaluation"] == [2 * (FETCH + FORWARD + EVALUATE) + LOG] * 2
    assert spans["saving"] == [SAVE]
    before = [s.before_s for s in log.steps]
    assert [b.get("callbacks") for b in before[1:]] == [CALLBACK] * 3
    assert [b.get("logging") for b in before[1:]] == [LOG] * 3
    # every second of the run is somewhere
    accounted = sum(s.wall_s + sum(s.before_s.values()) for s in log.steps)
    accounted += sum(s.wall_s for s in log.of(r.Span)) + sum(log.end.before_s.values())
    assert math.isclose(accounted, log.end.t_s, abs_tol=1e-5)


def test_epochs_without_max_steps(virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = run_planted(
        virtual, make_trainer, tmp_path / "run.jsonl", rows=token_rows([8] * 6), max_steps=-1, num_train_epochs=2
    )
    assert [s.step for s in log.steps] == [1, 2, 3, 4, 5, 6]
    assert sum(s.phases_s["data_wait"] for s in log.steps) + sum(
        s.before_s.get("between", 0) for s in log.steps
    ) == pytest.approx(6 * FETCH, abs=1e-6)


def test_a_real_step_adds_up_by_the_real_clock(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path)], model=moe_model(), max_steps=6).train()
    for step in Log(path).steps:
        assert sum(step.phases_s.values()) == pytest.approx(step.wall_s, rel=0.02)
        assert step.phases_s["forward"] > 0
        assert step.phases_s["backward"] > 0


def test_a_model_called_twice_per_micro_batch(virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """As preference losses do, and with a second call without gradients, as metrics do."""

    class Twice(planted_trainer(virtual)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, dict(inputs), *args, **kwargs)
            again = super().compute_loss(model, dict(inputs), *args, **kwargs)
            with torch.no_grad():
                model(input_ids=inputs["input_ids"])
            return result + again

    log = run_planted(virtual, make_trainer, tmp_path / "run.jsonl", trainer_class=Twice)
    for step in log.steps:
        assert step.phases_s["forward"] == 2 * FORWARD
        # what lies around the calls, and the call that only metrics need
        assert step.phases_s["loss"] == 2 * LOSS + FORWARD
        assert step.phases_s["backward"] == 2 * BACKWARD


def test_a_step_that_the_scaler_skipped_is_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trainer = make_trainer([FtInsightCallback(path)])
    skipping = type(trainer.accelerator)

    class Skipping(skipping):  # type: ignore[valid-type, misc]
        @property
        def optimizer_step_was_skipped(self) -> bool:
            # global_step has moved on to 1 when we ask, and is still 0 when the trainer does
            return bool(trainer.state.global_step <= 1)

    trainer.accelerator.__class__ = Skipping
    trainer.train()
    assert [s.skipped for s in Log(path).steps] == [True, None, None, None]


def test_recompute_is_a_phase_of_every_step(virtual: VirtualClock, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = moe_model()
    for layer in model.model.layers:
        plant(layer.mlp, Book(virtual), (0, "moe"), 4.0)
    log = run_planted(virtual, make_trainer, tmp_path / "run.jsonl", model=model, checkpointing=True)
    for step in log.steps:
        assert step.phases_s["forward"] == FORWARD + 2 * 4.0
        assert step.phases_s["recompute"] == 2 * 4.0
        assert step.phases_s["backward"] == BACKWARD + 2 * (2.0 + 1.0)


def test_a_compiled_model_has_phases_and_says_why_no_layers(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make_trainer(
        [FtInsightCallback(path, layers_every=1)],
        model=dense_model(),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        max_steps=3,
    ).train()
    log = Log(path)
    assert log.header.train.compiled
    assert log.notices == ["the model is compiled, and hooks would break its graphs: phases only"]
    assert log.of(r.Layers) == []
    for step in log.steps:
        assert sum(step.phases_s.values()) == pytest.approx(step.wall_s, rel=0.02)
        assert step.phases_s["forward"] > 0
        assert step.phases_s["backward"] > 0
