"""Published peaks of memory beside what `ft_insight.plan` would have said before those runs.

Each source is traced as its own training loop goes, and compared with the figure that it prints:

- PEFT's MetaMathQA runs: a plain loop around the model's own loss, AdamW over lists of tensors, the cache emptied
  every ten steps, just before the longest micro-batch of each bucket; the figure is ``max_memory_reserved()``. Rows are
  cut at 1,300 characters; of dense LaTeX, Llama 3's tokenizer makes a token of 1.95 characters (measured), which with
  the template's 15 gives a longest row of 682 tokens, below the limit of 768.
- LitGPT's resource tables (October 2023): its own decoder (transformers' where all is trained), bitsandbytes 0.41,
  gradients accumulated, the longest row first, as long as Alpaca's or the limit that the table gives; the figure is
  ``max_memory_allocated() / 1e9``, decimal gigabytes. Its scripts can take the head and the loss in chunks; its peaks
  grow as with whole logits (four copies in their own dtype, not two), so they are traced whole.
- ljm565/universal-llm-trainer: transformers with checkpointing, a cross entropy on bf16 logits, in QLoRA fp32 for all
  that is not 4-bit; the figure is ``memory_reserved() / 1e9``, decimal too (its "model memory" is parameters times
  2 / 1e9), and what a card has is the limit of it.
- Any other source with a model, a batch and a length is taken to be a Trainer's ``max_memory_reserved()``, its rows
  filled to that length. How far off that is depends on its loop, which is not known: there is no interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ft_insight.catalog import UnknownGpuError, find_gpu
from ft_insight.validate.checked import Checked
from ft_insight.validate.table import count, length_of, method_of, number, says_yes
from ft_insight.words import clean

if TYPE_CHECKING:
    from ft_insight.estimate.plan.setup import Setup
    from ft_insight.estimate.plan.steps import Traced

GIB = 1024**3
METAMATH_LENGTH = 682
ALPACA_LENGTH = {"phi-1.5": 1044, "stablelm-alpha-3b": 1034, "llama-2-7b": 1304, "llama-2-13b": 1304}
"""Longest row of Alpaca under each model's tokenizer, as LitGPT's table gives them."""
MLP = ("gate_proj", "up_proj", "down_proj")
Row = dict[str, str]


class CannotPlanError(ValueError):
    """A row that says too little, or of a kind of training that is not planned; the message says which."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a row was trained, and what its figure is."""

    model: str
    setup: Setup
    length: int
    unit_bytes: float = GIB
    reserved: bool = True
    emptied: bool = False
    """The cache is emptied before the step that sets the peak."""
    known: bool = True
    """The training loop is: what else it keeps, nobody can say, and so not how far off a plan may be."""


def check(rows: list[Row]) -> tuple[list[Checked], list[str]]:
    """Predict every row that has a peak; return the comparisons, in GiB, and the rows that cannot be, with the reason.

    Slow: about ten seconds for each different run among the rows.
    """
    from ft_insight.estimate.plan.setup import PlanError

    checked: list[Checked] = []
    refused: dict[str, int] = {}
    for row in rows:
        if not row.get("peak_mem_gib"):
            continue
        try:
            checked.append(_checked(row))
        except (CannotPlanError, PlanError) as error:
            why = str(error)
        except (ValueError, ArithmeticError, RuntimeError, LookupError, TypeError) as error:  # what torch makes of it
            why = f"its step cannot be traced: {clean(' '.join(str(error).split()), 120)}"
        else:
            continue
        line = f"{row['source'].split(' ')[0]} {row['model']} {row['method']}, {row['gpu']}: {why}"
        refused[line] = refused.get(line, 0) + 1
    return checked, [line if times == 1 else f"{line} ({times} rows)" for line, times in refused.items()]


def _checked(row: Row) -> Checked:
    from ft_insight.estimate.plan.fit import ERROR, ERROR_RUNS

    measured, batch = number(row["peak_mem_gib"]), count(row["batch_per_gpu"])
    if measured is None:
        raise CannotPlanError(f"its peak of memory is no number above 0: {clean(row['peak_mem_gib'], 40)}")
    if batch is None:
        raise CannotPlanError("the batch is not told")
    recipe = recipe_of(row)
    predicted = predict(recipe, batch, row) / GIB
    return Checked(
        method="peak memory",
        source=row["source"].split("/results/")[0],
        gpu=row["gpu"],
        label=f"{row['model']} {row['method']} batch {batch} x {recipe.length}",
        measured=measured * recipe.unit_bytes / GIB,
        predicted=predicted,
        unit="GiB",
        low=predicted * (1 - ERROR) if ERROR_RUNS and recipe.known else None,
        high=predicted * (1 + ERROR) if ERROR_RUNS and recipe.known else None,
    )


