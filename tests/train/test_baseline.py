"""Rows shown before and after a run: counted right, on the trainer's own tokens, and without any trace in training."""

from __future__ import annotations

import inspect
import json
import pickle
import random
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

from ft_insight import FtInsightCallback
from ft_insight import records as r
from ft_insight.callbacks import FtInsightWarning
from ft_insight.callbacks.baseline import check_source, read_rows
from ft_insight.callbacks.expert_watch import ExpertWatch
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.seams import Seams
from ft_insight.callbacks.undisturbed import undisturbed
from ft_insight.compare import compare_sections
from ft_insight.reader import read_run
from ft_insight.report import render
from ft_insight.summary import summary_lines
from tests.train.conftest import Log, MakeTrainer, dense_model, lora, moe_model, token_rows
from tests.train.families import FAMILIES, build, inputs
from tests.train.planted import VirtualClock

# 17 tokens in rows of unlike length: batches of two are padded
LOOK = token_rows([6, 3, 5, 3], seed=5)


def passes(log: Log) -> dict[str, r.Experts]:
    return {x.mode: x for x in log.of(r.Experts) if x.mode in ("before", "after")}


def notices(log: Log) -> list[str]:
    return [n.text for n in log.of(r.Notice) if n.collector in ("baseline", "experts", "ledger")]


def by_hand(model: Any, rows: Dataset) -> tuple[tuple[int, ...], ...]:
    """Show the model one row at a time, without padding, and count what each router returns."""
    counts: list[list[int]] = []
    handles = []
    for block in model.model.layers:
        counts.append([0] * 4)

        def note(module: Any, args: Any, output: Any, row: list[int] = counts[-1]) -> None:
            for expert in output[2].flatten().tolist():
                row[expert] += 1

        handles.append(block.mlp.gate.register_forward_hook(note))
    model.eval()
    with torch.no_grad():
        for ids in rows["input_ids"]:
            model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return tuple(map(tuple, counts))


def test_counts_are_those_of_a_pass_made_by_hand(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    truth = by_hand(moe_model(), LOOK)
    trainer = make_trainer(
        [FtInsightCallback(tmp_path / "run.jsonl", before=LOOK)], model=moe_model(), learning_rate=3e-2
    )
    trainer.train()
    log = Log(tmp_path / "run.jsonl")
    seen = passes(log)
    assert seen["before"].counts == truth
    assert seen["after"].counts == by_hand(trainer.model, LOOK) != truth
    for record, step in ((seen["before"], 0), (seen["after"], 4)):
        assert record.layers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
        assert (record.tokens, record.queries, record.step) == ((17, 17), 4, step)
        assert (record.method, record.padding_counted) == ("exact", False)
    assert notices(log) == []


def test_its_time_is_a_span_and_of_no_step(make_trainer: MakeTrainer, tmp_path: Path, virtual: VirtualClock) -> None:
    """Time passes in the model alone: 2 s in each call of training, 3 s in each of the four of the two passes."""
    path, model = tmp_path / "run.jsonl", moe_model()
    model.model.layers[0].register_forward_hook(lambda module, *_: virtual.work(2.0 if module.training else 3.0))
    make_trainer([FtInsightCallback(path, before=LOOK)], model=model).train()
    log = Log(path)
    spans = [s for s in log.of(r.Span) if s.kind == "baseline"]
    assert [(s.step, s.wall_s) for s in spans] == [(0, 6.0), (4, 6.0)]
    assert [s.wall_s for s in log.steps] == [2.0] * 4
    first, last = log.steps[0], log.steps[-1]
    assert spans[0].t_s + spans[0].wall_s <= first.t_s
    assert spans[1].t_s >= last.t_s + last.wall_s
    view, _ = read_run(path)
    assert view.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    part = next(p for p in view.outside if p.name == "baseline")
    assert part.seconds == pytest.approx(sum(s.wall_s for s in spans), abs=1e-6)
    assert len(view.experts_before) == 2
    assert sum(view.experts[0].counts) == 2 * view.totals.real_tokens  # training's counts are its own


class Witness(TrainerCallback):
    """Notes the state of random numbers at the first step, and all events."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self.events: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.events.append("step")
        numpy_state = np.random.get_state()
        self.numbers.append(
            (random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist())
        )

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("evaluate")

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("prediction")


class Greedy(SFTTrainer):
    """Draws from every source of random numbers whenever rows are prepared."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        random.random()
        np.random.rand()
        torch.rand(1)
        return super()._prepare_dataset(*args, **kwargs)


HARMLESS: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"attention_dropout": 0.3, "router_jitter_noise": 0.1}},
    "lora, checkpointing": {"peft_config": {"lora_dropout": 0.2}, "checkpointing": True},
    "evaluation, shuffled": {
        "shuffle_dataset": True,
        "eval_rows": token_rows([6, 4], seed=9),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
    },
    # its rotary embedding grows with the longest row that it has seen
    "dynamic rotary embedding": {
        "model": {
            "head_dim": 16,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        "look": token_rows([40, 6], seed=5),
    },
}


