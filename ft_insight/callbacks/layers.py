"""Time per layer and kind of layer, in forward, recomputation and backward, on sampled steps.

Forward is what lies between a part's pre-hook and its post-hook, less its inner parts. Backward has no such hooks that
are safe: those that wrap tensors crash on in-place operations and read nothing where a part is called with keyword
arguments only. But autograd runs the nodes of a device in reverse order of their making, so that each part's backward
is one stretch. It is enough to mark where it begins: a pre-hook on the node that made the part's output. Nothing that
the model computes with is touched.

Marks are only recorded while a step runs; what they mean is worked out afterwards (``replay``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ft_insight.callbacks.clock import Event, HostClock
from ft_insight.callbacks.guard import Guard, Hook
from ft_insight.callbacks.modules import Part

MARKED = "ft_insight"
"""Key in a node's metadata: the first part to claim a node has it."""
MOST_MARKS = 3000
"""In a step; further micro-batches of a step are not timed. Keeps far from the clock's ``MAX_EVENTS``."""
HOOKED_KINDS = frozenset({"router", "experts", "shared_expert", "attention", "mamba", "mlp", "norm", "moe"})
"""Kinds whose input is marked as well, so that what their parent does before them is the parent's."""


class Mark(NamedTuple):
    """A place that the host passed: what it means, of which part, when by the host, and the event if there is one."""

    what: str
    part: int
    host_s: float
    event: Event | None


class LayerTimer:
    """Records marks during sampled steps. Install, run one step, remove, replay."""

    def __init__(self, parts: list[Part], clock: HostClock, guard: Guard) -> None:
        self.parts = parts
        self._clock = clock
        self._guard = guard
        self._index = {id(part): i for i, part in enumerate(parts)}
        self._handles: list[Any] = []
        self._marks: list[Mark] = []
        self._generation = 0
        self._open = False

    @property
    def installed(self) -> bool:
        """Hooks are in the model."""
        return bool(self._handles)

    def install(self) -> None:
        """Put hooks on all parts, for one step."""
        self.remove()
        self._marks = []
        for index, part in enumerate(self.parts):
            before, after = self._hooks(index, part)
            self._handles.append(
                part.module.register_forward_pre_hook(Hook(self._guard, "layers", before), with_kwargs=True)
            )
            # always, for a checkpoint that has recomputed enough leaves by an exception
            self._handles.append(
                part.module.register_forward_hook(
                    Hook(self._guard, "layers", after), with_kwargs=True, always_call=True
                )
            )

    def remove(self) -> None:
        """Take all hooks out again; those on autograd's nodes fall silent and go with their graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._generation += 1
        self._open = False

    def take(self) -> list[Mark]:
        """Return the marks of the step and forget them."""
        marks, self._marks = self._marks, []
        return marks

    # what the session tells

    def micro_begins(self) -> None:
        """A micro-batch begins; time it if there is room for its marks."""
        self._open = self.installed and len(self._marks) < MOST_MARKS
        self._mark("micro", -1)

    def mark(self, what: str) -> None:
        """Mark a place of the whole model: ``forward``, ``backward`` or ``backward end``."""
        self._mark(what, -1)

    def micro_ends(self) -> None:
        """It is over."""
        self._mark("micro end", -1)
        self._open = False

    def _mark(self, what: str, part: int) -> None:
        if self._open:
            self._marks.append(Mark(what, part, self._clock.now(), self._clock.event()))

    # hooks

    def _hooks(self, index: int, part: Part) -> tuple[Callable[..., None], Callable[..., None]]:
        parent = -1 if part.parent is None else self._index[id(part.parent)]
        marks_input = part.kind in HOOKED_KINDS

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._open:
                return
            if marks_input and torch.is_grad_enabled():
                for node in nodes_of((args, kwargs)):
                    self._watch(node, parent, "parent")
            self._mark("recompute" if in_backward() else "enter", index)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._open:
                return
            self._mark("recomputed" if in_backward() else "leave", index)
            if output is not None and torch.is_grad_enabled():
                inputs = set(map(id, nodes_of((args, kwargs))))
                for node in nodes_of(output):
                    if id(node) not in inputs:
                        self._watch(node, index, "begin")

        return before, after

    def _watch(self, node: Any, part: int, what: str) -> None:
        """Mark when autograd comes to this node. The first to claim it has it: that is who made it."""
        generation = self._generation
        if node.metadata.get(MARKED) == generation:
            return
        node.metadata[MARKED] = generation

        def passed(gradients: Any) -> None:
            if generation == self._generation:
                self._guard.run("layers", self._mark, what, part)

        node.register_prehook(passed)


def in_backward() -> bool:
    """Tell whether autograd is running: a part called then is being recomputed."""
    return torch._C._current_graph_task_id() != -1


def nodes_of(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the nodes of autograd's graph that made the tensors in a value, however they are packed."""
    if isinstance(value, torch.Tensor):
        node = value.grad_fn
        if node is not None:
            yield node
    elif depth:
        for item in _items(value):
            yield from nodes_of(item, depth - 1)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return ()
