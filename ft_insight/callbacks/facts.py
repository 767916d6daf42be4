"""The facts of a run that stand in its header: model, training, data set, devices, versions.

Each is read on its own and becomes unknown if it cannot be read; none is worth more than the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ft_insight.callbacks.gpu_identity import cuda_devices
from ft_insight.records import DatasetFacts, Device, ModelFacts, TrainFacts

T = TypeVar("T")

LENGTH_BINS = 128
SAMPLED_ROWS = 2000
VERSIONED = ("ft-insight", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes")
READ_ERRORS = (AttributeError, ImportError, KeyError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def attempt(read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns, or None where the thing is not there in this version or this run."""
    with contextlib.suppress(*READ_ERRORS):
        return read()
    return None


def bare_model(model: Any) -> nn.Module:
    """Return the transformers model under PEFT's wrapper."""
    inner = attempt(lambda: model.get_base_model())
    found: nn.Module = inner if isinstance(inner, nn.Module) else model
    return found


def model_facts(model: nn.Module) -> ModelFacts:
    """Read the shape of a model; parameters of 4-bit weights are counted as the weights that they stand for."""
    bare = bare_model(model)
    config: Any = getattr(bare, "config", None)
    text: Any = attempt(lambda: config.get_text_config()) or config

    def setting(*names: str) -> int | None:
        values = (getattr(text, name, None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)

    total, trainable, experts = _parameter_counts(model)
    expert_count = setting("num_local_experts", "num_experts", "n_routed_experts")
    chosen = setting("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    active = None
    if experts and expert_count and chosen:
        active = round(total - experts * (1 - min(1.0, chosen / expert_count)))
    elif not experts:
        active = total
    return ModelFacts(
        name=_model_name(bare, config),
        kind=getattr(config, "model_type", None),
        parameters=total,
        trainable_parameters=trainable,
        active_parameters=active,
        expert_parameters=experts or None,
        layers=setting("num_hidden_layers", "n_layer"),
        hidden=setting("hidden_size", "n_embd", "d_model"),
        vocabulary=setting("vocab_size"),
        experts=expert_count if experts else None,
        experts_per_token=chosen if experts else None,
        dtype=attempt(lambda: str(next(bare.parameters()).dtype).removeprefix("torch.")),
        quantization=_quantization(bare),
    )


def _model_name(bare: nn.Module, config: Any) -> str:
    path = getattr(config, "_name_or_path", None) or getattr(bare, "name_or_path", None)
    if path:
        return str(path).rstrip("/").rsplit("/", 1)[-1]
    return str(getattr(config, "model_type", None) or type(bare).__name__)


def _parameter_counts(model: nn.Module) -> tuple[int, int, int]:
    """Count (all, trainable, within experts). LoRA adapters on experts count as experts too."""
    total = trainable = experts = 0
    for name, parameter in model.named_parameters():
        size = logical_numel(parameter)
        total += size
        trainable += size if parameter.requires_grad else 0
        experts += size if any(p.endswith("experts") and "shared" not in p for p in name.split(".")) else 0
    return total, trainable, experts


def logical_numel(parameter: torch.Tensor) -> int:
    """Count the weights that a parameter stands for: 4-bit ones are stored two to a byte."""
    state = getattr(parameter, "quant_state", None)
    shape = getattr(state, "shape", None)
    return int(torch.Size(shape).numel()) if shape is not None else parameter.numel()


def _quantization(model: nn.Module) -> str | None:
    for parameter in model.parameters():
        kind = type(parameter).__name__
        if kind == "Params4bit":
            return str(getattr(parameter, "quant_type", "4bit"))
        if kind == "Int8Params":
            return "int8"
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    return attempt(lambda: str(config.quant_method.value)) if config is not None else None


def train_facts(trainer: Any, args: Any, state: Any, model: nn.Module) -> TrainFacts:
    """Read what the trainer was set to do."""
    quantized = _quantization(bare_model(model)) is not None
    peft: Any = getattr(model, "peft_config", None)
    method = "full" if not peft else "qlora" if quantized else "lora"
    packing = bool(getattr(args, "packing", False))
    optimizer = getattr(args, "optim", None)
    return TrainFacts(
        trainer=type(trainer).__name__ if trainer is not None else "unknown",
        method=method,
        lora_rank=attempt(lambda: int(next(iter(peft.values())).r)) if peft else None,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        optimizer=getattr(optimizer, "value", None) or (str(optimizer) if optimizer else None),
        batch=getattr(state, "train_batch_size", None) or args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        gradient_checkpointing=_checkpointing(args),
        compiled=is_compiled(trainer, args, model),
        packing=str(getattr(args, "packing_strategy", "packed")) if packing else None,
        padding_free=bool(getattr(trainer, "padding_free", False)),
        loader_workers=getattr(args, "dataloader_num_workers", None),
        max_length=getattr(args, "max_length", None),
        max_steps=state.max_steps if state.max_steps and state.max_steps > 0 else None,
        epochs=float(args.num_train_epochs),
        eval_every_steps=attempt(lambda: _every(args, state, "eval")),
        save_every_steps=attempt(lambda: _every(args, state, "save")),
        output_dir=attempt(lambda: str(args.output_dir)),
    )


def is_compiled(trainer: Any, args: Any, model: nn.Module) -> bool:
    """Tell whether torch.compile is at work anywhere in the model."""
    wrapped = getattr(trainer, "model_wrapped", None)
    return bool(
        getattr(args, "torch_compile", False)
        or type(wrapped).__name__ == "OptimizedModule"
        or any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    )


def _checkpointing(args: Any) -> str:
    # transformers 5.24 renamed the option, and mirrors it under its old name until 6
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    if not getattr(args, name):
        return "none"
    options = getattr(args, f"{name}_kwargs", None) or {}
    return "reentrant" if options.get("use_reentrant", False) else "non-reentrant"


def _every(args: Any, state: Any, what: str) -> float | None:
    strategy = str(getattr(getattr(args, f"{what}_strategy"), "value", "no"))
    if strategy == "steps":
        return float(getattr(state, f"{what}_steps"))
    if strategy == "epoch" and state.num_train_epochs:
        return float(state.max_steps / state.num_train_epochs)
    return None


def dataset_facts(dataset: Any, args: Any) -> DatasetFacts:
    """Read the number of queries of the training set, and how long they are.

    A query is a row, whatever packing makes of it: a packed data set keeps its rows' lengths, but for wrapped
    packing, which cuts where a chunk is full, and split packing, which cuts long rows into pieces.
    """
    packing = str(getattr(args, "packing_strategy", "")) if getattr(args, "packing", False) else ""
    unit = {"wrapped": "chunk", "bfd_split": "piece"}.get(packing, "row")
    columns = attempt(lambda: list(dataset.column_names)) or []
    size = attempt(lambda: len(dataset))
    if size is None:
        return DatasetFacts(query_unit=unit)
    if "seq_lengths" in columns and packing:
        lengths = [int(n) for row in dataset["seq_lengths"] for n in row]
        return _with_lengths(len(lengths), unit, lengths, "all rows")
    if "input_ids" not in columns:
        return DatasetFacts(queries=size, query_unit=unit)
    lengths = attempt(lambda: arrow_lengths(dataset)) or []
    source = "all rows"
    if len(lengths) != size:
        indices = range(0, size, max(1, size // SAMPLED_ROWS))
        lengths = attempt(lambda: [len(dataset[i]["input_ids"]) for i in indices]) or []
        source = source if len(indices) == size else f"a sample of {len(indices):,} rows"
    return _with_lengths(size, unit, lengths, source)


def arrow_lengths(dataset: Any) -> list[int]:
    """Read list lengths from Arrow's offsets: milliseconds for millions of rows."""
    import pyarrow.compute as compute

    lengths = compute.list_value_length(dataset.data.column("input_ids")).to_pylist()
    chosen = dataset._indices
    if chosen is None:
        return list(lengths)
    return [lengths[i] for i in chosen.column(0).to_pylist()]


def _with_lengths(queries: int, unit: str, lengths: Sequence[int], source: str) -> DatasetFacts:
    if not lengths:
        return DatasetFacts(queries=queries, query_unit=unit)
    longest = max(lengths)
    width = max(1, -(-longest // LENGTH_BINS))
    bins: dict[int, int] = {}
    for length in lengths:
        edge = -(-length // width) * width
        bins[edge] = bins.get(edge, 0) + 1
    edges = sorted(bins)
    return DatasetFacts(
        queries=queries,
        query_unit=unit,
        length_values=tuple(min(e, longest) for e in edges),
        length_counts=tuple(bins[e] for e in edges),
        longest=longest,
        lengths_from=source,
    )


def devices(args: Any, model: nn.Module) -> tuple[Device, ...]:
    """List the devices that this process computes on, GPUs by UUID."""
    device = attempt(lambda: torch.device(args.device)) or torch.device("cpu")
    if device.type != "cuda":
        return (Device(kind=device.type, name=_processor(), threads=torch.get_num_threads()),)
    # the trainer spreads a batch over all GPUs that it sees, but not for a quantised model
    quantised = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
    replicas = 1 if quantised else getattr(args, "n_gpu", 1)
    return attempt(lambda: cuda_devices(device, model, replicas)) or ()


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def versions() -> dict[str, str]:
    """Return the versions of all that decides how a run behaves."""
    return dict(_versions())


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
