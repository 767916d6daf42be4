"""A fine-tune that has not run yet: its peak memory, its largest batch and its arithmetic, without weights or a GPU.

The model is built on the meta device and wrapped by the real PEFT; two real training steps run on fake tensors; the
life of every storage is followed and replayed through the rules of torch's caching allocator.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from ft_insight.catalog import Gpu, find_gpu
from ft_insight.estimate.memory import CONTEXT_BYTES
from ft_insight.estimate.plan.setup import METHODS, OPTIMIZERS, TILE_ROWS, PlanError, Setup

__all__ = ["Fit", "Plan", "PlanError", "plan"]

TRAINERS = ("sft", "trainer")


@dataclass(frozen=True, slots=True)
class Fit:
    """What one GPU can take."""

    gpu: str
    usable_bytes: int
    """Of the whole card, as torch reports it."""
    fits: bool
    """Whether the batch that was asked for does."""
    largest_batch: int | None
    """Rows of a micro-batch, all as long as the longest; None where a batch of two cannot be compared with another."""
    low: int | None
    high: int | None
    """`largest_batch` if the method is off by its usual error."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a fine-tune would take; an estimate throughout. Bytes, tokens and FLOPs; shares of 1."""

    model: str
    source: str
    method: str
    parameters: int
    trainable: int
    quantised: int
    """Parameters held in 4 bits."""
    batch: int
    seq_len: int
    optimizer: str
    checkpointing: bool
    trainer: str
    peak_bytes: int
    """``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved()`` on a card that is large enough."""
    device_bytes: int
    """What nvidia-smi would show: reserved, and the CUDA context."""
    parts: dict[str, int]
    """`peak_bytes` by what it is, at the moment of the peak."""
    flops_per_token: float
    """Matrix products and attention, forward, backward and recomputation; 2 a multiply-add, causal ones in full."""
    error: float
    """80% of comparable published runs were predicted within this."""
    error_runs: int
    fits: tuple[Fit, ...]
    notices: tuple[str, ...]


def plan(
    model: str,
    *,
    method: str = "lora",
    rank: int = 16,
    targets: Sequence[str] | str | None = None,
    adapter: Any = None,
    dataset: str | None = None,
    seq_len: int | None = None,
    batch: int = 8,
    accumulation: int = 1,
    checkpointing: bool | None = None,
    optimizer: str = "adamw",
    dtype: str = "bfloat16",
    mixed_precision: bool | None = None,
    trainer: str = "sft",
    padded: bool = True,
    gpus: Sequence[str | Gpu] = (),
) -> Plan:
    """Plan a fine-tune of ``model`` without running it: no weights, no GPU, no network.

    ``model`` is what `models.find_config` takes. ``adapter`` is any PEFT config, in the place of ``rank`` and
    ``targets`` (None: PEFT's own choice). ``dataset`` is a file of rows, whose longest counts, cut to ``seq_len`` or
    TRL's 1,024 tokens; without it every row has ``seq_len``. ``batch`` is rows of a micro-batch. ``trainer`` is
    ``sft`` for TRL's SFTTrainer (bf16 autocast and gradient checkpointing unless told otherwise) or ``trainer`` for
    transformers' own (neither). ``padded``: the rows of a batch differ in length, so that attention takes a mask.
    ``dtype`` is that of the weights; in ``qlora``, of those that are not quantised.

    Raises:
        PlanError: An unknown model, a missing file, or a combination that cannot be trained; one line.
        UnknownGpuError: A GPU that the catalogue does not know.
    """
    cards = tuple(find_gpu(each) if isinstance(each, str) else each for each in gpus)
    sft = trainer == "sft"
    setup = Setup(
        method=method,
        rank=rank,
        targets=targets if targets is None or isinstance(targets, str) else tuple(targets),
        adapter=adapter,
        dtype=dtype,
        autocast=sft if mixed_precision is None else mixed_precision,
        checkpointing=sft if checkpointing is None else checkpointing,
        optimizer=optimizer,
        accumulation=accumulation,
        loss=trainer,
        padded=padded,
    )
    _check(setup, batch, seq_len)
    from ft_insight.estimate.plan.models import find_config

    config, source = find_config(model)
    length, notices = _length(model, dataset, seq_len)
    most = getattr(config, "max_position_embeddings", None)
    if most and length > most:
        raise PlanError(f"{length:,} tokens are more than the {most:,} positions of {model}")
    return _plan(model, source, config, setup, batch, length, cards, notices)


