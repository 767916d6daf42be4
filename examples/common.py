"""What the examples share: command line, data, accuracy per epoch, and the trainer.

An example is then: ``add_arguments`` and ``resolve``, ``load_data``, a model and a tokenizer of its own, and
``make_and_train``. Bad input ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

# before torch: threads that spin while they wait make a shared CPU many times slower
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# ft_insight of this clone, should it not be installed
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ft_insight import FtInsightCallback
from ft_insight.demo.datasets import DatasetError, load_rows
from ft_insight.demo.rows import generate_rows
from ft_insight.demo.tiny import build_tokenizer
from ft_insight.demo.train import text_of

Row = dict[str, Any]

REAL: dict[str, Any] = {"steps": 0, "epochs": 10.0, "batch": 8, "max_length": 1024, "lr": 5e-5, "eval_rows": 64}
TINY: dict[str, Any] = {"steps": 0, "epochs": 2.0, "batch": 4, "max_length": 256, "lr": 5e-3, "eval_rows": 8}
TINY_ROWS = 80
"""Rows that --tiny uses unless --limit says otherwise, so that its epochs take a minute or so."""


# the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that both examples have. Those left out become None, for :func:`resolve` to fill in."""
    add = parser.add_argument
    add("--tiny", action="store_true", help="a tiny random model, fit for a CPU, instead of real weights")
    add("--model", metavar="NAME_OR_PATH", help="real weights: a hub name or a local folder")
    add("--dataset", metavar="FILE_OR_HUB_NAME", help="JSON, JSONL, or NAME[:CONFIG] (--tiny: generated if left out)")
    add("--eval-dataset", metavar="FILE_OR_HUB_NAME", help="held-out rows (default: taken out of --dataset)")
    add("--limit", type=int, metavar="N", help=f"use only the first N rows (--tiny: {TINY_ROWS})")
    add("--top-k", type=int, default=2, help="experts per token (default 2; all of them: dense)")
    add("--epochs", type=float, help=f"default {REAL['epochs']:g}, --tiny {TINY['epochs']:g}")
    add("--steps", type=int, help="end after so many optimizer steps (default 0: all epochs)")
    add("--batch", type=int, help=f"default {REAL['batch']}, --tiny {TINY['batch']}")
    add("--accumulation", type=int, default=1)
    add("--max-length", type=int, help=f"tokens at which rows are cut (default {REAL['max_length']})")
    add("--lr", type=float, help=f"peak of the cosine (default {REAL['lr']:g}, --tiny more)")
    add("--eval-rows", type=int, metavar="N", help=f"held-out rows to answer after each epoch ({REAL['eval_rows']})")
    add("--price", type=float, metavar="USD", help="what this machine costs per hour")
    add("--log", type=Path, metavar="PATH", help="default: a new folder under ft_insight_runs/")
    add("--profile", type=int, metavar="STEP", help="time all layers of each step, and record this step's kernels")
    add("--output", type=Path, metavar="FOLDER", help="save the model or its adapters here at the end")


