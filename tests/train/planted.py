"""Work planted in modules on a virtual clock, and the book of what was really done where."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

Key = tuple[int | None, str]


class VirtualClock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def work(self, seconds: float) -> None:
        self.time += seconds


class Book:
    """Planted work as it was done: seconds by pass, layer and kind. Knows nothing of hooks or marks."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.recording = True
        self.done: dict[str, dict[Key, float]] = {p: defaultdict(float) for p in ("forward", "recompute", "backward")}

    def work(self, key: Key, seconds: float) -> None:
        """Forward work, done now: in recomputation if autograd runs."""
        self.clock.work(seconds)
        if self.recording:
            self.done["forward" if torch._C._current_graph_task_id() == -1 else "recompute"][key] += seconds

    def work_backward(self, key: Key, seconds: float) -> None:
        self.clock.work(seconds)
        if self.recording:
            self.done["backward"][key] += seconds


class WorkInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, book: Book, key: Key, seconds: float) -> torch.Tensor:
        ctx.planted = book, key, seconds
        return tensor.clone()  # not a view, which in-place operations could not follow

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        book, key, seconds = ctx.planted
        book.work_backward(key, seconds)
        return gradient, None, None, None


def plant(module: nn.Module, book: Book, key: Key, seconds: float) -> None:
    """Give a module forward work at its beginning, and backward work at its output and input side.

    Its input is the first floating tensor among its arguments, its output likewise.
    """
    forward = module.forward

    def planted(*args: Any, **kwargs: Any) -> Any:
        book.work(key, seconds)
        args, kwargs = _on_first(args, kwargs, lambda t: WorkInBackward.apply(t, book, key, seconds / 4))
        output = forward(*args, **kwargs)
        return _on_output(output, lambda t: WorkInBackward.apply(t, book, key, seconds / 2))

    module.forward = planted


def _on_first(args: Any, kwargs: Any, change: Any) -> Any:
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return args, {**kwargs, name: change(value)}
    return args, kwargs


def _on_output(output: Any, change: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, tuple):
        first = next(i for i, v in enumerate(output) if isinstance(v, torch.Tensor) and v.is_floating_point())
        return (*output[:first], change(output[first]), *output[first + 1 :])
    return output
