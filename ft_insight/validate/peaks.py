"""Published peaks of memory beside what `ft_insight.plan` would have said before those runs.

Each source is traced as its own training loop goes, and compared with the figure that it prints:

- PEFT's MetaMathQA runs: a plain loop around the model's own loss, AdamW over lists of tensors, the cache emptied
  every ten steps, just before the longest micro-batch of each bucket; the figure is ``max_memory_reserved()``. Rows are
  cut at 1,300 characters; of dense LaTeX, Llama 3's tokenizer makes a token of 1.95 characters (measured), which with
  the template's 15 gives a longest row of 682 tokens, below the limit of 768.
- LitGPT's resource tables (October 2023): its own decoder, bitsandbytes 0.41, gradients accumulated, the longest row
  first; the figure is ``max_memory_allocated() / 1e9``, decimal gigabytes. Its scripts can take the head and the loss
  in chunks; its peaks grow as with whole logits (four copies in their own dtype, not two), so they are traced whole.
- ljm565/universal-llm-trainer: transformers with checkpointing, a cross entropy on bf16 logits, in QLoRA fp32 for all
  that is not 4-bit; the figure is ``memory_reserved() / 1e9``, decimal too (its "model memory" is parameters times
  2 / 1e9), and what a card has is the limit of it.
- Any other source with a model, a batch and a length is taken to be a Trainer's ``max_memory_reserved()``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ft_insight.catalog import UnknownGpuError, find_gpu
from ft_insight.validate.checked import Checked

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


def check(rows: list[Row]) -> tuple[list[Checked], list[str]]:
    """Predict every row that has a peak; return the comparisons, in GiB, and the rows that cannot be, with the reason.

    Slow: about ten seconds for each different run among the rows.
    """
    checked: list[Checked] = []
    refused: list[str] = []
    for row in rows:
        if not row.get("peak_mem_gib"):
            continue
        try:
            checked.append(_checked(row))
        except ValueError as error:
            refused.append(f"{row['source'].split(' ')[0]} {row['model']} {row['method']}, {row['gpu']}: {error}")
    return checked, refused


def _checked(row: Row) -> Checked:
    from ft_insight.estimate.plan.fit import ERROR, ERROR_RUNS

    recipe = recipe_of(row)
    batch = int(row["batch_per_gpu"])
    predicted = predict(recipe, batch, row) / GIB
    return Checked(
        method="peak memory",
        source=row["source"].split("/results/")[0],
        gpu=row["gpu"],
        label=f"{row['model']} {row['method']} batch {batch} x {recipe.length}",
        measured=float(row["peak_mem_gib"]) * recipe.unit_bytes / GIB,
        predicted=predicted,
        unit="GiB",
        low=predicted * (1 - ERROR) if ERROR_RUNS else None,
        high=predicted * (1 + ERROR) if ERROR_RUNS else None,
    )


def recipe_of(row: Row) -> Recipe:
    """Return how a row was trained. Raises `CannotPlanError`."""
    if row.get("n_gpus", "1") not in ("", "1"):
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

    words = re.sub(r"\([^)]*\)", "", name).lower()
    words = re.sub(r"(\d)\s+b\b", r"\1b", words.strip())
    words = re.sub(r"phi3", "phi-3", re.sub(r"\s+", "-", words.strip()))
    if words.startswith("phi-1.5"):
        words = "phi-1.5"
    try:
        find_config(words)
    except ValueError:
        raise CannotPlanError(f"the architecture of {name} is not in the catalogue") from None
    return words


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
    if not re.match(r"Q?LoRA", method):
        raise CannotPlanError(f"{method}: plans are for full fine-tuning, LoRA and QLoRA")
    model = _known_model(row["model"])
    if model not in ALPACA_LENGTH:
        raise CannotPlanError(f"the longest row of Alpaca under the tokenizer of {row['model']} is not told")
    setup = Setup(
        method="qlora" if method.startswith("Q") else "lora",
        rank=8,
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
        model_code="litgpt",
    )
    return Recipe(model, setup, ALPACA_LENGTH[model], unit_bytes=1e9, reserved=False)


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
    return Recipe(model, setup, int(row["seq_len"]), unit_bytes=1e9)


def _other(row: Row) -> Recipe:
    from ft_insight.estimate.plan.setup import Setup

    method = row["method"].lower().split(" ")[0]
    if method not in ("full", "lora", "qlora"):
        raise CannotPlanError(f"{row['method']}: plans are for full fine-tuning, LoRA and QLoRA")
    if not row.get("seq_len", "").isdigit() or not row.get("batch_per_gpu", "").isdigit():
        raise CannotPlanError("the batch or the length of the rows is not told")
    setup = Setup(
        method=method,
        autocast=False,
        checkpointing=row["grad_ckpt"] == "yes",
        optimizer="adamw_torch",
        loss="trainer",
        padded=False,
    )
    return Recipe(_known_model(row["model"]), setup, int(row["seq_len"]))


SOURCES: tuple[tuple[str, Callable[[Row], Recipe]], ...] = (
    ("MetaMathQA", _metamath),
    ("litgpt", _litgpt),
    ("ljm565", _ljm),
)
