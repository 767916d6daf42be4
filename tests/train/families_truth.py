"""What experts really multiply: rows that reach each expert's own weights, told from the operations that torch runs.

This knows nothing of routers: only where the weights of each expert lie in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LAST = ("down_proj", "output_linear", "w2", "fc2", "wo", "down_embed")
"""The last product of an expert, by the families' names: it is counted, so that each row counts once."""


@dataclass
class Place:
    """Memory of one weight: a stack of experts, or one expert."""

    layer: int
    expert: int | None
    experts: int
    size: int

    def of(self, weight: torch.Tensor) -> int:
        return self.expert if self.expert is not None else weight.storage_offset() * self.experts // self.size


class ExpertRows(TorchDispatchMode):
    """Counts rows per expert, in ``rows[layer][expert]``; layers in the order in which the model defines them."""

    def __init__(self, model: nn.Module, skip: tuple[str, ...] = ("shared", "vision", "lora")) -> None:
        super().__init__()
        self.places: dict[int, Place] = {}
        self.rows: list[list[int]] = []
        for experts in _groups(model, skip):
            layer, count = len(self.rows), max(len(experts), experts[0][1])
            for number, (weight, stacked) in enumerate(experts):
                expert = None if stacked > 1 else number
                place = Place(layer, expert, count, weight.numel())
                self.places[weight.untyped_storage().data_ptr()] = place
            self.rows.append([0] * count)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_graph_task_id() == -1:  # neither backward nor what it recomputes
            self._see(function.overloadpacket.__name__, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _see(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [a for a in (*args, *(args[1] if name == "index" else ())) if isinstance(a, torch.Tensor)]
        for number, weight in enumerate(tensors):
            place = self.places.get(weight.untyped_storage().data_ptr()) if name in _ROWS else None
            if place is not None:
                others = tensors[:number] + tensors[number + 1 :]
                for expert, rows in _ROWS[name](place, weight, number, others, kwargs):
                    self.rows[place.layer][expert] += rows
                return


Seen = Iterator[tuple[int, int]]


def _mm(place: Place, weight: torch.Tensor, number: int, others: list[torch.Tensor], kwargs: Any) -> Seen:
    rows = others[-1].shape[0] if number else others[-1].shape[1]
    yield place.of(weight), rows


def _bmm(place: Place, weight: torch.Tensor, number: int, others: list[torch.Tensor], kwargs: Any) -> Seen:
    if weight.shape[0] != place.experts:
        raise AssertionError("a batch of some experts only")
    for expert, rows in enumerate(others[0]):
        yield expert, int(rows.ne(0).any(-1).sum())  # a row of zeros is one that was not meant for this expert


def _grouped(place: Place, weight: torch.Tensor, number: int, others: list[torch.Tensor], kwargs: Any) -> Seen:
    ends = kwargs.get("offs", others[-1]).tolist()
    for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield expert, end - begin


def _embedding(place: Place, weight: torch.Tensor, number: int, others: list[torch.Tensor], kwargs: Any) -> Seen:
    yield from enumerate(torch.bincount(others[0].flatten(), minlength=place.experts).tolist())


def _gathered(place: Place, weight: torch.Tensor, number: int, others: list[torch.Tensor], kwargs: Any) -> Seen:
    # weights copied once for each row that they are to multiply
    yield from enumerate(torch.bincount(others[0].flatten(), minlength=place.experts).tolist())


_ROWS = {
    "index": _gathered,
    "mm": _mm,
    "addmm": _mm,
    "bmm": _bmm,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    "embedding": _embedding,
}


def weightless_rows(model: nn.Module) -> list[list[int]]:
    """Count, from now on, the rows that each expert is handed with weight 0: multiplied, and without any effect."""
    rows: list[list[int]] = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if "top_k_index" in names and "top_k_weights" in names and "shared" not in type(module).__name__.lower():
            rows.append([0] * module.num_experts)
            module.register_forward_pre_hook(functools.partial(_note_weightless, names, rows[-1]), with_kwargs=True)
    return rows


def _note_weightless(names: list[str], row: list[int], module: nn.Module, args: Any, named: dict[str, Any]) -> None:
    given = {**dict(zip(names, args, strict=False)), **named}
    chosen, weights = given["top_k_index"], given["top_k_weights"]
    for expert in chosen[weights.eq(0)].tolist():
        row[expert] += 1


def less(rows: list[list[int]], others: list[list[int]]) -> list[list[int]]:
    """Subtract, expert by expert, where there is anything to subtract."""
    if not any(map(any, others)):
        return rows
    return [[a - b for a, b in zip(one, other, strict=True)] for one, other in zip(rows, others, strict=True)]


def _groups(model: nn.Module, skip: tuple[str, ...]) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Yield, for each mixture of experts: its weights, with the number of experts that each of them holds."""
    listed: dict[str, list[tuple[torch.Tensor, int]]] = {}
    order: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for name, weight in model.named_parameters():
        parts = [p for p in name.split(".") if p not in ("base_layer", "weight", "original0")]
        if any(word in name for word in skip) or "bias" in parts[-1] or parts[-1] not in LAST:
            continue
        home = ".".join(parts[:-1])
        if weight.dim() == 3 or "down_embed" in parts:
            order[name] = [(weight, weight.shape[0])]
        elif parts[-2:] == ["mlp", "w2"]:  # dbrx: one stack in two dimensions
            count = model.config.ffn_config.moe_num_experts
            order[name] = [(weight, count)]
        elif any("expert" in p for p in parts[:-1]):
            block = home.rpartition(".")[0]
            if block not in listed:
                listed[block] = order[name] = []
            listed[block].append((weight, 1))
    yield from order.values()
