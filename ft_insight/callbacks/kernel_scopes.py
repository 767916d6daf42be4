"""Marks in a trace that tell who launched what: one scope per part, per leaf that matters, per expert weight.

A profiler records operators, not modules, and knows no parameters. So for the one step of a window, every part
and every leaf with a role of its own opens a named range around its forward. Inside experts, whose weights are
often bare 3-D parameters, the functions called are followed: a matmul of an activation with something that was
made from W2 is a W2 matmul, whatever was indexed, transposed, stacked or added to it on the way, and however many
tokens there were.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.modules import Part, unwrap

PREFIX = "ft_insight::"
"""Name of a scope in the trace, followed by its index in the table."""

_WEIGHT_NAMES = (
    ("w1_w3", re.compile(r"gate_?up|gate_and_up|up_gate|w13|w1_w3|wi_fused|qkv_?mlp")),
    ("w2", re.compile(r"down|fc_?2$|w2$|^wo$|output_linear|c_proj|4h_to_h|lin(ear)?_?2$|proj_out")),
    ("w3", re.compile(r"^up|_up|w3$|v1$|wi_1|linear_v")),
    ("w1", re.compile(r"gate|fc_?1$|w1$|^wi(_0)?$|input_linear|c_fc|h_to_4h|lin(ear)?_?1$|proj_in")),
)
_MATMUL = re.compile(r"mm|linear|matmul|einsum|tensordot|gemm")


@dataclass(frozen=True, slots=True)
class Scope:
    """What a range in the trace stands for: a part of this kind, and if all in it has one role, that role.

    ``matmul`` is the role of the matmuls in it, ``forced`` the role of everything in it.
    """

    kind: str
    matmul: str | None = None
    forced: str | None = None


@dataclass(frozen=True, eq=False)
class Mark:
    """A module that opens a scope when called; ``weights`` are followed while it runs."""

    module: nn.Module
    scope: int
    weights: dict[int, str] | None = None
    roles: dict[str, int] | None = None


def plan(parts: list[Part], root: nn.Module | None) -> tuple[list[Scope], list[Mark]]:
    """Lay out the scopes of a model: the table that the trace refers to, and the modules that open them."""
    table: list[Scope] = []
    scopes: dict[int, tuple[nn.Module, Scope]] = {}
    marks: list[Mark] = []
    if root is not None:
        scopes[id(root)] = root, Scope("model")
        for module in root.modules():
            if "rotary" in type(module).__name__.lower():
                scopes[id(module)] = module, Scope("attention", forced="rotary")
    for part in parts:
        scopes |= {id(m): (m, s) for m, s in _part_scopes(part)}
    for module, scope in scopes.values():
        table.append(scope)
        marks.append(Mark(module, len(table) - 1))
    followed = {id(p.module): p for p in parts if p.kind == "experts"}
    for position, mark in enumerate(marks):
        part = followed.get(id(mark.module))  # type: ignore[assignment]
        if part is not None:
            marks[position] = Mark(mark.module, mark.scope, _weights_of(part), _role_scopes(table, part.kind))
    return table, marks


def _role_scopes(table: list[Scope], kind: str) -> dict[str, int]:
    first = len(table)
    roles = ("w1", "w3", "w1_w3", "w2", "experts")
    table += [Scope(kind, matmul=f"matmul_{role}") for role in roles] + [Scope(kind, forced="lora")]
    return {role: first + i for i, role in enumerate((*roles, "lora"))}


def _weights_of(part: Part) -> dict[int, str]:
    return weight_roles(part.module, part.name.rpartition(".")[2] if part.kind == "experts" else "")


def _part_scopes(part: Part) -> Iterator[tuple[nn.Module, Scope]]:
    inner = unwrap(part.module)
    if inner is part.module:
        # a linear layer beside the experts weighs what another one computes
        gate = part.kind == "shared_expert" and isinstance(inner, nn.Linear)
        yield part.module, Scope(part.kind, "matmul_router" if gate else _matmul_role(part.kind, None))
    else:  # what PEFT computes around a part, to merge an adapter into its weights
        yield part.module, Scope(part.kind, forced="lora")
        yield inner, Scope(part.kind, _matmul_role(part.kind, None))
    if part.kind in ("layer", "moe"):
        return  # their leaves belong to the parts within
    weights = _weights_of(part)
    for name, module in part.module.named_modules():
        scope = _leaf_scope(part.kind, name, module, weights)
        if scope is not None and module is not part.module and module is not inner:
            yield module, scope


def _leaf_scope(kind: str, name: str, module: nn.Module, weights: dict[int, str]) -> Scope | None:
    what = type(module).__name__
    if hasattr(module, "base_layer") or any(n.startswith("lora_") for n in name.split(".")):
        # the adapter's own sums; the layer that it adapts opens a scope within
        return Scope(kind, forced="lora") if not isinstance(module, nn.ModuleDict | nn.ParameterDict) else None
    if "Linear" in what or what == "Conv1D":
        weight = getattr(module, "weight", None)
        return Scope(kind, _matmul_role(kind, weights.get(id(weight)) or "experts"))
    if isinstance(module, nn.Conv1d):
        return Scope(kind, forced="mamba_convolution" if kind == "mamba" else None)
    if _is_activation(module):
        return Scope(kind, forced="activation")
    if "norm" in what.lower():
        return Scope(kind, forced="norm")
    return None


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home.endswith((".modules.activation", "transformers.activations")) and "oftmax" not in type(module).__name__


def _matmul_role(kind: str, weight: str | None) -> str | None:
    """Return the role of matmuls in a part (``weight`` None) or in one of its linear layers."""
    if kind == "router":
        return "matmul_router"
    if kind == "head":
        return "head_matmul"
    if weight is None:
        return None
    if kind in ("experts", "shared_expert", "mlp"):
        return f"matmul_{weight}"
    return {"attention": "attention_matmul", "mamba": "mamba_matmul"}.get(kind)


def weight_roles(module: nn.Module, name_of_module: str = "") -> dict[int, str]:
    """Tell the weights of a feed-forward part apart: id -> w1, w3, w1_w3 (fused), w2 or lora."""
    found: dict[int, str] = {}
    sizes: dict[str, int] = {}
    unnamed: list[nn.Parameter] = []
    for name, weight in module.named_parameters(remove_duplicate=False):
        role = _named(f"{name_of_module}.{name}")
        if role is None:
            if weight.dim() >= 2 and "bias" not in name:
                unnamed.append(weight)
            continue
        found[id(weight)] = role
        sizes[role] = weight.numel()
    if len(unnamed) > 1 and "w2" not in sizes:
        # nameless layers of a Sequential: the last one defined leads back to the residual stream
        roles = ["w1"] * (len(unnamed) - 1) + ["w2"] if len(unnamed) != 3 else ["w1", "w3", "w2"]
        found |= {id(w): role for w, role in zip(unnamed, roles, strict=True)}
    if "w3" in sizes and "w1" not in sizes:  # up and down without a gate: the first of two
        found = {key: "w1" if role == "w3" else role for key, role in found.items()}
        sizes["w1"] = sizes.pop("w3")
    if sizes.get("w1") == 2 * sizes.get("w2", 0):
        found = {key: "w1_w3" if role == "w1" else role for key, role in found.items()}
    return found


def _named(name: str) -> str | None:
    parts = [p for p in name.split(".") if not p.isdigit()]
    if any(p.startswith("lora_") for p in parts):
        return "lora"
    if "bias" in parts[-1]:
        return None
    for part in reversed(parts):
        for role, pattern in _WEIGHT_NAMES:
            if pattern.search(part):
                return role
    return None


class Follower(TorchFunctionMode):
    """Follows weights through the functions called while it is on, and opens a scope around their matmuls.

    It passes every call on untouched. What is derived from weights alone is remembered by weak reference.
    """

    def __init__(self, guard: Guard, weights: dict[int, str], roles: dict[str, int]) -> None:
        super().__init__()
        self.active = True
        self._guard = guard
        self._weights = weights
        self._roles = roles
        self._derived: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, within a scope where it computes with a weight."""
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        origin, role = self._guard.run("kernels", self._judge, func, args, kwargs) or (None, None)
        if role is None:
            result = func(*args, **kwargs)
        else:
            with torch.profiler.record_function(f"{PREFIX}{self._roles[role]}"):
                result = func(*args, **kwargs)
        if origin is not None:
            self._guard.run("kernels", self._remember, result, origin)
        return result

    def _judge(self, func: Any, args: Any, kwargs: Any) -> tuple[frozenset[str] | None, str | None]:
        """Return what the result is made of, if of weights alone, and the role of the call, if it has one."""
        origin: set[str] = set()
        foreign = False
        for tensor in _tensors((*args, *kwargs.values())):
            made_of = self._made_of(tensor)
            if made_of:
                origin |= made_of
            elif tensor.is_floating_point() and tensor.dim() > 1:
                foreign = True
        if not origin:
            return None, None
        if not foreign:
            return frozenset(origin), "lora" if "lora" in origin else None
        if not _MATMUL.search(getattr(func, "__name__", "") or str(func)):
            return None, None
        own = origin - {"lora"}
        return None, (own.pop() if len(own) == 1 else "experts") if own else "lora"

    def _made_of(self, tensor: torch.Tensor) -> frozenset[str] | None:
        role = self._weights.get(id(tensor))
        if role is not None:
            return frozenset((role,))
        entry = self._derived.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _remember(self, result: Any, origin: frozenset[str]) -> None:
        for tensor in _tensors((result,)):
            self._derived[id(tensor)] = weakref.ref(tensor), origin


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
