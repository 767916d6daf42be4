"""A close look at the memory of one micro-batch: what every kind of layer leaves behind for backward, and the peak.

Two ways to the same moments. On a GPU the allocator's sum is read where parts begin and end; what a part has left
behind is the difference. Elsewhere every storage is counted (``StorageCounter``), so that the peak itself is known
part by part. What comes after the last norm, the head and the loss, is told apart from the layers' activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ft_insight.callbacks.guard import Guard, Hook
from ft_insight.callbacks.layers import in_backward, nodes_of
from ft_insight.callbacks.modules import Part
from ft_insight.callbacks.storage_counter import StorageCounter
from ft_insight.callbacks.storages import Inventory
from ft_insight.records import MemoryPart

TAIL = "logits_and_loss"
MODEL = "model"
"""Kind of what is made between the parts."""
BACKWARD = "backward"
CHECKPOINTED = 0.5
"""A part that leaves behind less than this of what its inner parts did has given theirs up: it recomputes."""
Counted = dict[tuple[str, str], int]


@dataclass
class _Open:
    """A part that is being called: what was allocated when it began, and what its inner parts have left behind."""

    kind: str
    begun: int
    left: dict[str, int] = field(default_factory=dict)


def left_behind(kind: str, total: int, inner: dict[str, int]) -> dict[str, int]:
    """Share out what a part has left behind in all among its own kind and those of its inner parts."""
    within = sum(inner.values())
    if total >= within:
        return {**inner, kind: inner.get(kind, 0) + total - within}
    if total <= CHECKPOINTED * within:
        return {kind: total} if total > 0 else {}
    return {name: count * total // within for name, count in inner.items()}


class Look:
    """Puts hooks on the model's parts for one micro-batch. Subclasses say what is noted where."""

    def __init__(self, parts: Sequence[Part], guard: Guard) -> None:
        self._parts = parts
        self._guard = guard
        self._handles: list[Any] = []
        self._open: list[_Open] = []
        self._tail = False

    def begin(self) -> None:
        """A micro-batch begins."""
        for part in self._parts:
            before, after = self._hooks(part)
            self._handles.append(part.module.register_forward_pre_hook(Hook(self._guard, "memory", before)))
            self._handles.append(
                part.module.register_forward_hook(Hook(self._guard, "memory", after), always_call=True)
            )

    def end(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hooks(self, part: Part) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any) -> None:
            if part.kind == "head" and not in_backward():
                self._tail_begins()
            self._enter(part)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(part, output)
            if part.kind == "final_norm" and not in_backward():
                self._tail_begins()

        return before, after

    def _enter(self, part: Part) -> None:
        raise NotImplementedError

    def _leave(self, part: Part, output: Any) -> None:
        raise NotImplementedError

    def _tail_begins(self) -> None:
        self._tail = True


class AllocatorLook(Look):
    """By differences of the allocator's sum, which ``allocated`` reads on the host, without a synchronisation."""

    def __init__(self, parts: Sequence[Part], guard: Guard, allocated: Callable[[], int]) -> None:
        super().__init__(parts, guard)
        self._read = allocated
        self.most = 0
        """The most that was read."""
        self._forward = 0
        self._tail_at: int | None = None
        self._left: dict[str, int] = {}

    def allocated(self) -> int:
        """Read the sum."""
        now = self._read()
        self.most = max(self.most, now)
        return now

    def forward_begins(self) -> None:
        """The root of the model is called."""
        self._forward = self.allocated()

    def _enter(self, part: Part) -> None:
        now = self.allocated()
        if not in_backward():
            self._open.append(_Open(part.kind, now))

    def _leave(self, part: Part, output: Any) -> None:
        now = self.allocated()
        if in_backward():
            return
        if self._open:
            me = self._open.pop()
            home = self._open[-1].left if self._open else self._left
            for kind, count in left_behind(me.kind, now - me.begun, me.left).items():
                home[kind] = home.get(kind, 0) + count
        if part.parent is None and torch.is_grad_enabled() and output is not None:
            for node in nodes_of(output):
                node.register_prehook(self._passed)

    def _passed(self, gradients: Any) -> None:
        """Autograd has come to the node that made a part's output."""
        if self._handles:
            self._guard.run("memory", self.allocated)

    def _tail_begins(self) -> None:
        if not self._tail:
            self._tail_at = self.allocated()
        super()._tail_begins()

    def activations(self) -> Counted:
        """Return what waits for backward, now that it is about to begin; the kinds add up to what was read."""
        now = self.allocated()
        tail_at = now if self._tail_at is None else self._tail_at
        kinds = {kind: n for kind, n in self._left.items() if kind != "head"}  # the head is of the tail
        total = max(0, tail_at - self._forward)
        shared = left_behind(MODEL, total, kinds)
        found: Counted = {("activations", kind): n for kind, n in shared.items() if n > 0}
        if now > tail_at:
            found[TAIL, ""] = now - tail_at
        return found