def recipe_of(row: Row) -> Recipe:
    """Return how a row was trained. Raises `CannotPlanError`."""
    if number(row.get("n_gpus", "")) not in (None, 1.0):
        raise CannotPlanError("several GPUs: sharding is not planned")
    for part, recipe in SOURCES:
        if part in row["source"]:
            return recipe(row)
    return _other(row)


def predict(recipe: Recipe, batch: int, row: Row) -> float:
    """Return the bytes that the source would have printed. Raises `CannotPlanError`."""
    from ft_insight.estimate.plan.allocator import DeviceFullError

    traced = _traced(recipe.model, recipe.setup, batch, recipe.length)
    told = re.search(r"trainable (\d+)", row.get("notes", ""))
    if told and int(told.group(1)) != traced.trainable:
        raise CannotPlanError(f"the run trained {int(told.group(1)):,} parameters, this plan {traced.trainable:,}")
    if not recipe.reserved:
        return traced.log.peak()[0]
    try:
        return _reserved(traced, _capacity(row), recipe.emptied)
    except DeviceFullError:
        raise CannotPlanError("it ran where the replay runs out of memory") from None


def _reserved(traced: Traced, capacity: int | None, emptied: bool) -> int:
    from ft_insight.estimate.plan.allocator import Allocator

    allocator = Allocator(capacity)
    for place, (key, nbytes) in enumerate(traced.log.events):
        if emptied and place == traced.second_step:
            allocator.empty_cache()
            allocator.peak_reserved = allocator.reserved
        if nbytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, nbytes)
    return allocator.peak_reserved


def _capacity(row: Row) -> int | None:
    from ft_insight.estimate.plan.fit import room

    try:
        return room(find_gpu(row["gpu"]))
    except UnknownGpuError:
        return None


@lru_cache(maxsize=32)
def _traced(model: str, setup: Setup, batch: int, length: int) -> Traced:
    from ft_insight.estimate.plan.models import find_config
    from ft_insight.estimate.plan.steps import trace_steps

    return trace_steps(find_config(model)[0], setup, batch, length)


def _known_model(name: str) -> str:
    from ft_insight.estimate.plan.models import find_config

    for each in _spellings(name):
        try:
            find_config(each)
        except ValueError:
            continue
        return each
    raise CannotPlanError(f"the architecture of {clean(name, 60) or 'a model without a name'} is not in the catalogue")


def _spellings(name: str) -> list[str]:
    """Return what a model may be called in the catalogue: ``Llama2 7B Chat`` is ``llama-2-7b``.

    Only letters, digits, points and dashes are kept, so that no cell is taken for a path.
    """
    words = re.sub(r"\([^)]*\)", "", name).lower().rsplit("/", 1)[-1]
    words = re.sub(r"(\d)\s+([bm])\b", r"\1\2", words.strip())
    words = re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")
    words = re.sub(r"^meta-", "", words)
    words = re.sub(r"^(llama|phi|gemma|smollm|pythia|mistral)(?=\d)", r"\1-", words).replace("smollm-2", "smollm2")
    words = re.sub(r"^qwen-(?=\d\.|3)", "qwen", words)
    bare = re.sub(r"-(?:hf|chat|instruct|it|base|v0\.1|v1\.0|4k|1t|3t)(?=-|$)", "", words)
    sized = re.sub(r"-\d+(?:\.\d+)?[bm]$", "", bare)  # phi-1.5 1.3 B
    return [each for each in dict.fromkeys((words, bare, sized)) if each]


