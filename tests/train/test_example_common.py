from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from ft_insight import records as r
from tests.train.conftest import Log, MakeTrainer, dense_model, moe_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


common: Any = load("common", EXAMPLES / "common.py")
Answer = common.Answer


# scoring


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "number", "72"),
        ("#### 1,234.50", "number", "1234.5"),
        ("#### $18", "number", "18"),
        ("#### -3", "number", "-3"),
        ("#### 10\n#### 12 and more", "number", "12"),
        ("So 9 * $2 = $18. The answer is $18.", "number", "18"),
        ("The answer is: 1200", "number", "1200"),
        ("The answer is .5", "number", "0.5"),
        ("The answer is 5. No, wait, the answer is 6.", "number", "6"),
        ("The answer is:\n7\n8", "number", "7"),
        ("the correct answer is blue.", "text", "blue"),
    ],
)
def test_final_answers(text: str, kind: str, value: str) -> None:
    assert common.answer_of(text) == Answer(kind, value)


@pytest.mark.parametrize("text", ["", "I think it is 42", "####", "the answer is"])
def test_no_answer_is_none(text: str) -> None:
    assert common.answer_of(text) is None


def test_hundred_is_not_written_as_an_exponent() -> None:
    assert common.answer_of("#### 100") == common.answer_of("The answer is 100.0.") == Answer("number", "100")


def test_choices() -> None:
    options = common.options_of("Which?\n\nAnswer1: a Answer2: b\n\nAnswer format: answer1/answer2/answer3")
    assert options == ("answer1", "answer2", "answer3")
    read = common.answer_of
    assert read("the correct answer is answer2", options) == Answer("choice", "answer2")
    assert read("Answer3", options) == Answer("choice", "answer3")
    assert read("answer1 or answer2, who knows", options) is None
    assert read("answer1 is wrong; the correct answer is answer2 not answer3", options) == Answer("choice", "answer2")
    assert read("the correct answer is answer22", options) is None
    assert read("the correct answer is False", ("true", "false")) == Answer("choice", "false")
    lettered = common.options_of("Where?\nA) at home\nB) at sea")
    assert lettered == ("A", "B")
    assert read("It is a trap, the answer is B) at sea", lettered) == Answer("choice", "b")
    assert common.options_of("A man. What is 2 + 2?") == ()


def test_score_counts_right_and_answered() -> None:
    rows = [
        {"prompt": "1+1?", "completion": "#### 2"},
        {"prompt": "2+2?", "completion": "#### 4"},
        {"prompt": "Sky?\n\nAnswer format: true/false", "completion": "the correct answer is true"},
        {"messages": [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "The answer is 6."}]},
    ]
    questions = [common.question_of(row) for row in rows]
    assert questions[3].chat == ({"role": "user", "content": "3+3?"},)
    result = common.score(questions, ["so #### 2.0", "no idea", "the correct answer is false", "The answer is 6"])
    assert result == {"eval_accuracy": 0.5, "eval_answered": 0.75, "eval_questions": 4.0}
    assert common.question_of({"text": "just a text"}) is None
    assert common.question_of({"prompt": "Say hello", "completion": "hello"}) is None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("gsm8k_train.jsonl", {"number"}), ("commonsense.jsonl", {"choice"}), ("math_instruct.json", None)],
)
def test_every_reference_of_the_shared_files_can_be_read(name: str, kinds: set[str] | None) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    questions = [common.question_of(row) for row in common.load_rows(path).rows]
    known = [q for q in questions if q is not None]
    assert len(known) > 0.97 * len(questions)
    if kinds:
        assert {q.answer.kind for q in known} == kinds
    right = common.score(known, [row["completion"] for row in common.load_rows(path).rows][: len(known)])
    if len(known) == len(questions):
        assert right["eval_accuracy"] == 1.0


# generation


@pytest.mark.parametrize("build", [dense_model, moe_model])
def test_greedy_equals_one_row_at_a_time_with_and_without_cache(build: Any) -> None:
    model = build().eval()
    prompts = [[11, 12, 13, 14, 15, 16], [21, 22], [31, 32, 33, 34]]
    options: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 1, "new_tokens": 7}
    alone = [common.greedy(model, [p], **options)[0] for p in prompts]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(7):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    assert alone == expected
    assert common.greedy(model, prompts, **options) == expected
    assert common.greedy(model, prompts, cache=True, **options) == expected
    stop = expected[1][2]
    cut = common.greedy(model, prompts, **{**options, "eos_token_id": stop})
    assert cut[1] == expected[1][: expected[1].index(stop)]


def test_accuracy_is_logged_before_training_and_after_each_epoch(
    make_trainer: MakeTrainer, tokenizer: Any, tmp_path: Path
) -> None:
    from ft_insight import FtInsightCallback

    rows = [{"prompt": "one two", "completion": "#### 3"}, {"prompt": "four", "completion": "#### 4"}]
    accuracy = common.AccuracyCallback(rows, tokenizer, 2, new_tokens=3)
    modes: list[tuple[bool, Any]] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            modes.append((model.training, model.config.output_router_logits))

    path = tmp_path / "run.jsonl"
    model = moe_model()
    held_out = [{"input_ids": [11, 12, 13], "labels": [11, 12, 13]}]
    from datasets import Dataset

    trainer = make_trainer(
        [FtInsightCallback(path=path), accuracy, Look()],
        model=model,
        eval_rows=Dataset.from_list(held_out),
        max_steps=-1,
        num_train_epochs=2,
        eval_strategy="epoch",
        eval_on_start=True,
    )
    accuracy.bind(trainer)
    trainer.train()
    log = Log(path)
    logged = [x for x in log.of(r.Logs) if "eval_accuracy" in x.values]
    assert [x.step for x in logged] == [0, 4, 8]
    assert all(x.values["eval_accuracy"] == 0 and x.values["eval_questions"] == 2 for x in logged)
    assert modes == [(True, True)] * 8  # the balancing loss is on again, and so is training mode
    assert sum("eval_aux_loss" in x.values for x in logged) == 0
    assert len([s for s in log.of(r.Span) if s.kind == "evaluation"]) == 3


# the command line and data


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="example")
    common.add_arguments(parser)
    return common.resolve(parser, parser.parse_args(words))


def test_defaults_depend_on_tiny() -> None:
    tiny, real = arguments("--tiny"), arguments("--model", "x", "--dataset", "y", "--epochs", "3")
    assert (tiny.batch, tiny.limit, tiny.epochs) == (4, common.TINY_ROWS, 2.0)
    assert (real.lr, real.limit, real.epochs) == (5e-5, None, 3.0)


@pytest.mark.parametrize(
    "words",
    [[], ["--model", "x"], ["--tiny", "--epochs", "0"], ["--tiny", "--steps", "-1"], ["--tiny", "--top-k", "0"]],
)
def test_bad_options_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments(*words)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_rows_are_held_out_and_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}?", "completion": f"#### {i}"} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    options = arguments("--tiny", "--dataset", str(file), "--eval-rows", "6")
    training, held_out = common.load_data(options)
    assert len(held_out) == 6
    assert sorted(row["prompt"] for row in training + held_out) == sorted(row["prompt"] for row in rows)
    assert common.load_data(options) == (training, held_out)
    other = arguments("--tiny", "--dataset", str(file), "--eval-dataset", str(file), "--eval-rows", "3")
    training, held_out = common.load_data(other)
    assert (len(training), len(held_out)) == (40, 3)


def test_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        common.load_data(arguments("--tiny", "--dataset", str(tmp_path / "missing.jsonl")))
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
