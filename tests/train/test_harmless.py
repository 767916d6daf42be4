"""The callback changes nothing, breaks nothing and leaves nothing behind."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks import FtInsightWarning
from ft_insight.callbacks import observer as observer_module
from ft_insight.callbacks import session as session_module
from ft_insight.callbacks.guard import CheckpointSeam, Hook
from ft_insight.callbacks.routers import RouterCounter
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, moe_model, token_rows

IDENTICAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"peft_config": "lora"},
    "accumulation 4": {"gradient_accumulation_steps": 4, "max_steps": 3, "rows": token_rows([8, 5, 9, 12] * 6)},
    "evaluation every 5 steps": {
        "max_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "eval_rows": token_rows([8, 6, 7, 5], seed=9),
    },
    "mixture of experts, checkpointing": {"model": "moe", "checkpointing": True},
}


def losses_and_weights(make_trainer: MakeTrainer, callbacks: list[Any], settings: dict[str, Any]) -> tuple[Any, Any]:
    settings = dict(settings)
    model = moe_model() if settings.pop("model", None) == "moe" else dense_model()
    if settings.pop("peft_config", None):
        settings["peft_config"] = lora()
    trainer = make_trainer(callbacks, model=model, **settings)
    trainer.train()
    timing = ("runtime", "per_second")
    history = [{k: v for k, v in line.items() if not any(t in k for t in timing)} for line in trainer.state.log_history]
    return history, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("case", IDENTICAL)
def test_losses_and_weights_are_bit_identical(case: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    without, weights = losses_and_weights(make_trainer, [], IDENTICAL[case])
    observed, observed_weights = losses_and_weights(
        make_trainer, [FtInsightCallback(tmp_path / "run.jsonl", layers_every=1)], IDENTICAL[case]
    )
    assert len(Log(tmp_path / "run.jsonl").steps) == IDENTICAL[case].get("max_steps", 4)
    assert observed == without
    assert all(torch.equal(a, b) for a, b in zip(weights, observed_weights, strict=True))


def assert_nothing_left(trainer: SFTTrainer) -> None:
    for module in trainer.model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            assert not any("ft_insight" in type(hook).__module__ for hook in hooks.values())
    for module in trainer.model.modules():
        assert not isinstance(vars(module).get("_gradient_checkpointing_func"), CheckpointSeam)
    for owner in (trainer, trainer.accelerator, trainer.optimizer, trainer.callback_handler):
        for name, value in vars(owner).items():
            assert not hasattr(value, "__ft_insight__"), name


class Bomb(TrainerCallback):
    """Raises at one event."""

    def __init__(self, event: str, error: BaseException) -> None:
        def explode(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 1:
                raise error

        setattr(self, event, explode)


PLACES = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", "on_evaluate"]


@pytest.mark.parametrize("event", PLACES)
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_anywhere_ends_the_log_and_leaves_nothing(
    event: str, first: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ours, bomb = FtInsightCallback(path), Bomb(event, RuntimeError("planted [red]fault\nsecond line"))
    trainer = make_trainer(
        [ours, bomb] if first else [bomb, ours],
        eval_rows=token_rows([6, 6]),
        eval_strategy="steps",
        eval_steps=1,
    )
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert_nothing_left(trainer)
    end = Log(path).end
    assert (end.status, end.reason) == ("failed", "RuntimeError: planted [red]fault")


@pytest.mark.parametrize("where", ["model", "collator", "optimizer", "loss"])
def test_an_exception_in_the_trainers_own_work(where: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    class Failing(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            self._maybe_fail("loss")
            return result

        def _maybe_fail(self, place: str) -> None:
            if where == place and self.state.global_step == 1:
                raise MemoryError("planted")

    trainer = make_trainer([FtInsightCallback(path)], trainer_class=Failing)
    trainer.model.register_forward_hook(lambda *_: trainer._maybe_fail("model"))
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: (trainer._maybe_fail("collator"), collate(rows))[1]
    trainer.create_optimizer()
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (trainer._maybe_fail("optimizer"), step(*a, **k))[1]
    with pytest.raises(MemoryError):
        trainer.train()
    assert Log(path).end.reason == "MemoryError: planted"
    assert [s.step for s in Log(path).steps] == [1]
    assert_nothing_left(trainer)


def test_a_fault_that_the_user_catches_ends_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Some skip a batch that does not fit, or an evaluation that fails, and train on."""

    class Forgiving(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training and self.state.global_step == 1:
                loss.register_hook(lambda _: 1 / 0)
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().training_step(*args, **kwargs)
            except ZeroDivisionError:
                return torch.tensor(0.0)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate(*args, **kwargs)
            except ZeroDivisionError:
                return {}

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError

    path = tmp_path / "run.jsonl"
    trainer = make_trainer(
        [FtInsightCallback(path)],
        trainer_class=Forgiving,
        eval_rows=token_rows([6, 6]),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    log = Log(path)
    assert (log.end.status, [s.step for s in log.steps]) == ("completed", [1, 2, 3, 4])
    assert {s.step for s in log.of(r.Span) if s.kind == "evaluation"} == {2, 4}
    for step in log.steps:
        assert sum(step.phases_s.values()) == pytest.approx(step.wall_s, rel=1e-3)
    assert_nothing_left(trainer)


def test_ctrl_c_is_an_interruption_and_training_can_start_again(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bomb = Bomb("on_step_end", KeyboardInterrupt())
    trainer = make_trainer([FtInsightCallback(path), bomb])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert Log(path).end.status == "interrupted"
    trainer.remove_callback(bomb)
    trainer.train()
    second = Log(tmp_path / "run-2.jsonl")
    assert second.end.status == "completed"
    assert [s.step for s in second.steps] == [1, 2, 3, 4]
    assert_nothing_left(trainer)


def test_two_trainings_of_one_trainer_have_a_log_each(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer([FtInsightCallback(tmp_path / "run.jsonl")], max_steps=2)
    trainer.train()
    trainer.train()
    for name in ("run.jsonl", "run-2.jsonl"):
        log = Log(tmp_path / name)
        assert (len(log.steps), log.end.status) == (2, "completed")
    assert_nothing_left(trainer)


def test_added_later_it_does_the_same(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.add_callback(FtInsightCallback(tmp_path / "run.jsonl"))
    trainer.train()
    log = Log(tmp_path / "run.jsonl")
    assert len(log.steps) == 4
    assert log.header.train.trainer == "SFTTrainer"


@pytest.mark.parametrize("collector", ["batches", "memory", "experts", "ledger", "logs"])
def test_a_failing_collector_is_one_warning_and_no_more(
    collector: str, make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("planted")

    targets = {
        "batches": (observer_module, "measure"),
        "memory": (observer_module.MemoryReader, "read"),
        "experts": (RouterCounter, "count"),
        "ledger": (observer_module.Ledger, "open_step"),
        "logs": (session_module.Session, "logged"),
    }
    monkeypatch.setattr(*targets[collector], fail)
    trainer = make_trainer([FtInsightCallback(tmp_path / "run.jsonl")], model=moe_model())
    with pytest.warns(FtInsightWarning, match=f"{collector} is off") as caught:
        trainer.train()
    assert len([w for w in caught if issubclass(w.category, FtInsightWarning)]) == 1
    assert trainer.state.global_step == 4
    log = Log(tmp_path / "run.jsonl")
    assert [n.text for n in log.of(r.Notice) if n.off] == ["off: ZeroDivisionError: planted"]
    assert log.end.status == "completed"
    assert len(log.steps) == (0 if collector == "ledger" else 4)
    assert bool(log.of(r.Experts)) == (collector not in ("experts", "ledger"))


@pytest.mark.parametrize("path", ["/proc/nowhere/run.jsonl", "/dev/null/run.jsonl"])
def test_a_log_that_cannot_be_written_does_not_stop_training(path: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer([FtInsightCallback(path)])
    with pytest.warns(FtInsightWarning, match="records nothing of this run"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert_nothing_left(trainer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_does_not_stop_training(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda p, *a, **k: real_open("/dev/full", os.O_RDWR) if str(p).endswith("run.jsonl") else real_open(p, *a, **k),
    )
    trainer = make_trainer([FtInsightCallback(tmp_path / "run.jsonl")])
    with pytest.warns(FtInsightWarning, match="the log is incomplete"):
        trainer.train()
    assert trainer.state.global_step == 4


class Copies(TrainerCallback):
    """Copies the model in the middle of training, as averaging callbacks do."""

    def __init__(self, *, pickled: bool) -> None:
        self.pickled = pickled
        self.copies: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._copy(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._copy(model)  # here the layers' hooks are in the model

    def _copy(self, model: Any) -> None:
        self.copies = [copy.deepcopy(model)]
        if self.pickled:
            self.copies.append(pickle.loads(pickle.dumps(model)))  # noqa: S301 - our own bytes


# upstream's own hooks keep mixtures of experts and checkpointed models from being pickled, with or without ours
@pytest.mark.parametrize(
    ("model", "checkpointing", "pickled"),
    [(dense_model, False, True), (moe_model, False, False), (moe_model, True, False)],
)
def test_copies_of_the_model_made_during_training_are_free(
    model: Any, checkpointing: bool, pickled: bool, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    copies = Copies(pickled=pickled)
    path = tmp_path / "run.jsonl"
    trainer = make_trainer(
        [FtInsightCallback(path, layers_every=1), copies], model=model(), checkpointing=checkpointing
    )
    trainer.train()
    assert Log(path).notices == []
    written = len(Log(path).records)
    for copied in copies.copies:
        copied(input_ids=torch.tensor([[11, 12, 13]]))
        assert_free(copied)
    assert len(Log(path).records) == written


def assert_free(model: Any) -> None:
    for module in model.modules():
        assert not isinstance(vars(module).get("_gradient_checkpointing_func"), CheckpointSeam)
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            assert not isinstance(hook, Hook)


def test_oom_retries_are_segments_of_one_log(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if inputs["input_ids"].shape[0] > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return super().training_step(model, inputs, *args, **kwargs)

    path = tmp_path / "run.jsonl"
    trainer = make_trainer(
        [FtInsightCallback(path)],
        trainer_class=Small,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
        rows=token_rows([8] * 8),
    )
    trainer.train()
    log = Log(path)
    headers = log.of(r.Header)
    assert len(headers) >= 2
    assert [h.segment for h in headers] == list(range(len(headers)))
    assert len({h.run_id for h in headers}) == 1
    assert headers[0].train.batch == 4
    assert 1 <= headers[-1].train.batch <= 2  # transformers takes 90% of it, or half, by version
    assert log.of(r.End)[0].reason.startswith("RuntimeError: CUDA out of memory")
    assert log.end.status == "completed"
    assert_nothing_left(trainer)


def test_a_resumed_run_goes_on_in_its_log(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    settings = {"save_strategy": "steps", "save_steps": 2}
    make_trainer([FtInsightCallback(path)], max_steps=4, **settings).train()
    make_trainer([FtInsightCallback(path)], max_steps=6, **settings).train(
        resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")
    )
    log = Log(path)
    assert [h.first_step for h in log.of(r.Header)] == [0, 2]
    assert len({h.run_id for h in log.of(r.Header)}) == 1
    assert [s.step for s in log.steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert not (tmp_path / "run-2.jsonl").exists()


def test_another_run_never_appends_to_a_log(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("precious\n")
    make_trainer([FtInsightCallback(path)]).train()
    assert path.read_text() == "precious\n"
    assert Log(tmp_path / "run-2.jsonl").end.status == "completed"


def test_default_place(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FT_INSIGHT_LOG", raising=False)
    make_trainer([FtInsightCallback()], max_steps=2).train()
    make_trainer([FtInsightCallback()], max_steps=2).train()
    logs = sorted((tmp_path / "ft_insight_runs").glob("*/run.jsonl"))
    assert len(logs) == 2
    assert all(log.parent.name.split("-", 3)[3].startswith(log.parent.name.split("-", 3)[3][:4]) for log in logs)
    assert all("llama" in log.parent.name for log in logs)
    monkeypatch.setenv("FT_INSIGHT_LOG", str(tmp_path / "named.jsonl"))
    make_trainer([FtInsightCallback()], max_steps=2).train()
    assert Log(tmp_path / "named.jsonl").end.status == "completed"


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), "2.49"])
def test_a_price_that_is_none_is_refused_at_once(price: Any) -> None:
    with pytest.raises(ValueError, match="price must be US dollars per hour"):
        FtInsightCallback(price=price)


def test_nan_loss_is_null_and_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    class Diverging(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * float("nan")

    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path)], trainer_class=Diverging, logging_nan_inf_filter=False, max_steps=2).train()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    logs = Log(path).of(r.Logs)[0]
    assert logs.values["loss"] is None
    assert "loss" in logs.nonfinite


def test_our_own_code_warns_of_nothing(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FtInsightWarning)
        make_trainer([FtInsightCallback(tmp_path / "run.jsonl")], model=moe_model()).train()
