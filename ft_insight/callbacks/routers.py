"""Tokens per expert, from the indices that each router hands to its experts, never by top-k over logits.

Counting runs on the device, into one small tensor per layer, and is read once per flush. Recomputation is skipped
(a router called from within backward), padding is left out by the attention mask, evaluation is kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ft_insight.callbacks.clock import Counts


@dataclass(slots=True)
class Router:
    """One router of the model, by its name in it, and how many experts it chooses from."""

    name: str
    module: nn.Module
    experts: int


@dataclass(slots=True)
class Flush:
    """Counts of one stretch of training, on their way to the host."""

    mode: str
    layers: tuple[str, ...]
    counts: Counts
    """Stacked (layers, widest + 2): experts, the bin for what lies beyond, and the tokens routed."""
    experts: tuple[int, ...]
    padding_counted: bool


def find_routers(model: nn.Module) -> list[Router]:
    """Find the routers of a transformers model: the classes that it names as the source of router logits."""
    classes = tuple(_router_classes(model))
    if not classes:
        return []
    found: list[Router] = []
    for name, module in model.named_modules():
        if isinstance(module, classes):
            experts = _expert_count(module, model)
            if experts:
                found.append(Router(plain_name(name), module, experts))
    return found


def _router_classes(model: nn.Module) -> Iterator[type[nn.Module]]:
    for module in model.modules():
        registry = getattr(type(module), "_can_record_outputs", None)
        entry = registry.get("router_logits") if isinstance(registry, Mapping) else None
        for item in entry if isinstance(entry, list | tuple) else [entry]:
            target = getattr(item, "target_class", item)
            if isinstance(target, type) and issubclass(target, nn.Module):
                yield target


def _expert_count(module: nn.Module, model: nn.Module) -> int | None:
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return int(weight.shape[0])
    config = getattr(model, "config", None)
    value = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return value if isinstance(value, int) else None


def plain_name(name: str) -> str:
    """Return the name that the module has in the bare model: without what PEFT wraps around it."""
    wrappers = {"base_model", "base_layer"}
    parts = [p for p in name.split(".") if p not in wrappers]
    while len(parts) > 1 and parts[0] == "model" and parts[1] == "model":
        parts = parts[1:]
    return ".".join(parts)


class RouterCounter:
    """Counts for all routers of a model. The session calls ``begin_forward`` before each forward of the root."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers
        self._mode: str | None = None
        self._mask: torch.Tensor | None = None
        self._width = max(r.experts for r in routers) + 2
        self._buffers: dict[str, dict[int, torch.Tensor]] = {}
        self._padding_counted: dict[str, bool] = {}
        self._position: dict[int, int] = {}
        self.calls = 0

    def begin_forward(self, mode: str | None, mask: torch.Tensor | None) -> None:
        """Set what the routers called next are to be counted for; None counts nothing."""
        self._mode = mode
        self._mask = None if mask is None else mask.reshape(-1).ne(0).to(torch.int64)

    def count(self, index: int, output: Any) -> None:
        """Add the choice of router ``index``, from its output."""
        mode = self._mode
        # -1 outside of backward: a router called within is being recomputed for a checkpoint
        if mode is None or torch._C._current_graph_task_id() != -1:
            return
        chosen = self._chosen(index, output)
        self.calls += 1
        tokens, k = chosen.shape
        weights, masked = self._weights(tokens, chosen.device)
        experts = self.routers[index].experts
        buffer = self._buffer(mode, index, chosen.device)
        # clamped, for an index out of range would end a CUDA process
        flat = chosen.reshape(-1).to(torch.int64).clamp(0, experts)
        buffer.scatter_add_(0, flat, weights.repeat_interleave(k) if masked else weights.expand(tokens * k))
        buffer[-1] += weights.sum() if masked else tokens
        if self._mask is not None and not masked:
            self._padding_counted[mode] = True

    def _chosen(self, index: int, output: Any) -> torch.Tensor:
        parts = output if isinstance(output, tuple | list) else (output,)
        position = self._position.get(index)
        if position is None:
            position = next(
                (
                    i
                    for i, p in enumerate(parts)
                    if isinstance(p, torch.Tensor) and p.dtype in (torch.int64, torch.int32)
                ),
                None,
            )
            if position is None:
                raise TypeError(f"router {self.routers[index].name} hands over no expert indices")
            self._position[index] = position
        chosen: torch.Tensor = parts[position].detach()
        return chosen.reshape(-1, chosen.shape[-1])

    def _weights(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, bool]:
        mask = self._mask
        if mask is not None and mask.numel() == tokens:
            return mask.to(device), True
        return torch.ones(1, dtype=torch.int64, device=device), False

    def _buffer(self, mode: str, index: int, device: torch.device) -> torch.Tensor:
        buffers = self._buffers.setdefault(mode, {})
        if index not in buffers:
            buffers[index] = torch.zeros(self._width, dtype=torch.int64, device=device)
        return buffers[index]

    def flush(self) -> list[Flush]:
        """Take all counts since the last flush, one stacked copy per mode, and begin anew."""
        flushed = []
        for mode, buffers in self._buffers.items():
            if not buffers:
                continue
            order = sorted(buffers)
            home = buffers[order[0]].device
            stacked = torch.stack([buffers[i].to(home, non_blocking=True) for i in order])
            routers = [self.routers[i] for i in order]
            flushed.append(
                Flush(
                    mode,
                    tuple(r.name for r in routers),
                    Counts(stacked),
                    tuple(r.experts for r in routers),
                    self._padding_counted.pop(mode, False),
                )
            )
        self._buffers.clear()
        return flushed
