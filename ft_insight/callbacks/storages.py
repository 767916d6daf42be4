"""What holds memory from one step to the next, counted by storage: each once, however many tensors share it.

Weights that two layers tie, gradients that are views into a bucket, and the constants of quantised weights are thus
neither missed nor counted twice. Only the device that the run computes on counts: what is offloaded elsewhere is not
in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ft_insight.records import MemoryPart

QUANTISED_BUFFERS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
"""Where GPTQ and AWQ layers keep their weights."""
CONSTANTS = "constants"
"""Detail of what a quantised weight needs beside its packed values: scales, code books, both levels of them."""
DEPTH = 4


@dataclass
class Inventory:
    """Bytes by category and detail on one device. The first to name a storage has it."""

    device: torch.device
    parts: dict[tuple[str, str], int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def add(self, category: str, detail: str | None, tensor: torch.Tensor) -> None:
        """Count the storages of a tensor that are not counted yet; without a detail it is the type of its numbers."""
        for inner in plain_tensors(tensor):
            if not self._here(inner):
                continue
            storage = inner.untyped_storage()
            if storage._cdata in self.seen or not storage.nbytes():
                continue
            self.seen.add(storage._cdata)
            key = category, dtype_name(inner) if detail is None else detail
            self.parts[key] = self.parts.get(key, 0) + storage.nbytes()

    def _here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def records(self) -> list[MemoryPart]:
        """Return the parts, the largest first within each category."""
        ordered = sorted(self.parts.items(), key=lambda item: -item[1])
        return [MemoryPart(category, detail, count) for (category, detail), count in ordered]


def take_inventory(model: nn.Module, optimizer: Any, device: torch.device) -> Inventory:
    """Count weights, adapters, buffers, gradients and the optimizer's state.

    States that bitsandbytes pages to the host are not in the allocator's memory and left out.
    """
    found = Inventory(device)
    adapts = hasattr(model, "peft_config")
    prefix = str(getattr(getattr(model, "base_model", None), "prefix", None) or "lora_")
    for name, parameter in model.named_parameters():
        if adapts and (parameter.requires_grad or prefix in name):
            found.add("adapters", None, parameter.data)
        else:
            _add_weight(found, parameter)
    _add_kept_by_modules(found, model)
    for name, buffer in model.named_buffers():
        packed = name.rpartition(".")[2] in QUANTISED_BUFFERS
        found.add("quantised_weights" if packed else "buffers", None, buffer)
    add_gradients(found, model.parameters())
    for state in dict(getattr(optimizer, "state", None) or {}).values():
        for tensor in tensors_in(state):
            if not getattr(tensor, "is_paged", False):
                found.add("optimizer_state", None, tensor)
    return found


def add_gradients(found: Inventory, parameters: Iterable[nn.Parameter]) -> None:
    """Count the gradients that are there now."""
    for parameter in parameters:
        if parameter.grad is not None:
            found.add("gradients", None, parameter.grad)


def _add_weight(found: Inventory, parameter: nn.Parameter) -> None:
    state = getattr(parameter, "quant_state", None)
    kind = type(parameter).__name__
    if kind == "Int8Params":
        found.add("quantised_weights", "int8", parameter.data)
        _add_constants(found, [getattr(parameter, "CB", None), getattr(parameter, "SCB", None)])
    elif kind == "Params4bit" and state is not None:
        found.add("quantised_weights", str(getattr(state, "quant_type", "4-bit")), parameter.data)
        _add_constants(found, _quantisation_constants(state))
    elif hasattr(parameter.data, "__tensor_flatten__") and not hasattr(parameter.data, "_local_tensor"):
        found.add("quantised_weights", None, parameter.data)  # torchao's; a DTensor is a plain weight in pieces
    else:
        found.add("weights", None, parameter.data)


def _quantisation_constants(state: Any) -> list[Any]:
    """Return the scales and the code book of a weight, and those of its scales where they are quantised too."""
    nested = getattr(state, "state2", None)
    levels = [level for level in (state, nested) if level is not None]
    return [getattr(level, name, None) for level in levels for name in ("absmax", "code", "offset")]


def _add_kept_by_modules(found: Inventory, model: nn.Module) -> None:
    """An 8-bit layer of bitsandbytes moves its weight's scales into a state of its own."""
    for module in model.modules():
        state = getattr(module, "state", None)
        if type(state).__name__ == "MatmulLtState":
            _add_constants(found, [getattr(state, "CB", None), getattr(state, "SCB", None)])


def _add_constants(found: Inventory, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add("quantised_weights", CONSTANTS, value)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor subclass is made of; a plain one is its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, depth - 1)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's numbers as people write it: ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