@pytest.mark.parametrize("case", HARMLESS)
def test_losses_weights_and_random_numbers_are_those_without(
    case: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def trained(**options: Any) -> tuple[Any, ...]:
        settings = dict(HARMLESS[case])
        look = settings.pop("look", LOOK)
        model = moe_model(**settings.pop("model", {}))
        if "peft_config" in settings:
            settings["peft_config"] = lora(**settings["peft_config"])
        witness = Witness()
        mine = [FtInsightCallback(tmp_path / "run.jsonl", before=look)] if options["observed"] else []
        trainer = make_trainer([*mine, witness], model=model, trainer_class=Greedy, **settings)
        trainer.train()
        history = [
            {k: v for k, v in line.items() if not re.search("runtime|per_second", k)}
            for line in trainer.state.log_history
        ]
        asks = [(name, p.requires_grad, p.grad is None) for name, p in trainer.model.named_parameters()]
        state = {name: x.clone() for name, x in trainer.model.state_dict(keep_vars=True).items()}
        modes = {name: module.training for name, module in trainer.model.named_modules()}
        return history, asks, modes, witness.numbers, witness.events, state

    *without, weights = trained(observed=False)
    *observed, after = trained(observed=True)
    assert observed == without
    assert weights.keys() == after.keys()
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    assert set(passes(Log(tmp_path / "run.jsonl"))) == {"before", "after"}
    assert notices(Log(tmp_path / "run.jsonl")) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_keeps_anything_of_a_look(name: str) -> None:
    """All that a model holds is compared, by its pickle, and what it then makes of a batch, with a twin's."""
    torch.manual_seed(0)
    model, twin = build(name).train(), build(name).train()
    before = pickle.dumps(model)
    with undisturbed(model):
        model(**{key: torch.cat([ids] * 6, dim=1) for key, ids in inputs(name).items()})  # beyond its longest position
    assert pickle.dumps(model) == before
    seen, expected = trained_once(model, name), trained_once(twin, name)
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[part], expected[part]) for part in seen)


def trained_once(model: Any, name: str) -> dict[str, torch.Tensor]:
    """Return all tensors that a training pass hands out, the routers' scores included, and all gradients."""
    torch.manual_seed(1)
    known = inspect.signature(type(model).forward).parameters
    asked = {"output_router_logits": True} if "output_router_logits" in known else {}
    outputs = model(**inputs(name), **asked)
    flat = {f"{key}.{at}": t for key, value in outputs.items() for at, t in enumerate(tensors_of(value))}
    next(t for t in flat.values() if t.requires_grad).float().sum().backward()
    return {**flat, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in tensors_of(part)] if isinstance(value, tuple | list) else []


