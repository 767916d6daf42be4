"""The parts of a model that time is told of, found from its structure, not from a list of model names.

The decoder's layers are its largest list of modules. What a layer holds is told by what it is made of: a norm has
nothing but vectors, attention takes a mask or positions, a Mamba mixer convolves, a mixture of experts holds a router
and experts. Whatever PEFT, quantisation or FSDP wraps around a part counts as the part.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ft_insight.callbacks.facts import attempt, bare_model
from ft_insight.callbacks.routers import find_routers, plain_name

WRAPPERS = ("base_layer", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
ATTENTION_ARGUMENTS = frozenset(
    {"attention_mask", "position_embeddings", "position_ids", "past_key_values", "cu_seqlens"}
)


@dataclass(frozen=True, eq=False)
class Part:
    """A module that time is told of.

    ``kind`` is one of embedding, layer, norm, attention, mlp, moe, router, experts, shared_expert, mamba, other,
    final_norm, head. ``layer`` is the index of its decoder layer, None outside of them.
    """

    name: str
    module: nn.Module
    kind: str
    layer: int | None = None
    parent: Part | None = None


def find_parts(model: Any) -> list[Part]:
    """Find all parts of a causal language model, in the order in which they are defined; [] if it has no decoder."""
    bare: Any = bare_model(model)
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    found = _decoder_layers(bare)
    if found is None:
        return []
    layers, home = found
    routers = {id(router.module) for router in find_routers(model)}
    parts = [*_single(names, attempt(lambda: bare.get_input_embeddings()), "embedding")]
    for index, module in enumerate(layers):
        parts += _layer_parts(names, module, index, routers)
    for child in home.children():
        if child is not layers and kind_of(child, routers) == "norm":
            parts += _single(names, child, "final_norm")
    head = attempt(lambda: bare.get_output_embeddings())
    return parts + list(_single(names, head, "head"))


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module under all that PEFT and parallelism wrap around it."""
    while True:
        inner = next(
            (getattr(module, name) for name in WRAPPERS if isinstance(getattr(module, name, None), nn.Module)), None
        )
        if inner is None:
            return module
        module = inner


def _single(names: dict[int, str], module: Any, kind: str) -> Iterator[Part]:
    if isinstance(module, nn.Module):
        yield Part(names.get(id(module), kind), module, kind)


def _decoder_layers(model: nn.Module) -> tuple[nn.ModuleList, nn.Module] | None:
    """Return the largest list of modules that stands in no other one, and the module that holds it."""
    best: tuple[int, nn.ModuleList, nn.Module] | None = None
    for parent, child in _outermost_lists(model):
        size = sum(p.numel() for p in child.parameters())
        if len(child) and (best is None or size > best[0]):
            best = size, child, parent
    return None if best is None else (best[1], best[2])


def _outermost_lists(module: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleList]]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield module, child
        else:
            yield from _outermost_lists(child)


def _layer_parts(names: dict[int, str], module: nn.Module, index: int, routers: set[int]) -> Iterator[Part]:
    layer = Part(names[id(module)], module, "layer", index)
    yield layer
    for child in unwrap(module).children():
        kind = kind_of(child, routers)
        if kind is None:
            continue
        part = Part(names[id(child)], child, kind, index, layer)
        yield part
        if kind == "moe":
            yield from _moe_parts(names, part, routers)


def _moe_parts(names: dict[int, str], moe: Part, routers: set[int]) -> Iterator[Part]:
    for child in unwrap(moe.module).children():
        inner = unwrap(child)
        if _is_router(child, routers):
            yield Part(names[id(child)], child, "router", moe.layer, moe)
        elif isinstance(inner, nn.ModuleList):
            # a list is never called: its experts are
            for expert in inner:
                yield Part(names[id(expert)], expert, "experts", moe.layer, moe)
        elif _holds_experts(inner):
            yield Part(names[id(child)], child, "experts", moe.layer, moe)
        elif _weights(inner, 2) and moe.layer is not None:
            lone = isinstance(inner, nn.Linear)
            yield Part(names[id(child)], child, "router" if lone and not routers else "shared_expert", moe.layer, moe)


def kind_of(module: nn.Module, routers: set[int]) -> str | None:
    """Tell what a child of a decoder layer is, by what it is made of; None for what computes nothing of its own."""
    inner = unwrap(module)
    if any(_is_router(m, routers) for m in module.modules()) or any(_holds_experts(m) for m in inner.modules()):
        return "moe"
    parameters = list(module.parameters())
    if all(p.dim() <= 1 for p in parameters):
        return "norm" if parameters or "norm" in type(inner).__name__.lower() else None
    if any(isinstance(m, nn.Conv1d) or hasattr(m, "A_log") for m in inner.modules()):
        return "mamba"
    arguments = set(attempt(lambda: inspect.signature(type(inner).forward).parameters) or ())
    if arguments & ATTENTION_ARGUMENTS:
        return "attention"
    return "mlp" if _weights(inner, 2) else "other"


def _is_router(module: nn.Module, routers: set[int]) -> bool:
    return id(module) in routers or id(unwrap(module)) in routers


def _holds_experts(module: nn.Module) -> bool:
    """Fused experts are 3-D parameters; separate ones a list of two or more modules of one class."""
    if isinstance(module, nn.ModuleList):
        return len(module) > 1 and len({type(m) for m in module}) == 1 and _weights(module[0], 2)
    if any(isinstance(child, nn.ModuleList) and _holds_experts(child) for child in module.children()):
        return True  # experts that are kept as lists of their matrices, as 4-bit ones have to be
    own = list(module.parameters(recurse=False))
    return any(isinstance(p, torch.Tensor) and p.dim() == 3 for p in own) and not isinstance(module, nn.Conv1d)


def _weights(module: nn.Module, dimensions: int) -> bool:
    return any(p.dim() >= dimensions or type(p).__name__ == "Params4bit" for p in module.parameters())