def _metamath(row: Row) -> Recipe:
    from ft_insight.estimate.plan.setup import Setup

    kind, _, variant = row["method"].partition(":")
    setup = Setup(autocast=False, checkpointing=False, optimizer="adamw_torch", loss="trainer", keeps_outputs=True)
    if kind == "full-finetuning":
        setup = replace(setup, method="full")
    elif kind == "lora" and not re.search("lorafa|mica|bdlora|velora|kasa|riemannian", variant):
        setup = replace(setup, **_lora(variant))
    else:
        raise CannotPlanError(f"{row['method']}: plans are for full fine-tuning, LoRA and QLoRA")
    return Recipe(_known_model(row["model"]), setup, METAMATH_LENGTH, emptied=True)


def _lora(variant: str) -> dict[str, Any]:
    rank = re.search(r"rank(\d+)", variant)
    if rank is None:
        raise CannotPlanError("the rank is not told")
    targets = MLP if "target-mlp" in variant else ("q_proj", "v_proj")
    return {"rank": int(rank.group(1)), "targets": targets, "dora": "dora" in variant}


def _litgpt(row: Row) -> Recipe:
    from ft_insight.estimate.plan.setup import Setup

    method = row["method"]
    if not re.match(r"(?i)q?lora|full", method):
        raise CannotPlanError(f"{method}: plans are for full fine-tuning, LoRA and QLoRA")
    model = _known_model(row["model"])
    length = _whole(length_of(row.get("seq_len", ""))) or ALPACA_LENGTH.get(model)  # rows cut at it, else whole ones
    if length is None:
        raise CannotPlanError(f"the longest row of Alpaca under the tokenizer of {row['model']} is not told")
    rank = re.search(r"rank (\d+)", row.get("notes", ""))
    setup = Setup(
        method=method_of(method) or "lora",
        rank=int(rank.group(1)) if rank else 8,
        dropout=0.05,
        autocast=False,
        checkpointing=False,
        optimizer="adamw_torch",
        accumulation=2,
        loss="own-dtype",
        padded=False,
        double_quant=method.endswith("-dq)"),
        keeps_outputs=True,
        old_bitsandbytes=True,
        model_code="transformers" if method.lower().startswith("full") else "litgpt",
    )
    return Recipe(model, setup, length, unit_bytes=1e9, reserved=False)


def _ljm(row: Row) -> Recipe:
    from ft_insight.estimate.plan.setup import Setup

    model = _known_model(row["model"])
    quantised = row["method"] == "QLoRA"
    full = row["method"] == "Full"
    phi = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    setup = Setup(
        method="full" if full else row["method"].lower(),
        rank=8,
        targets=None if full else phi if model.startswith("phi-3") else ("q_proj", "v_proj", "k_proj"),
        dropout=0.05,
        dtype="float32" if quantised else "bfloat16",
        adapter_dtype="float32" if quantised else None,
        autocast=False,
        checkpointing=True,
        optimizer="adamw_torch",
        accumulation=1 if full else 2,
        loss="own-dtype",
        padded=False,
        attention="sdpa",
    )
    return Recipe(model, setup, _stated_length(row), unit_bytes=1e9)


def _other(row: Row) -> Recipe:
    from ft_insight.estimate.plan.setup import Setup

    kind = re.match(r"(?i)(q-?lora|lora|full)\b(.*)", row["method"])
    if kind is None or re.search(r"(?i)emb|head|gptq|8-?bit|int8", kind.group(2)):
        raise CannotPlanError(f"{row['method']}: plans are for full fine-tuning, LoRA and QLoRA")
    mixed = re.search(r"(?i)mixed|amp|autocast", row["precision"])
    whole = mixed or re.search(r"(?i)fp32|float32|tf32|32-true", row["precision"])
    setup = Setup(
        method=method_of(kind.group(1)) or "lora",
        dtype="float32" if whole else "bfloat16",
        autocast=bool(mixed),
        checkpointing=says_yes(row["grad_ckpt"]),
        optimizer="adamw_torch",
        loss="trainer",
        padded=False,
    )
    return Recipe(_known_model(row["model"]), setup, _stated_length(row), known=False)


def _stated_length(row: Row) -> int:
    length = _whole(number(row.get("seq_len", "")))
    if length is None:
        raise CannotPlanError("the length of the rows is not told")
    return length


def _whole(length: float | None) -> int | None:
    return None if length is None else int(length)


SOURCES: tuple[tuple[str, Callable[[Row], Recipe]], ...] = (
    ("MetaMathQA", _metamath),
    ("litgpt", _litgpt),
    ("ljm565", _ljm),
)