class CountedLook(Look):
    """By all storages that the micro-batch makes."""

    def __init__(self, parts: Sequence[Part], guard: Guard, static: Inventory) -> None:
        super().__init__(parts, guard)
        self.counter = StorageCounter(guard, static.seen)
        self._waiting: dict[int, int] = {}
        self._born_by_then = 0

    def begin(self) -> None:
        """Count from here on."""
        super().begin()
        self.counter.tag = MODEL
        self.counter.start()

    def end(self) -> None:
        """Count no more."""
        self.counter.stop()
        super().end()

    def _enter(self, part: Part) -> None:
        self._open.append(_Open(part.kind, 0))
        self._tag()

    def _leave(self, part: Part, output: Any) -> None:
        if self._open:
            self._open.pop()
        self._tag()

    def _tail_begins(self) -> None:
        super()._tail_begins()
        self._tag()

    def _tag(self) -> None:
        """Name who makes what comes next; a part that is open in backward is being recomputed."""
        if in_backward():
            self.counter.tag = self._open[-1].kind if self._open else BACKWARD
        else:
            self.counter.tag = TAIL if self._tail else self._open[-1].kind if self._open else MODEL

    def activations(self) -> Counted:
        """Return what waits for backward, now that it is about to begin."""
        self._waiting = self.counter.alive()
        self._born_by_then = len(self.counter.storages)
        self._open.clear()
        self.counter.tag = BACKWARD
        return self._sum(set(self._waiting.values()), set())

    def so_far(self) -> Counted:
        """Return all that is there in the middle of the micro-batch."""
        found: Counted = {}
        for index in self.counter.alive().values():
            born = self.counter.storages[index]
            key = {TAIL: (TAIL, ""), BACKWARD: ("temporaries", "")}.get(born.tag, ("activations", born.tag))
            found[key] = found.get(key, 0) + born.size
        return found

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> tuple[int, Counted, Counted]:
        """Return the peak in bytes, its parts, and those that are left now, gradients told apart."""
        alive = self.counter.alive()
        gradients = set()
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.add(alive.get(parameter.grad.untyped_storage()._cdata, -1))
        most, there = self.counter.fullest()
        now = self._sum(set(alive.values()), gradients, beyond="other")
        self.counter.forget()
        return most, self._sum(there, gradients), now

    def _sum(self, indices: set[int], gradients: set[int], beyond: str = "temporaries") -> Counted:
        waiting = set(self._waiting.values())
        found: Counted = {}
        for index in indices:
            key = self._key(index, gradients, waiting, beyond)
            found[key] = found.get(key, 0) + self.counter.storages[index].size
        return found

    def _key(self, index: int, gradients: set[int], waiting: set[int], beyond: str) -> tuple[str, str]:
        born = self.counter.storages[index]
        if index in gradients:
            return "gradients", born.dtype
        if beyond == "other":
            return beyond, ""
        if index in waiting:
            return (TAIL, "") if born.tag == TAIL else ("activations", born.tag)
        if born.tag == TAIL:
            return TAIL, ""
        recomputed = index >= self._born_by_then and born.tag not in (BACKWARD, MODEL)
        return ("activations", born.tag) if recomputed else (beyond, "")


def as_parts(counted: Counted) -> tuple[MemoryPart, ...]:
    """Put counted bytes into records, the largest first."""
    ordered = sorted(counted.items(), key=lambda item: -item[1])
    return tuple(MemoryPart(category, detail, count) for (category, detail), count in ordered if count)


def merged(*counts: Counted) -> Counted:
    """Add up."""
    found: Counted = {}
    for one in counts:
        for key, count in one.items():
            found[key] = found.get(key, 0) + count
    return found
