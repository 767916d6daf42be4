"""A trainer as it was: all that a few steps of training change is kept, and put back as often as is asked.

Weights that train, buffers and optimizer state are kept on the host, so that they take none of the memory that is
being measured. What a user's own objects hold beyond plain attributes (files, a stream that can be read once) is out
of reach.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
LARGEST_STATE = 1000
"""Entries beyond which a container is data rather than state, and is left as it is."""
DEEPEST = 3

Restore = Callable[[], None]


class Snapshot:
    """All that ``trainer.train()`` changes, as it is now."""

    def __init__(self, trainer: Any) -> None:
        model = trainer.model
        self._restores: list[Restore] = [_attributes(item, 1) for item in model.modules()]
        self._restores += [_attributes(item, DEEPEST) for item in _objects(trainer)]
        self._restores += [_tensor(p) for p in model.parameters() if p.requires_grad]
        self._restores += [_tensor(b) for b in model.buffers()]
        self._restores += [_gradient(p) for p in model.parameters()]
        optimizer = _inner(trainer.optimizer)
        if optimizer is not None:
            self._restores.append(_optimizer_state(optimizer))
        self._restores.append(_random_state())

    def restore(self) -> None:
        """Put everything back. What was allocated since is given back by :func:`free_memory`."""
        with torch.no_grad():
            for put_back in self._restores:
                put_back()


def free_memory() -> None:
    """Give back to the device what nobody holds any more. Every ``train()`` begins with the same."""
    clear_device_cache(garbage_collection=True)


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _objects(trainer: Any) -> Iterator[Any]:
    """Yield the objects beside the model whose attributes training sets, each once."""
    accelerator = trainer.accelerator
    model = getattr(trainer.model, "config", None), getattr(trainer.model, "generation_config", None)
    parts = (trainer, trainer.args, trainer.state, trainer.control, trainer.callback_handler, accelerator)
    more = (accelerator.gradient_state, accelerator.scaler, trainer.optimizer, _inner(trainer.optimizer))
    seen: set[int] = set()
    for item in (*parts, *more, trainer.lr_scheduler, *model):
        if item is not None and hasattr(item, "__dict__") and id(item) not in seen:
            seen.add(id(item))
            yield item


def _attributes(owner: Any, depth: int) -> Restore:
    """Keep an object's attributes, and what plain containers among them hold."""
    kept = dict(vars(owner))
    inside = [restore for value in kept.values() for restore in _contents(value, depth)]
    if not isinstance(owner, nn.Module):
        inside += [_tensor(v) for v in kept.values() if isinstance(v, torch.Tensor)]

    def put_back() -> None:
        own = vars(owner)
        own.clear()
        own.update(kept)
        for restore in inside:
            restore()

    return put_back


def _contents(value: Any, depth: int) -> list[Restore]:
    if type(value) not in CONTAINERS or len(value) > LARGEST_STATE or depth == 0:
        return []
    kept = copy.copy(value)
    items = value.values() if isinstance(value, dict) else value
    inside = [restore for item in items for restore in _contents(item, depth - 1)]

    def put_back() -> None:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(kept)
        for restore in inside:
            restore()

    return [put_back]


def _tensor(tensor: torch.Tensor) -> Restore:
    kept = tensor.detach().to("cpu", copy=True)

    def put_back() -> None:
        tensor.detach().copy_(kept)

    return put_back


def _gradient(parameter: nn.Parameter) -> Restore:
    gradient = parameter.grad

    def put_back() -> None:
        parameter.grad = gradient

    return put_back


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Restore:
    kept = _on_host(optimizer.state_dict())

    def put_back() -> None:
        optimizer.load_state_dict(copy.deepcopy(kept))  # which takes tensors as they are: ours must stay ours

    return put_back


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return [_on_host(item) for item in value] if isinstance(value, list) else value


def _random_state() -> Restore:
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return put_back