def test_hooks_that_a_first_call_installs_are_not_installed_twice(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """transformers hooks its routers at the first call that asks for their scores, and notes that on the model."""
    model = moe_model(output_router_logits=True)
    looked = FtInsightCallback(tmp_path / "run.jsonl", before=LOOK)
    heard: list[int] = []

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **rest)
            heard.append(len(outputs.router_logits))
            return (loss, outputs) if return_outputs else loss

    make_trainer([looked], model=model, trainer_class=Counting).train()
    assert heard == [2] * 4  # of two layers, each once
    assert notices(Log(tmp_path / "run.jsonl")) == []


def test_a_router_is_heard_once_after_a_look() -> None:
    """Its state put back, a model has the hooks of before the look, when it was not known yet which would be needed."""
    model = build("deepseek_v4")
    watch = ExpertWatch(model)
    assert watch.counter is not None
    seams, observer = Seams(), SimpleNamespace(guard=Guard(lambda *_: None), router_chose=watch.counter.count)
    for index, router in enumerate(watch.counter.routers):
        seams.hook_router(observer, index, router.tap)

    def hooks() -> list[int]:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    with undisturbed(model):
        watch.forward_begins("before", None)
        model(**inputs("deepseek_v4"))
        once = hooks()
    watch.forget("before")
    assert hooks() == once
    seams.remove()
    assert not any(hooks())


