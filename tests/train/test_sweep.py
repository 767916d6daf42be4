"""Sweeps and probes of real trainers: the largest batch, the curve, and a trainer that is as it was."""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from transformers import TrainerCallback
from trl import SFTTrainer

import ft_insight
from ft_insight import FtInsightCallback, sweep
from ft_insight import records as r
from ft_insight.cli import main
from ft_insight.estimate.step_time import StepTime, fit_step_time
from ft_insight.run import RunState
from ft_insight.sweeping import trials
from ft_insight.sweeping.probe import ProbeResult, probe_trainer
from ft_insight.sweeping.restore import LARGEST_STATE, Snapshot
from ft_insight.sweeping.result import SweepResult
from ft_insight.sweeping.rows import longest_rows
from ft_insight.sweeping.run import plan
from ft_insight.sweeping.search import GAIN, Cap, Trial, find_largest, sizes_to_measure
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, token_rows
from tests.train.planted import VirtualClock
from tests.unit import makers
from tests.unit.makers import header, step

LENGTHS = [12, 7, 9, 12, 5, 8, 11, 6, 12, 10, 9, 12, 8, 7, 12, 9, 6, 12]
LONGEST = 12


def fails_above(model: torch.nn.Module, slots: int) -> list[int]:
    """Have a model run out of memory above so many slots; return the list of all slots that it is given."""
    seen: list[int] = []

    def allocate(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"].numel())
        if seen[-1] > slots:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(allocate, with_kwargs=True)
    return seen


# the search, on batches that are only said to fit


def searched(largest: int, seconds: Callable[[int], float], cap: Cap | None, until_memory: bool) -> Any:
    return find_largest(
        lambda b: Trial(b, b <= largest, step_s=seconds(b) if b <= largest else None), cap, until_memory=until_memory
    )


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 8, 9, 13, 31, 64, 100])
def test_search_ends_exactly_where_memory_does(largest: int) -> None:
    found = searched(largest, lambda b: 1.0, None, until_memory=True)
    assert found.largest == largest
    assert found.by_memory
    assert f"batch {largest + 1} " in found.reason
    assert len({t.batch for t in found.trials}) == len(found.trials) <= 2 + 2 * (largest + 1).bit_length()


def test_search_without_an_end_of_memory_ends_with_a_reason() -> None:
    capped = searched(1000, lambda b: 1.0, Cap(11, "no more rows"), until_memory=False)
    assert (capped.largest, capped.reason, capped.by_memory) == (11, "no more rows", False)
    assert [t.batch for t in capped.trials] == [1, 2, 4, 8, 11]

    # what is known to fit is not tried again where the cap is no power of two
    capped = searched(9, lambda b: 1.0, Cap(11, "no more rows"), until_memory=True)
    assert (capped.largest, [t.batch for t in capped.trials]) == (9, [1, 2, 4, 8, 11, 9, 10])

    # up to 4 rows cost nothing; from there on each costs as much as the one before
    flat = searched(1000, lambda b: max(1.0, b / 4), None, until_memory=False)
    assert (flat.largest, "beyond batch 4" in flat.reason) == (16, True)
    # on a device whose memory is what is sought, slowness alone is no reason
    assert searched(100, lambda b: max(1.0, b / 4), None, until_memory=True).largest == 100
    # a gain just above the threshold goes on
    gains = searched(
        1000, lambda b: (2 / (1 + GAIN + 0.01)) ** (b.bit_length() - 1), Cap(64, "cap"), until_memory=False
    )
    assert gains.largest == 64

    slow = searched(1000, lambda b: 40.0 * b, None, until_memory=True)
    assert (slow.largest, "1m 20s" in slow.reason) == (2, True)


def test_handful_of_sizes() -> None:
    assert sizes_to_measure(1, 4) == (1,)
    assert sizes_to_measure(17, 8) == (1, 2, 3, 5, 8, 10, 17)
    assert sizes_to_measure(5, 9) == (1, 2, 3, 4, 5)
    # the second step to warm up is the one in which memory is counted
    assert plan((1, 4), 4, 8, 1) == ((4, 2), (1, 4), (4, 4), (4, 4), (1, 4))
    assert plan((1, 4), 1, 8, 16) == ((1, 2), (1, 1), (4, 1))  # of 16 micro-batches each
    for micro_batches, accumulation in [(8, 3), (1, 1), (5, 2)]:
        done = plan((3,), 3, micro_batches, accumulation)[1:]
        assert sum(s for _, s in done) * accumulation >= micro_batches