def resolve(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    *,
    tiny: dict[str, Any] | None = None,
    real: dict[str, Any] | None = None,
) -> argparse.Namespace:
    """Fill in what was left out, from ``TINY`` or ``REAL`` and the example's own changes to them, and check it."""
    own = {**TINY, **(tiny or {})} if arguments.tiny else {**REAL, **(real or {})}
    for name, value in own.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if not arguments.tiny and not arguments.model:
        parser.error("say --tiny, or --model with a hub name or a folder of real weights")
    if not arguments.tiny and not arguments.dataset:
        parser.error("real weights need --dataset")
    for name in ("top_k", "epochs", "batch", "accumulation", "max_length", "lr"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0, not {getattr(arguments, name)}")
    for name in ("steps", "eval_rows", "limit", "price", "profile"):
        if (getattr(arguments, name) or 0) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if arguments.limit is None and arguments.tiny:
        arguments.limit = TINY_ROWS
    warnings.filterwarnings("ignore", category=FutureWarning)  # upstream's own deprecations
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    logging.set_verbosity_error()
    return arguments


def fail(message: object) -> NoReturn:
    """End with one line and exit code 2."""
    line = next(iter(str(message).strip().splitlines()), "failed")
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    raise SystemExit(2)


# data


def load_data(arguments: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Return (rows to train on, held-out rows). The latter are drawn at random, the same ones each time."""
    if arguments.dataset:
        rows = _read(arguments.dataset, arguments.limit)
    else:
        rows = generate_rows(arguments.limit or TINY_ROWS)
    if arguments.eval_dataset:
        return rows, _sample(_read(arguments.eval_dataset, None), arguments.eval_rows)[0]
    held_out, training = _sample(rows, min(arguments.eval_rows, len(rows) // 5))
    print(f"{len(training):,} rows to train on, {len(held_out)} held out, from {arguments.dataset or 'made-up rows'}")
    return training, held_out


def _sample(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    drawn = set(random.Random(0).sample(range(len(rows)), min(count, len(rows))))
    return [r for i, r in enumerate(rows) if i in drawn], [r for i, r in enumerate(rows) if i not in drawn]


def _read(source: str, limit: int | None) -> list[Row]:
    path = Path(source).expanduser()
    try:
        if path.exists() or path.suffix in (".json", ".jsonl") or source.startswith((".", "/", "~")):
            return load_rows(path, limit or None).rows
        return _read_hub(source, limit)
    except DatasetError as error:
        fail(error)


def _read_hub(source: str, limit: int | None) -> list[Row]:
    """Read the train split of a hub data set; the reader of files then tells its shape."""
    from datasets import load_dataset

    name, _, config = source.partition(":")
    try:
        loaded: Iterable[Row] = load_dataset(name, config or None, split="train")
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, offline or on an unknown name
        fail(f"{source} is no file here, and the hub did not give it ({type(error).__name__}: {error})")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name.replace('/', '_')}.jsonl"
        with file.open("w", encoding="utf-8") as out:
            for row in loaded:
                if "question" in row and "answer" in row:  # GSM8K's own column names
                    row = {"prompt": row["question"], "completion": row["answer"]}
                out.write(json.dumps(row, default=str) + "\n")
        return load_rows(file, limit or None).rows


def tiny_tokenizer(rows: Sequence[Row]) -> Any:
    """Train a small tokenizer on the rows themselves."""
    return build_tokenizer(text_of(row) for row in rows)


# answers and their score

_FORMAT = re.compile(r"answer format:\s*([\w-]+(?:/[\w-]+)+)", re.IGNORECASE)
_LETTERED = re.compile(r"(?:^|\s)\(?([A-H])[).:]\s")
_MARKED = re.compile(r"####")
_STATED = re.compile(r"\banswer\s*(?:is|:)\s*:?", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class Answer:
    """The final answer of a text: a ``number`` (GSM8K style), a ``choice`` (one of the options) or other ``text``."""

    kind: str
    value: str


def options_of(prompt: str) -> tuple[str, ...]:
    """Return what a prompt lets one choose from: ``Answer format: x/y/z``, or options marked A), B) ...; else ()."""
    if found := _FORMAT.findall(prompt):
        return tuple(found[-1].split("/"))
    letters = tuple(dict.fromkeys(_LETTERED.findall(prompt)))
    return letters if len(letters) > 1 else ()


def answer_of(text: str, options: Sequence[str] = ()) -> Answer | None:
    """Find the final answer: after the last ``####``, else after the last "answer is"; None if there is none.

    With options, a text that names exactly one of them has chosen it even without such words.
    """
    found = list(_MARKED.finditer(text)) or list(_STATED.finditer(text))
    tail = text[found[-1].end() :].strip().partition("\n")[0] if found else ""
    if options:
        return _choice(tail, options) or _choice(text, options, only=True)
    if not tail:
        return None
    number = _NUMBER.search(tail.replace("$", ""))
    if number:
        try:
            plain = Decimal(number.group().replace(",", "")).normalize()
        except InvalidOperation:
            return None
        return Answer("number", format(plain, "f"))
    return Answer("text", tail.rstrip(" .").lower())


def _choice(text: str, options: Sequence[str], *, only: bool = False) -> Answer | None:
    """Find the first option named in a text; with ``only``, the one option if no other is named."""
    places = {}
    for option in options:
        flags = 0 if len(option) == 1 else re.IGNORECASE  # a lone letter: "A" is an option, "a" an article
        if match := re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, flags):
            places[option] = match.start()
    if not places or (only and len(places) > 1):
        return None
    return Answer("choice", min(places, key=lambda option: places[option]).lower())


@dataclass(frozen=True)
class Question:
    """A held-out row whose completion has an answer that can be scored."""

    prompt: str
    options: tuple[str, ...]
    answer: Answer
    chat: tuple[Row, ...] = ()
    """The turns up to the answer, if the row is a conversation."""


def question_of(row: Row) -> Question | None:
    """Turn a row into a question; None if it holds no answer to compare with."""
    if "messages" in row:
        last = max(i for i, turn in enumerate(row["messages"]) if turn["role"] == "assistant")
        chat = tuple(row["messages"][:last])
        prompt, completion = "\n".join(turn["content"] for turn in chat), row["messages"][last]["content"]
    elif "prompt" in row:
        chat, prompt, completion = (), row["prompt"], row["completion"]
    else:
        return None
    options, plain = options_of(prompt), answer_of(completion)
    if plain is not None and plain.kind == "number" and all(len(option) == 1 for option in options):
        options = ()  # a problem with parts A and B, whose answer is a number
    answer = answer_of(completion, options)
    if answer is None:
        options, answer = (), plain
    return Question(prompt, options, answer, chat) if answer is not None else None


def score(questions: Sequence[Question], replies: Sequence[str]) -> dict[str, float]:
    """Return ``eval_accuracy`` (right, of all), ``eval_answered`` (an answer was given) and ``eval_questions``."""
    given = [answer_of(reply, q.options) for q, reply in zip(questions, replies, strict=True)]
    count = len(questions)
    right = sum(answer == q.answer for answer, q in zip(given, questions, strict=True))
    return {
        "eval_accuracy": right / count,
        "eval_answered": sum(answer is not None for answer in given) / count,
        "eval_questions": float(count),
    }


@torch.no_grad()
def greedy(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    eos_token_id: int | None,
    pad_token_id: int = 0,
    new_tokens: int,
    cache: bool = False,
) -> list[list[int]]:
    """Continue each prompt with its most likely tokens, for any model that gives logits for ``input_ids``.

    Rows are padded on the right and each is read at its own last token, so that a causal model never sees the
    padding. With ``cache`` (attention only: padding would run through the state of a Mamba layer) the keys and values
    are kept, and padded places are masked.
    """
    device = next(model.parameters()).device
    rows = [list(p) for p in prompts]
    replies: list[list[int]] = [[] for _ in rows]
    live = torch.ones(len(rows), dtype=torch.bool)
    ids, mask = _padded(rows, pad_token_id, device)
    lengths = mask.sum(1)
    options: dict[str, Any] = {"use_cache": True} if cache else {}
    kept = "cache" if "cache" in inspect.signature(type(_bare(model)).forward).parameters else "past_key_values"
    output = model(input_ids=ids, attention_mask=mask, **options)
    logits = output.logits[torch.arange(len(rows)), lengths - 1]
    for done in range(1, new_tokens + 1):
        chosen = logits.argmax(-1)
        for i, token in enumerate(chosen.tolist()):
            if live[i] and token != eos_token_id:
                replies[i].append(token)
            else:
                live[i] = False
        if not live.any() or done == new_tokens:
            break
        if cache:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            output = model(
                input_ids=chosen[:, None],
                attention_mask=mask,
                position_ids=(lengths + done - 1)[:, None],
                **{kept: output[kept]},
                **options,
            )
            logits = output.logits[:, -1]
        else:
            ids, mask = _padded([r + reply for r, reply in zip(rows, replies, strict=True)], pad_token_id, device)
            logits = model(input_ids=ids, attention_mask=mask).logits[torch.arange(len(rows)), mask.sum(1) - 1]
    return replies


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


class AccuracyCallback(TrainerCallback):
    """Answers the held-out questions before training and after each epoch, and logs how many were right.

    It works at the end of each of the trainer's evaluations, which :func:`sft_config` asks for at the start and after
    every epoch: so its time is told as evaluation, and what it logs (``eval_accuracy``, ``eval_answered``) stands
    in the run's log beside ``eval_loss``.
    """

    def __init__(
        self, rows: Sequence[Row], tokenizer: Any, batch: int = 8, *, new_tokens: int = 256, cache: bool = False
    ) -> None:
        self.questions = [q for q in map(question_of, rows) if q is not None]
        self._tokenizer, self._batch, self._new_tokens, self._cache = tokenizer, batch, new_tokens, cache
        self._trainer: Any = None

    def bind(self, trainer: Any) -> None:
        """Tell the trainer to log through."""
        self._trainer = trainer

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.questions or self._trainer is None:
            return
        training, config = model.training, model.config
        balancing = getattr(config, "output_router_logits", None)
        model.eval()
        try:
            if balancing:  # the experts' balancing loss: of no use here, and it cannot take the mask of a cache
                config.output_router_logits = False
            with self._trainer.accelerator.autocast():
                result = score(self.questions, self.replies(model))
            self._trainer.log(result)  # still in eval mode: TRL keeps what it gathers for each mode apart
        finally:
            if balancing:
                config.output_router_logits = balancing
            model.train(training)

    def replies(self, model: Any) -> list[str]:
        """Answer all questions; those of like length together."""
        prompts = [self._encode(q) for q in self.questions]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        replies = [""] * len(prompts)
        pad = self._tokenizer.pad_token_id
        for start in range(0, len(order), self._batch):
            some = order[start : start + self._batch]
            produced = greedy(
                model,
                [prompts[i] for i in some],
                eos_token_id=self._tokenizer.eos_token_id,
                pad_token_id=pad if pad is not None else self._tokenizer.eos_token_id or 0,
                new_tokens=self._new_tokens,
                cache=self._cache,
            )
            for i, tokens in zip(some, produced, strict=True):
                replies[i] = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return replies

    def _encode(self, question: Question) -> list[int]:
        if question.chat:
            text = self._tokenizer.apply_chat_template(list(question.chat), tokenize=False, add_generation_prompt=True)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self._tokenizer(question.prompt)["input_ids"])


# training


def sft_config(
    arguments: argparse.Namespace, *, checkpointing: bool = True, held_out: bool = True, **extra: Any
) -> Any:
    """Return the ``SFTConfig`` of an example: AdamW, cosine, an evaluation at the start and after each epoch."""
    from trl import SFTConfig

    renamed = "activation_checkpointing" in SFTConfig.__dataclass_fields__  # its name in newer transformers
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "output_dir": str(arguments.output or Path(tempfile.gettempdir()) / "ft_insight_example"),
        "per_device_train_batch_size": arguments.batch,
        "per_device_eval_batch_size": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "max_steps": arguments.steps or -1,
        "num_train_epochs": arguments.epochs,
        "learning_rate": arguments.lr,
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch",
        "max_length": arguments.max_length,
        name: checkpointing,
        # reentrant checkpointing would silently drop the gradient of the experts' balancing loss
        f"{name}_kwargs": {"use_reentrant": False} if checkpointing else None,
        "bf16": gpu,
        "use_cpu": not gpu,
        "logging_steps": 1,
        "eval_strategy": "epoch" if held_out else "no",
        "eval_on_start": held_out,
        "save_strategy": "no",
        "report_to": [],
        "seed": 0,
    }
    return SFTConfig(**{**options, **extra})


def make_and_train(
    model: Any,
    tokenizer: Any,
    arguments: argparse.Namespace,
    *,
    peft_config: Any = None,
    data: tuple[list[Row], list[Row]],
    cache: bool = False,
    **extra: Any,
) -> Any:
    """Train with ``SFTTrainer`` and both callbacks; return the trainer. ``extra`` goes to :func:`sft_config`."""
    from datasets import Dataset
    from trl import SFTTrainer

    training, held_out = data
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    profile = {"layers_every": 1, "kernels": arguments.profile} if arguments.profile else {}
    insight = FtInsightCallback(path=arguments.log, price=arguments.price, **profile)
    accuracy = AccuracyCallback(
        held_out, tokenizer, arguments.batch, new_tokens=48 if arguments.tiny else 256, cache=cache
    )
    if not accuracy.questions:
        print("no held-out row has an answer that can be scored (#### number, or 'answer is ...'): no accuracy")
    trainer = SFTTrainer(
        model=model,
        args=sft_config(arguments, held_out=bool(held_out), **extra),
        train_dataset=Dataset.from_list(training),
        eval_dataset=Dataset.from_list(held_out) if held_out else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[insight, accuracy],
    )
    accuracy.bind(trainer)
    if not torch.cuda.is_available():
        # TRL makes the adapters of a 4-bit model bf16, which takes a CPU twice as long
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    trainer.train()
    if arguments.output:
        trainer.save_model(str(arguments.output))
    _say_outcome(trainer.state.log_history)
    return trainer


def _say_outcome(history: Sequence[Row]) -> None:
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if losses:
        share = max(1, len(losses) // 10)
        first, last = sum(losses[:share]) / share, sum(losses[-share:]) / share
        print(f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps (means of the first and last {share})")
    for entry in history:
        if "eval_accuracy" in entry:
            print(
                f"epoch {entry.get('epoch') or 0:.2f}: accuracy {entry['eval_accuracy']:.1%}, "
                f"answered {entry['eval_answered']:.1%} of {entry['eval_questions']:.0f} held-out rows"
            )