def test_buffers_attributes_and_modes_are_put_back() -> None:
    class Noting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("large", torch.zeros(3 << 20), persistent=False)
            self.register_buffer("hidden", torch.zeros(2), persistent=False)
            self.table = torch.zeros(2)
            self.written = torch.zeros(2)
            self.caches: dict[int, list[int]] = {1: [1]}
            self.order = deque([1, 2])
            self.longest = 1
            self.bias = torch.nn.Parameter(torch.zeros(2))
            self.frozen = torch.nn.Dropout().eval()

        def forward(self, grown: bool) -> None:
            self.seen += 1
            self.hidden.copy_(torch.ones(2))
            self.table.add_(1)
            self.written.data.fill_(1)  # which no count of writes tells
            self.bias.data = torch.ones(2)
            self.caches[1].append(2)
            self.caches[9] = []
            self.order.rotate()
            self.longest = 9
            self.extra = torch.ones(3)
            self.register_buffer("late", torch.ones(1))
            if grown:
                self.large[0] = 1

    model = Noting()
    buffer = model.seen
    with undisturbed(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        model(False)
    assert model.seen is buffer
    assert (buffer.tolist(), model.longest) == ([0, 0], 1)
    assert [t.tolist() for t in (model.hidden, model.table, model.written, model.bias)] == [[0, 0]] * 4
    assert (model.caches, list(model.order)) == ({1: [1]}, [1, 2])
    assert not hasattr(model, "extra")
    assert set(dict(model.named_buffers())) == {"seen", "large", "hidden"}
    assert (model.training, model.frozen.training) == (True, False)
    with pytest.raises(RuntimeError, match=r"Noting\.large"), undisturbed(model):
        model(True)
    with pytest.raises(KeyboardInterrupt), undisturbed(model):
        raise KeyboardInterrupt
    assert model.training


RAW = [{"text": "one two three four one"}, {"text": "two two"}, {"text": "three one four"}]


def as_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_json(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows))
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "rows": lambda _: RAW,
    "data set": lambda _: Dataset.from_list(RAW),
    "jsonl": lambda folder: as_jsonl(folder / "rows.jsonl", RAW),
    "json": lambda folder: str(as_json(folder / "rows.json", RAW)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_raw_rows_become_the_trainers_own_tokens(
    source: str, make_trainer: MakeTrainer, tmp_path: Path, tokenizer: Any
) -> None:
    before = SOURCES[source](tmp_path)
    trainer = make_trainer(
        [FtInsightCallback(tmp_path / "run.jsonl", before=before)], model=moe_model(), max_steps=1, max_length=5
    )
    trainer.train()
    # SFTTrainer ends each row with the end token, and cuts it at max_length
    ids = [tokenizer(row["text"] + tokenizer.eos_token)["input_ids"][:5] for row in RAW]
    seen = passes(Log(tmp_path / "run.jsonl"))
    assert seen["before"].counts == by_hand(moe_model(), Dataset.from_dict({"input_ids": ids}))
    assert seen["before"].tokens == (sum(map(len, ids)),) * 2


@pytest.mark.parametrize("options", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 16}])
def test_rows_are_counted_alike_where_training_is_flattened(
    options: dict[str, Any], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(
        [FtInsightCallback(tmp_path / "run.jsonl", before=LOOK)], model=moe_model(), max_steps=1, **options
    ).train()
    before = passes(Log(tmp_path / "run.jsonl"))["before"]
    assert (before.tokens, before.queries) == ((17, 17), 4)
    assert sum(before.counts[0]) == 2 * 17


def test_a_plain_trainer_takes_tokenised_rows(tmp_path: Path, tokenizer: Any, make_trainer: MakeTrainer) -> None:
    def trained(name: str, before: Any) -> Log:
        sft = make_trainer(max_steps=1)
        trainer = Trainer(
            model=moe_model(),
            args=sft.args,
            train_dataset=token_rows([6] * 4, prompt=0),
            data_collator=sft.data_collator,
            processing_class=tokenizer,
            callbacks=[FtInsightCallback(tmp_path / name, before=before)],
        )
        trainer.train()
        return Log(tmp_path / name)

    assert passes(trained("a.jsonl", LOOK))["before"].counts == by_hand(moe_model(), LOOK)
    with pytest.warns(FtInsightWarning, match="baseline is off"):
        log = trained("b.jsonl", RAW)
    assert notices(log) == ["off: ValueError: the rows of before= have no input_ids, and Trainer tokenises none"]


BAD_ROWS: dict[str, tuple[list[Any], str]] = {
    "no text": ([{"text": "one"}, {"text": None}], "off: "),
    "unknown columns": ([{"question": "one"}], "off: "),
    "no mapping": ([{"text": "one"}, 7], "off: ValueError: row 1 of before= is no mapping of columns to values"),
    "no rows": ([], "off: ValueError: before= has no rows"),
    "no tokens of this model": ([{"input_ids": [10, 11]}, {"input_ids": [10, 99_999]}], "off: IndexError: "),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_cannot_be_shown_are_a_notice(case: str, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    rows, said = BAD_ROWS[case]
    path = tmp_path / "run.jsonl"
    trainer = make_trainer([FtInsightCallback(path, before=rows)], model=moe_model())
    with pytest.warns(FtInsightWarning, match="baseline is off for the rest of this run"):
        trainer.train()
    log = Log(path)
    assert len(notices(log)) == 1
    assert notices(log)[0].startswith(said)
    assert "\n" not in notices(log)[0]
    assert passes(log) == {}  # nor what a pass that failed had counted so far
    assert (log.end.status, len(log.steps)) == ("completed", 4)
    assert trainer.model.training


def test_running_out_of_memory_is_a_notice(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = moe_model()

    def fail(module: Any, args: Any, output: Any) -> None:
        if not module.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    model.model.layers[1].register_forward_hook(fail)
    path = tmp_path / "run.jsonl"
    with pytest.warns(FtInsightWarning, match="baseline is off"):
        make_trainer([FtInsightCallback(path, before=LOOK)], model=model).train()
    log = Log(path)
    assert notices(log) == ["off: OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"]
    assert passes(log) == {}
    assert sum(sum(x.counts[0]) for x in log.of(r.Experts)) == 2 * sum(
        m.real_tokens for s in log.steps for m in s.micro
    )


def test_a_model_without_experts_says_so(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path, before=LOOK)], model=dense_model(), max_steps=1).train()
    assert notices(Log(path)) == ["no router to count at: before= tells nothing"]


def test_only_the_first_thousand_rows_count(tmp_path: Path) -> None:
    many = [{"text": str(i)} for i in range(1001)]
    for source in (many, iter(many), Dataset.from_list(many), as_jsonl(tmp_path / "rows.jsonl", many)):
        rows, more = read_rows(source)
        assert (len(rows), rows[-1], more) == (1000, {"text": "999"}, True)
    assert read_rows(many[:1000])[1] is False


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (7, "before must be a data set, a list of rows or a file of them, not int"),
        ({"train": [], "test": []}, "before must be one data set, not several: choose one of train, test"),
        ("rows.csv", "before must be a data set, a list of rows or a .json or .jsonl file, not 'rows.csv'"),
        ("/nowhere/rows.json", "before='/nowhere/rows.json': there is no such file"),
    ],
)
def test_what_are_no_rows_is_refused_at_once(source: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        FtInsightCallback(before=source)
    with pytest.raises(ValueError, match=re.escape(said)):
        check_source(source)


def test_a_resumed_run_keeps_what_was_before_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    settings = {"save_strategy": "steps", "save_steps": 2}
    for steps, checkpoint in ((2, None), (4, str(tmp_path / "out" / "checkpoint-2"))):
        trainer = make_trainer([FtInsightCallback(path, before=LOOK)], model=moe_model(), max_steps=steps, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
    log = Log(path)
    assert [(x.mode, x.step) for x in log.of(r.Experts) if x.mode != "train"] == [
        ("before", 0),
        ("after", 2),
        ("after", 4),
    ]
    view, _ = read_run(path)
    assert view.load_change is not None
    assert view.load_change.rows == 4
    assert tuple(load.counts for load in view.experts_before) == by_hand(moe_model(), LOOK)
    assert tuple(load.counts for load in view.experts_after) == by_hand(trainer.model, LOOK)


class Towards(TrainerCallback):
    """Turns the routers of a model towards expert 3 during training."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            for block in model.model.layers:
                gate = block.mlp.gate
                route = gate.forward

                def forced(hidden: torch.Tensor, route: Any = route) -> Any:
                    logits, scores, indices = route(hidden)
                    return logits, scores, torch.full_like(indices, 3)

                gate.forward = forced


def test_readers_show_what_became_of_the_load(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path, plain = tmp_path / "run.jsonl", tmp_path / "plain.jsonl"
    model = {"num_experts_per_tok": 1}
    make_trainer([FtInsightCallback(path, before=LOOK), Towards()], model=moe_model(**model)).train()
    make_trainer([FtInsightCallback(plain, before=LOOK)], model=moe_model(**model), learning_rate=0.0).train()
    view, status = read_run(path)
    change = view.load_change
    assert change is not None
    assert [load.counts for load in change.end] == [(0, 0, 0, 17)] * 2
    # 17 tokens of 4 rows all to one of 4 experts: means 0, 0, 0, 4.25 and so a variance of 3/16 x 4.25²
    assert change.model_end is not None
    assert change.model_end.variance_n == pytest.approx(3 / 16 * 4.25**2)
    first = sum(load.counts[3] for load in change.start)
    share = f"{first / 34 * 100:.0f}% -> 100%"
    shown = render(view, status)
    assert "fine-tuning changed the experts' load (the same 4 rows before and after the run)" in shown
    assert f"expert 3 took {share}" in shown
    assert f"expert 3 moved most: {share}" in shown
    assert "-> 3.39" in shown
    summary = "\n".join(summary_lines(view))
    assert "-> 3.39 on the same 4 rows before and after the run" in summary
    data = json.loads(render(view, status, "json"))
    assert data["load_change"]["basis"] == "the same 4 rows before and after the run"
    assert data["experts_after"][1]["counts"] == [0, 0, 0, 17]

    other, _ = read_run(plain)
    assert [load.counts for load in other.experts_after] == [load.counts for load in other.experts_before]
    sections = compare_sections(other, view)
    assert "counted on the same 4 rows after each run" in sections[1].after
    assert sections[1].table[2][1:5] == ("0", "0", "0", "4.25")


def test_without_it_training_is_compared_with_itself(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make_trainer([FtInsightCallback(path), Towards()], model=moe_model()).train()
    assert passes(Log(path)) == {}
    view, status = read_run(path)
    assert view.load_change is not None
    assert view.load_change.basis == "first and latest 5% of the steps"
    assert "from start to end of the run (first and latest 5% of the steps)" in render(view, status)