# the rows


def test_longest_rows_of_every_kind_of_data_set() -> None:
    rows = token_rows([3, 9, 4, 9, 1])
    as_list = [dict(row) for row in rows]

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter(as_list)

    for dataset, count in ((rows, 5), (as_list, 5), (Stream(), None), (rows.select([4, 3, 2, 1, 0]), 5)):
        longest = longest_rows(dataset)
        assert (longest.longest, longest.count) == (9, count)
        batch = longest.batch(3)
        assert [len(batch[i]["input_ids"]) for i in range(len(batch))] == [9, 9, 4]
    assert len(longest_rows(Stream()).batch(7)) == 7
    untold = longest_rows([{"text": "a"}, {"text": "b"}])
    assert (untold.longest, untold.count) == (None, 2)
    assert "do not tell" in untold.basis


# sweeps of a real SFTTrainer


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """Every ``train()`` collects garbage, which takes longer than these trainings where much is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_plateau(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory alone end a search, however busy this machine is."""
    monkeypatch.setattr("ft_insight.sweeping.search.GAIN", -1.0)


@pytest.mark.usefixtures("no_plateau")
@pytest.mark.parametrize("largest", [5, 8])
def test_largest_batch_is_where_the_model_runs_out(largest: int, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = dense_model()
    seen = fails_above(model, LONGEST * (largest + 1) - 1)
    trainer = make_trainer(model=model, rows=token_rows(LENGTHS))
    result = sweep(lambda: trainer, steps=2, path=tmp_path / "run.jsonl")
    assert result.largest == largest
    assert result.longest == LONGEST
    assert f"batch {largest + 1} runs out of memory" in result.reason

    log = Log(tmp_path / "run.jsonl")
    tried = {t.batch: t for t in log.of(r.Tried)}
    assert {b: t.fits for b, t in tried.items()} == {b: b <= largest for b in tried}
    assert {largest, largest + 1} <= set(tried)
    # on the longest rows, whose slots are known without looking
    assert all(t.slots == LONGEST * b for b, t in tried.items() if t.fits)
    assert tried[largest + 1].slots == LONGEST * (largest + 1)
    assert {s.slots for s in (m for x in log.steps for m in x.micro)} <= set(seen)
    assert max(m.slots for x in log.steps for m in x.micro) <= LONGEST * largest
    assert log.header.purpose == "sweep"
    assert log.header.train.batch == 2  # the trainer's own
    assert log.end.status == "completed"
    assert len(log.of(r.Header)) == 1


@pytest.mark.usefixtures("no_plateau")
def test_trainer_whose_own_batch_does_not_fit_is_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = dense_model()
    fails_above(model, LONGEST * 3)
    trainer = make_trainer(model=model, rows=token_rows(LENGTHS), per_device_train_batch_size=6)
    result = sweep(lambda: trainer, steps=1, path=tmp_path / "run.jsonl")
    assert result.largest == 3
    assert "set to 6, which fails" in result.reason
    assert Log(result.path).header.train.batch == 3
    assert trainer.args.per_device_train_batch_size == 6


def test_not_even_one_row(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    model = dense_model()
    fails_above(model, LONGEST - 1)
    trainer = make_trainer(model=model, rows=token_rows(LENGTHS))
    with pytest.raises(ValueError, match="not even a row of 12 tokens fits") as caught:
        sweep(lambda: trainer, path=tmp_path / "run.jsonl")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run.jsonl").exists()


def test_sweep_fits_the_planted_curve(
    make_trainer: MakeTrainer, virtual: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A micro-batch takes 50 ms and 2 ms a slot: only a pool of all sizes tells both."""
    model = dense_model()

    def work(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        virtual.work(0.05 + 0.002 * kwargs["input_ids"].numel())

    model.register_forward_hook(work, with_kwargs=True)
    trainer = make_trainer(
        model=model, rows=token_rows([10] * 32), gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
        eval_rows=token_rows([10]), max_steps=-1, num_train_epochs=3,
    )  # fmt: skip
    result = sweep(lambda: trainer, batch_sizes=[1, 2, 4, 8], steps=4, path=tmp_path / "run.jsonl")
    assert [(m.batch, m.slots, m.micro_batches) for m in result.sizes()] == [(b, 10 * b, 4) for b in (1, 2, 4, 8)]
    assert [m.micro_batch_s for m in result.sizes()] == pytest.approx([0.07, 0.09, 0.13, 0.21])

    log = Log(result.path)
    assert [s.step for s in log.steps if s.profiled] == [2]
    assert log.steps[1].other_batch is None  # so that no size is measured while memory is counted
    [fit] = log.of(r.Fit)
    assert fit.identifiable
    assert (fit.fixed_s, fit.per_slot_s) == pytest.approx((0.05, 0.002), rel=0.02)
    state = RunState()
    for record in log.records:
        state.fold(record)
    view = state.view()
    pool = [(float(m.slots), float(m.compute_s)) for m in view.micro]
    model_of_log = fit_step_time([x for x, _ in pool], [y for _, y in pool])
    assert isinstance(model_of_log, StepTime)
    assert model_of_log.predict(60)[0] == pytest.approx(0.17, rel=0.02)  # batch 6, which was not measured
    # rates are those of the job's own batch, 2, in steps of two micro-batches; its plan is the job's, not the sweep's
    assert view.rates.queries_per_s == pytest.approx(4 / 0.18)
    train = log.header.train
    assert (train.batch, train.accumulation, train.epochs, train.max_steps) == (2, 2, 3.0, 24)
    assert train.eval_every_steps == 2
    assert view.to_go_s == 0.0
    assert main(["project", str(result.path)]) == 0
    shown = capsys.readouterr().out
    assert "32 rows x 3 epochs" in shown
    assert "10-80 slots" in shown


def test_steps_that_were_looked_at_are_not_told_as_a_sizes_time(tmp_path: Path) -> None:
    steps = [step(1, 0.0, 1.0), step(2, 1.0, 1.0), step(3, 2.0, 9.0, profiled=True), step(4, 11.0, 1.0)]
    steps += [step(5, 12.0, 8.0, other_batch=8, profiled=True), step(6, 20.0, 2.0, other_batch=8)]
    path = makers.log(tmp_path / "run.jsonl", [header(purpose="sweep"), *steps])
    sizes = {size.batch == 8: size for size in SweepResult(path, 8, "", None, "", ()).sizes()}
    own, other = sizes[False], sizes[True]
    assert (own.micro_batches, other.micro_batches) == (2 * len(steps[0].micro), len(steps[0].micro))
    work = sum(m.queries for m in steps[0].micro)
    assert (own.queries_per_s, other.queries_per_s) == (work, work / 2)


def test_each_pass_measures_rows_of_its_own(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Rows of 32 lengths: what is measured on the way down is not what was on the way up."""
    trainer = make_trainer(rows=token_rows(range(5, 37)))
    sweep(lambda: trainer, batch_sizes=[1, 2], steps=8, path=tmp_path / "run.jsonl")
    steps = [s for s in Log(tmp_path / "run.jsonl").steps if s.other_batch == 1]
    lengths = [s.micro[0].slots for s in steps]
    assert len(lengths) == 8
    assert lengths[:4] != lengths[4:]
    assert len(set(lengths)) > 4


def test_steps_at_other_batches_count_for_the_fit_alone() -> None:
    state = RunState()
    state.fold(header(purpose="sweep"))
    for number, other in enumerate([None, 8, None, 8, None], start=1):
        state.fold(step(number, float(number), 8.0 if other else 1.0, other_batch=other))
    view = state.view()
    assert view.totals.steps == 3
    assert view.step_s == 1.0
    assert len(view.micro) == 4 * len(step(1, 0.0).micro)  # all but the first
    assert {s.name: s.seconds for s in view.outside}["other batches"] == 16.0
    assert view.total_steps is None
    assert view.title.endswith("sweep")


# as if nothing had been


class Hears(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("train")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("step")


def adamw(model: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


class Stateful(SFTTrainer):  # type: ignore[misc]
    """Keeps an average of its weights, draws numbers of its own, thaws what is frozen, and saves after training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shadow = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.torch_draws = torch.Generator().manual_seed(5)
        self.numpy_draws = np.random.default_rng(4)
        self.old_numpy_draws = np.random.RandomState(4)
        self.python_draws = random.Random(3)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        for name, p in model.named_parameters():
            p.requires_grad_(True)
            self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        return super().training_step(model, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        drawn = float(torch.rand((), generator=self.torch_draws)) + self.numpy_draws.random()
        drawn += self.old_numpy_draws.random_sample() + self.python_draws.random()
        return super().compute_loss(*args, **kwargs) * (1 + drawn + float(self.shadow["lm_head.weight"].sum()))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        self.save_model()
        self.save_state()
        return result


class Counts:
    """A data set, or a collator, that does something else each time."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls, self.draws = inner, 0, torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.changed(dict(self.inner[index]), lambda row, token: row["input_ids"].__setitem__(0, token))

    def __call__(self, rows: Any) -> Any:
        return self.changed(self.inner(rows), lambda batch, token: batch["input_ids"][:, 1].fill_(token))

    def changed(self, item: Any, change: Callable[[Any, int], Any]) -> Any:
        self.calls += 1
        change(item, 10 + self.calls % 50 + int(torch.randint(0, 200, (), generator=self.draws)))
        return item


def make_case(case: str, make_trainer: MakeTrainer, out: Path) -> Any:
    random.seed(3)
    np.random.seed(3)
    settings: dict[str, Any] = {"rows": token_rows(LENGTHS), "shuffle_dataset": True, "output_dir": str(out)}
    model = dense_model()
    fails_above(model, LONGEST * 4)
    if case == "lora with dropout":
        settings |= {"peft_config": lora(lora_dropout=0.3), "max_steps": 6}
    elif case == "noise, checkpointing, accumulation, saves":
        settings |= {
            "neftune_noise_alpha": 5.0,
            "checkpointing": True,
            "gradient_accumulation_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "auto_find_batch_size": True,
        }
    elif case == "autocast":
        settings |= {"bf16": True}
    elif case == "state of one's own":
        settings |= {"trainer_class": Stateful}
        model.model.layers[0].requires_grad_(False)
    trainer = make_trainer([Hears()], model=model, **settings)
    if case == "an optimizer of one's own":
        trainer.optimizer, trainer.lr_scheduler = adamw(trainer.model)
    elif case == "an optimizer in use, a schedule of the job's steps":
        trainer.optimizer, _ = adamw(trainer.model)
        trainer.model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, 0.01, total_steps=5)
    elif case == "state of one's own":
        trainer.train_dataset, trainer.data_collator = Counts(trainer.train_dataset), Counts(trainer.data_collator)
    elif case == "trained before":
        trainer.train()
    return trainer


CASES = (
    "lora with dropout",
    "noise, checkpointing, accumulation, saves",
    "autocast",
    "an optimizer of one's own",
    "an optimizer in use, a schedule of the job's steps",
    "state of one's own",
    "trained before",
)


def told(value: Any) -> Any:
    """Return what can be compared of a value; what has no value of its own by identity."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [told(item) for item in value]
    return value if isinstance(value, int | float | str | None) else id(value)


def plain(owner: Any) -> dict[str, Any]:
    return {k: told(v) for k, v in vars(owner).items() if k != "callbacks"}


def condition(trainer: Any) -> list[Any]:
    """Return all that a sweep must leave as it is."""
    owners = (trainer, trainer.args, trainer.control, trainer.state, trainer.callback_handler)
    modules = trainer.model.modules()
    return [
        *(plain(owner) for owner in owners),
        [id(c) for c in trainer.callback_handler.callbacks],
        [(m.training, set(vars(m)), *(list(vars(m)[d]) for d in HOOKS)) for m in modules],
        [(p.grad, p.requires_grad) for p in trainer.model.parameters()],
        [id(group) for group in getattr(trainer.optimizer, "param_groups", ())],
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[union-attr]
        torch.get_rng_state().tolist(),
    ]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_parameters", "_buffers", "_modules")


def trained(trainer: Any) -> tuple[Any, Any]:
    trainer.train()
    timing = ("runtime", "per_second")
    history = [{k: v for k, v in line.items() if not any(t in k for t in timing)} for line in trainer.state.log_history]
    return history, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.usefixtures("no_plateau")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_everything_is_put_back(case: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    swept = make_case(case, make_trainer, tmp_path / "swept")
    before = condition(swept)
    weights = [p.detach().clone() for p in swept.model.parameters()]
    buffers = [b.detach().clone() for b in swept.model.buffers()]
    fresh, files = swept.optimizer is None, sorted((tmp_path / "swept").rglob("*"))
    result = sweep(lambda: swept, steps=1, path=tmp_path / "run.jsonl")
    assert result.largest == 4  # it trained, and it failed, before it was put back
    assert condition(swept) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, swept.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, swept.model.buffers(), strict=True))
    assert (swept.optimizer is None) == fresh
    assert sorted((tmp_path / "swept").rglob("*")) == files
    heard = len(swept.callback_handler.callbacks[-2].events) if case != "trained before" else 0
    assert heard == 0

    losses, end = trained(swept)
    other_losses, other_end = trained(make_case(case, make_trainer, tmp_path / "never"))
    assert losses == other_losses
    assert len(losses) > 3
    assert all(torch.equal(a, b) for a, b in zip(end, other_end, strict=True))


def test_state_of_an_optimizer_of_many_parameters(make_trainer: MakeTrainer) -> None:
    """As a full fine-tune of separate experts has them: more than the containers of a user's may hold."""
    trainer = make_trainer()
    many = [torch.nn.Parameter(torch.ones(1)) for _ in range(LARGEST_STATE + 1)]
    optimizer = trainer.optimizer = torch.optim.AdamW(many)

    def steps() -> list[float]:
        for p in many:
            p.grad = torch.full((1,), 3.0)
        optimizer.step()
        return [float(value) for p in many for value in optimizer.state[p].values()]

    before = steps()
    snapshot = Snapshot(trainer)
    assert steps() != before
    optimizer.state[torch.nn.Parameter(torch.ones(1))] = {"step": torch.ones(())}
    snapshot.restore()
    assert [float(value) for p in many for value in optimizer.state[p].values()] == before
    assert len(optimizer.state) == len(many)


def test_failure_of_the_training_goes_its_way_and_leaves_the_trainer_whole(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(rows=token_rows(LENGTHS))
    before = condition(trainer)
    wrong = trainer.model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep(lambda: trainer, path=tmp_path / "run.jsonl")
    wrong.remove()
    assert condition(trainer) == before


def test_interruption_between_the_calls_that_are_watched(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(rows=token_rows(LENGTHS))

    def presses_ctrl_c(inputs: Any) -> int:
        if (tmp_path / "run.jsonl").exists() and trainer.state.global_step == 3:
            raise KeyboardInterrupt
        return 0

    trainer.floating_point_ops = presses_ctrl_c
    before = condition(trainer)
    with pytest.raises(KeyboardInterrupt):
        sweep(lambda: trainer, batch_sizes=[1, 2], path=tmp_path / "run.jsonl")
    assert condition(trainer) == before
    log = Log(tmp_path / "run.jsonl")
    assert (log.end.status, log.end.reason) == ("interrupted", "KeyboardInterrupt")
    assert len(log.steps) == 3


class Overflows(SFTTrainer):  # type: ignore[misc]
    """Its gradients overflow at the scale that a scaler begins with, as in fp16."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * (math.inf if self.accelerator.scaler.get_scale() > 1000 else 1)


def test_no_step_is_skipped_for_its_gradients_in_fp16(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A trial whose steps are skipped has no optimizer state, and takes less memory than training does."""
    trainer = make_trainer(rows=token_rows(LENGTHS), trainer_class=Overflows, optim="adamw_torch")
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    states: list[int] = []

    class Looks(trials.Watch):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            states.append(len(trainer.optimizer.state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "Watch", Looks)
        sweep(lambda: trainer, batch_sizes=[1], steps=1, path=tmp_path / "run.jsonl")
    assert states == [len(list(trainer.model.parameters()))] * 2
    assert not any(s.skipped for s in Log(tmp_path / "run.jsonl").steps)
    assert scaler.get_scale() == 65536.0


class Weighted(SFTTrainer):  # type: ignore[misc]
    """Its sampler counts on all rows of the training set."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * len(LENGTHS), len(LENGTHS))


class Fixed(SFTTrainer):  # type: ignore[misc]
    """Its loader takes its batch size from nowhere."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def test_sampler_and_loader_of_the_users_own(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(rows=token_rows(LENGTHS), trainer_class=Weighted)
    result = sweep(lambda: trainer, steps=1, max_batch=4, path=tmp_path / "run.jsonl")
    assert [t.slots for t in result.trials] == [LONGEST, 2 * LONGEST, 4 * LONGEST]
    fixed = make_trainer(rows=token_rows(LENGTHS), trainer_class=Fixed)
    with pytest.raises(ValueError, match="Fixed loads batches of 4 rows where 1 were set: its get_train") as caught:
        sweep(lambda: fixed, steps=1, path=tmp_path / "run.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [[], iter(())])
def test_nothing_to_train_on(rows: Any, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.train_dataset = rows
    with pytest.raises(ValueError, match="the training set has no rows"):
        sweep(lambda: trainer)


def test_several_gpus_in_one_process(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.args._n_gpu = 2  # as where nothing says which one to take: the batch is spread over both
    with pytest.raises(ValueError, match="on one of the 2 GPUs: set CUDA_VISIBLE_DEVICES=0"):
        sweep(lambda: trainer)


def test_training_that_ends_without_a_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.get_train_dataloader = list
    with pytest.raises(ValueError, match="ended before its first step at batch 1"):
        sweep(lambda: trainer)


def test_price_and_a_maker_that_takes_the_batch(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    asked = []

    def make(batch: int) -> Any:
        asked.append(batch)
        ours = FtInsightCallback(tmp_path / "own.jsonl", price=1.25)
        return make_trainer([ours], rows=token_rows(LENGTHS), per_device_train_batch_size=batch)

    result = ft_insight.sweep(make, batch_sizes=[4, 2], steps=2, path=tmp_path)
    assert asked == [2]
    log = Log(tmp_path / "run.jsonl")
    assert result.path == log.follower.path
    assert log.header.price_usd_per_hour == 1.25
    assert log.header.train.batch == 4
    assert {s.other_batch for s in log.steps} == {None, 2}
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"batch_sizes": [0]}, "batch_sizes must be whole numbers of 1 or more, not 0"),
        ({"batch_sizes": []}, "batch_sizes must be"),
        ({"batch_sizes": "many"}, "batch_sizes must be 'auto' or"),
        ({"batch_sizes": [2, True]}, "batch_sizes must be"),
        ({"steps": 0}, "steps must be a whole number of 1 or more, not 0"),
        ({"steps": 1.5}, "steps must be"),
        ({"max_batch": -1}, "max_batch must be"),
        ({"batch_sizes": [64]}, "no batch of 64: the training set has 8 rows"),
        ({"make_trainer": 3}, "must be a function"),
        ({"make_trainer": lambda: 3}, "a transformers Trainer is needed, not int"),
    ],
)
def test_bad_questions_get_one_line(question: dict[str, Any], message: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        sweep(**{"make_trainer": make_trainer, **question})
    assert "\n" not in str(caught.value)


# scripts

SCRIPT = """
import sys
from pathlib import Path
import torch
from transformers import Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return {"input_ids": torch.arange(4 + i), "labels": torch.arange(4 + i)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 20)
    def forward(self, input_ids=None, labels=None):
        out = self.table(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())}

def collate(rows):
    longest = max(len(r["input_ids"]) for r in rows)
    pad = lambda t: torch.nn.functional.pad(t, (0, longest - len(t)))
    return {k: torch.stack([pad(r[k]) for r in rows]) for k in rows[0]}

class Mine(Trainer):
    def train(self, *args, **kwargs):
        return super().train(*args, **kwargs)

args = TrainingArguments(output_dir=sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), use_cpu=True,
                         report_to=[], num_train_epochs=2, dataloader_pin_memory=False, disable_tqdm=True)
trainer = Mine(model=Model(), args=args, train_dataset=Rows(), data_collator=collate)
assert __name__ == "__main__"
try:
    trainer.train()
except Exception:
    Path(sys.argv[1], "swallowed").touch()
Path(sys.argv[1], "after").touch()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FT_INSIGHT_LOG", raising=False)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_sweep_of_a_script_from_the_command_line(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ft_insight.cli", "sweep", "--steps", "2", "--max-batch", "4", script, "--", "out", "3"],
        capture_output=True,
        text=True,
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Largest batch\n  4, on the longest rows (9 tokens, of the data set)" in done.stdout
    assert "batch 1 of up to 9 tokens: fits" in done.stderr
    assert "\x1b" not in done.stderr  # plain lines where there is no terminal
    assert "Traceback" not in done.stderr
    [path] = Path(script.parent, "ft_insight_runs").glob("*/run.jsonl")
    assert f"ft-insight project {path.relative_to(script.parent)} --gpu all" in done.stdout
    log = Log(path)
    assert (log.header.purpose, log.header.train.batch, log.header.train.trainer) == ("sweep", 3, "Mine")
    assert log.of(r.Fit), log.notices
    assert os.listdir(script.parent / "out") == []  # nothing saved, and nothing of the script beyond train() was run


def test_probe_of_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, path = list(sys.argv), list(sys.path)
    assert main(["probe", str(script), "out", "2"]) == 0
    assert (sys.argv, sys.path) == (argv, path)
    [run] = Path(script.parent, "ft_insight_runs").glob("*/run.jsonl")
    log = Log(run)
    assert (log.header.purpose, log.header.train.batch, len(log.steps)) == ("probe", 2, 20)
    assert all(s.other_batch is None for s in log.steps)
    assert log.header.train.max_steps == 6  # the job: 6 rows in batches of 2, twice
    assert log.end.status == "completed"
    out = capsys.readouterr().out
    assert f"nothing is scaled by {run.relative_to(script.parent)}" in out  # a CPU tells nothing of a GPU
    from transformers import Trainer

    assert Trainer.train.__module__ == "transformers.trainer"


@pytest.mark.parametrize("verb", ["sweep", "probe"])
def test_scripts_that_cannot_be_measured(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(text: str | None, *options: str) -> tuple[int, str]:
        path = tmp_path / "script.py"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        code = main([verb, *options, str(path)])
        return code, capsys.readouterr().err

    code, err = run(None)
    assert (code, err.count("\n")) == (2, 1)
    assert "script.py does not exist" in err
    code, err = run("print('hello')")
    assert (code, err.count("\n")) == (2, 1)
    assert "ended without calling train()" in err
    code, err = run("import sys\nsys.exit(0)")
    assert code == 2
    assert "ended without calling train()" in err
    code, err = run("def f():\n    raise ValueError('mine')\nf()\n")
    assert code == 1
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert "script.py" in err.splitlines()[1]
    assert err.splitlines()[-1] == "ValueError: mine"
    assert "ft_insight" not in err
    # an error in the training that the script catches is no script that never trains
    code, err = run(
        "from transformers import Trainer\n"
        "class Mine(Trainer):\n    def __init__(self): pass\n"
        "    def __getattr__(self, name): raise KeyError('broken')\n"
        "try:\n    Mine().train()\nexcept Exception:\n    print('caught')\n"
    )
    assert code == 1
    assert err.splitlines()[-1] == "KeyError: 'broken'"
    code, err = run("def f(:\n")
    assert code == 1
    assert "SyntaxError" in err
    assert "ft_insight" not in err
    with pytest.raises(SystemExit) as left:
        run("import sys\nsys.exit(7)")
    assert left.value.code == 7
    if verb == "sweep":
        for options, message in (
            (["--batch-sizes", "1,x"], "--batch-sizes must be"),
            (["--batch-sizes", "0"], "batch_sizes must be"),
            (["--steps", "0"], "steps must be"),
            (["--max-batch", "0"], "max_batch must be"),
        ):
            code, err = run("", *options)
            assert (code, err.count("\n")) == (2, 1)
            assert message in err


def test_probe_names_its_gpu(tmp_path: Path) -> None:
    path = makers.log(tmp_path / "run.jsonl", [header(purpose="probe", devices=(makers.A40,)), *makers.steps(20)])
    text = ProbeResult(path).text()
    assert f"ft-insight project RUN --gpu A40 --probe {os.path.relpath(path)}, RUN being" in text


def test_probe_that_does_not_fit(make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_INSIGHT_LOG", str(tmp_path / "run.jsonl"))
    model = dense_model()
    fails_above(model, 1)
    trainer = make_trainer(model=model)
    before = condition(trainer)
    with pytest.raises(ValueError, match="batch 2 does not fit") as caught:
        probe_trainer(trainer, trainer.train)
    assert "\n" not in str(caught.value)
    assert condition(trainer) == before