def _check(setup: Setup, batch: int, seq_len: int | None) -> None:
    for name, value, known in (
        ("method", setup.method, METHODS),
        ("optimizer", setup.optimizer, OPTIMIZERS),
        ("trainer", setup.loss, TRAINERS),
        ("dtype", setup.dtype, ("bfloat16", "float16", "float32")),
    ):
        if value not in known:
            raise PlanError(f"unknown {name} {value!r}: {', '.join(known)}")
    for name, number in (
        ("batch", batch),
        ("seq_len", seq_len),
        ("rank", setup.rank),
        ("accumulation", setup.accumulation),
    ):
        if number is not None and not 0 < number <= 1 << 24:
            raise PlanError(f"{name} must be above 0 and at most {1 << 24:,}, not {number}")
    if setup.method == "full" and setup.adapter is not None:
        raise PlanError("method full takes no adapter")


def _length(model: str, dataset: str | None, seq_len: int | None) -> tuple[int, list[str]]:
    from ft_insight.estimate.plan.lengths import DEFAULT_LENGTH, row_lengths

    if dataset is None:
        if seq_len is None:
            return DEFAULT_LENGTH, [f"no length was given: rows of {DEFAULT_LENGTH:,} tokens, SFTConfig's max_length"]
        return seq_len, []
    lengths, how = row_lengths(dataset, model)
    limit = seq_len or DEFAULT_LENGTH
    longest = min(max(lengths), limit)
    cut = sum(each > limit for each in lengths)
    notices = [f"{len(lengths):,} rows of {sum(lengths) / len(lengths):,.0f} tokens on average, {how}"]
    if cut:
        notices.append(f"{cut:,} rows are longer than {limit:,} tokens and counted as cut there")
    return longest, notices


def _plan(
    model: str,
    source: str,
    config: Any,
    setup: Setup,
    batch: int,
    length: int,
    cards: tuple[Gpu, ...],
    notices: list[str],
) -> Plan:
    from ft_insight.estimate.plan.allocator import replay
    from ft_insight.estimate.plan.fit import ERROR, ERROR_RUNS, Scaled, fits, largest

    # One row and two differ in more than size (a mask, copies instead of views), so the pair starts at two; and where
    # the fused head's tile no longer grows.
    low = max(2, batch, -(-TILE_ROWS // length) + 1 if cards else 2)
    batches = [batch, *(size for size in ((low, low + 1) if cards else ()) if size != batch)]
    traces = dict(zip(batches, _trace_all(config, setup, batches, length), strict=True))
    traced = traces[batch]
    peak, parts = traced.log.peak()
    reserved = replay(traced.log.events).peak_reserved
    found = []
    for card in cards:
        scaled = Scaled(low, traces[low].log, low + 1, traces[low + 1].log)
        best, least, most = largest(scaled, card)
        here = fits(traced.log.events, card)
        if batch == 1 and best < 1 and here:
            best = 1  # a single row needs neither mask nor copies
        found.append(Fit(card.name, card.usable_memory_bytes, here, best, least, most))
    return Plan(
        model=model,
        source=source,
        method=setup.method,
        parameters=traced.parameters,
        trainable=traced.trainable,
        quantised=traced.quantised,
        batch=batch,
        seq_len=length,
        optimizer=setup.optimizer,
        checkpointing=setup.checkpointing,
        trainer=setup.loss,
        peak_bytes=peak,
        reserved_bytes=reserved,
        device_bytes=reserved + CONTEXT_BYTES,
        parts={name: nbytes for name, nbytes in parts.items() if nbytes},
        flops_per_token=traced.flops_per_token,
        error=ERROR,
        error_runs=ERROR_RUNS,
        fits=tuple(found),
        notices=(*notices, *_notices(config, setup, traced)),
    )


def _trace_all(config: Any, setup: Setup, batches: list[int], length: int) -> list[Any]:
    """Trace each batch; side by side in copies of this process where that is safe."""
    from ft_insight.estimate.plan.steps import trace_steps

    alone = threading.active_count() == 1 and "fork" in multiprocessing.get_all_start_methods()
    if len(batches) == 1 or not alone or _cuda_in_use():
        return [trace_steps(config, setup, batch, length) for batch in batches]
    with ProcessPoolExecutor(
        min(len(batches), multiprocessing.cpu_count()), multiprocessing.get_context("fork")
    ) as pool:
        return list(pool.map(trace_steps, *zip(*((config, setup, batch, length) for batch in batches), strict=True)))


def _cuda_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _notices(config: Any, setup: Setup, traced: Any) -> list[str]:
    notices = []
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if setup.method == "qlora" and experts and traced.quantised < traced.parameters / 2:
        notices.append(
            "transformers 5 keeps the experts of a layer in one 3-D parameter, which load_in_4bit leaves in "
            f"{setup.dtype}: only {traced.quantised / traced.parameters:.0%} of the weights are in 4 bits; "
            "examples/mixtral holds experts in 4 bits"
        )
    if setup.method != "full" and setup.dtype == "bfloat16" and setup.loss == "sft":
        notices.append("weights are taken to be loaded in bfloat16; SFTTrainer(model='name') alone loads float32")
    if setup.optimizer.startswith("paged"):
        notices.append("paged optimizer states are in unified memory: not counted, they leave the GPU when it is full")
    return notices
