"""A trainer as it was: all that a few steps of training change is kept, and put back as often as is asked.

Weights that train, buffers and optimizer state are kept on the host, so that they take none of the memory that is
being measured. Of a user's own objects the trainer, its data set and its collator are kept, with their plain
containers, tensors and random generators; what those hold beyond (files, a stream that can be read once) is out of
reach.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import Dataset

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
LARGEST_STATE = 1000
"""Entries beyond which a container, and of a data set a tensor, is data rather than state, and is left as it is."""
DEEPEST = 3

Restore = Callable[[], object]


class Snapshot:
    """All that ``trainer.train()`` changes, as it is now."""

    def __init__(self, trainer: Any) -> None:
        model, optimizer = trainer.model, inner_optimizer(trainer.optimizer)
        self._restores: list[Restore] = []
        self._seen: set[int] = set()
        for parameter in model.parameters():
            self._restores.append(_gradient(parameter))
            if parameter.requires_grad:
                self._keep_tensor(parameter)
            self._seen.add(id(parameter))  # frozen ones stay what they are, and may fill all memory that there is
        for buffer in model.buffers():
            self._keep_tensor(buffer)
        for module in model.modules():
            self._keep_attributes(module, 1)
        if optimizer is not None:
            self._keep_contents(optimizer.state, DEEPEST, most=None)
        for item in _objects(trainer):
            self._keep_attributes(item, DEEPEST)
        for item in (trainer.train_dataset, trainer.data_collator):
            if hasattr(item, "__dict__"):
                self._keep_attributes(item, DEEPEST, LARGEST_STATE)
        self._restores.append(_random_state())

    def restore(self) -> None:
        """Put everything back. What was allocated since is given back by :func:`free_memory`."""
        with torch.no_grad():
            for put_back in self._restores:
                put_back()

    def _keep_attributes(self, owner: Any, depth: int, largest: int | None = None) -> None:
        """Keep an object's attributes, and what those among them hold that training changes in place.

        ``largest`` is how many elements a tensor may have to be kept.
        """
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        kept = dict(vars(owner))

        def put_back() -> None:
            own = vars(owner)
            own.clear()
            own.update(kept)

        self._restores.append(put_back)
        for value in kept.values():
            self._keep_value(value, depth, largest)

    def _keep_value(self, value: Any, depth: int, largest: int | None) -> None:
        if isinstance(value, torch.Tensor):
            if largest is None or value.numel() <= largest:
                self._keep_tensor(value)
        elif type(value) in CONTAINERS and depth > 0:
            self._keep_contents(value, depth, largest)
        elif isinstance(value, Dataset) and depth > 0:
            self._keep_attributes(value, depth - 1, LARGEST_STATE)
        else:
            put_back = _generator(value)
            if put_back is not None:
                self._restores.append(put_back)

    def _keep_contents(
        self, value: Any, depth: int, largest: int | None = None, most: int | None = LARGEST_STATE
    ) -> None:
        if id(value) in self._seen or (most is not None and len(value) > most):
            return
        self._seen.add(id(value))
        kept = copy.copy(value)

        def put_back() -> None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)

        self._restores.append(put_back)
        for item in list(value.values() if isinstance(value, dict) else value):
            self._keep_value(item, depth - 1, largest)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen or not _writable(tensor):
            return
        self._seen.add(id(tensor))
        kept = tensor.detach().to("cpu", copy=True)

        def put_back() -> None:
            tensor.detach().copy_(kept)

        self._restores.append(put_back)


def free_memory() -> None:
    """Give back to the device what nobody holds any more. Every ``train()`` begins with the same."""
    clear_device_cache(garbage_collection=True)


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer under accelerate's wrapper; None where there is none yet."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _objects(trainer: Any) -> Iterator[Any]:
    """Yield the objects beside the model whose attributes training sets."""
    accelerator = trainer.accelerator
    model = getattr(trainer.model, "config", None), getattr(trainer.model, "generation_config", None)
    parts = (trainer, trainer.args, trainer.state, trainer.control, trainer.callback_handler, accelerator)
    more = (accelerator.gradient_state, accelerator.scaler, trainer.optimizer, inner_optimizer(trainer.optimizer))
    for item in (*parts, *more, trainer.lr_scheduler, *model):
        if item is not None and hasattr(item, "__dict__"):
            yield item


def _writable(tensor: torch.Tensor) -> bool:
    """Tell whether training can have changed a tensor in place: else it cannot be put back so either."""
    overlaps = tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not (tensor.is_meta or tensor.is_inference() or overlaps)


def _gradient(parameter: nn.Parameter) -> Restore:
    gradient, trains = parameter.grad, parameter.requires_grad

    def put_back() -> None:
        parameter.requires_grad_(trains)
        parameter.grad = gradient

    return put_back


def _generator(value: Any) -> Restore | None:
    """Return what puts a random number generator back where it is; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    return None


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
