"""Every storage that a training step makes and drops, in order, without memory behind any of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ft_insight.estimate.plan.allocator import rounded

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
LOSS = "logits and loss"
BACKWARD = "backward temporaries"
UPDATE = "optimizer temporaries"
LIBRARIES = "library workspaces"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BACKWARD, UPDATE, LIBRARIES)


@dataclass(slots=True)
class Log:
    """What was allocated and freed: (key, bytes), -1 bytes for a free; and what each key is."""

    events: list[tuple[int, int]] = field(default_factory=list)
    category: list[str] = field(default_factory=list)
    flops: float = 0.0

    def allocate(self, nbytes: int, category: str) -> int:
        """Note an allocation and return its key."""
        key = len(self.category)
        self.category.append(category)
        self.events.append((key, nbytes))
        return key

    def free(self, key: int) -> None:
        """Note that a key is gone."""
        self.events.append((key, -1))

    def peak(self) -> tuple[int, dict[str, int]]:
        """Return the peak in bytes, rounded as the allocator does, and what it is made of at that moment."""
        live: dict[int, int] = {}
        now = peak = at = 0
        for place, (key, nbytes) in enumerate(self.events):
            if nbytes < 0:
                now -= live.pop(key)
                continue
            live[key] = rounded(nbytes)
            now += live[key]
            if now > peak:
                peak, at = now, place
        return peak, self._parts(at)

    def _parts(self, at: int) -> dict[str, int]:
        live: dict[int, int] = {}
        for key, nbytes in self.events[: at + 1]:
            if nbytes < 0:
                del live[key]
            else:
                live[key] = rounded(nbytes)
        parts = dict.fromkeys(CATEGORIES, 0)
        for key, nbytes in live.items():
            parts[self.category[key]] += nbytes
        return parts


class StorageTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that operations return, and counts matrix FLOPs.

    A storage is noted when it is first seen and again when its last reference goes, which with fake tensors is when
    a GPU would have freed it. Tensors that only live inside of a kernel are not seen; those of the kernels that take
    much are made visible by `cuda_kernels`.
    """

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.phase = WEIGHTS
        self.counting = False
        self._seen: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it made."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
            elif isinstance(leaf, (tuple, list)):
                self.see_all(leaf)
        if self.counting:
            count = flop_registry.get(func._overloadpacket)
            if count is not None:
                self.log.flops += count(*args, **kwargs, out_val=out)
            elif "grouped_mm" in func._opname:
                self.log.flops += _grouped(*args)
        return out

    def count(self, flops: float) -> None:
        """Add FLOPs that no operation shows, while they are counted."""
        if self.counting:
            self.log.flops += flops

    def see(self, tensor: torch.Tensor, category: str | None = None) -> int:
        """Note the storage of a tensor unless it is known, and return its key; with ``category``, (re)name it."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        known = self._seen.get(place)
        if known is None:
            key = self.log.allocate(storage.nbytes(), category or self.phase)
            self._seen[place] = (key, weakref.ref(storage, self._forgetter(place, key)))
            return key
        if category is not None:
            self.log.category[known[0]] = category
        return known[0]

    def see_all(self, tensors: Iterable[Any], category: str | None = None) -> None:
        """Note the storages of all tensors among ``tensors``."""
        for leaf in tree_leaves(list(tensors)):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, category)

    def _forgetter(self, place: int, key: int) -> Any:
        seen, log = self._seen, self.log

        def forget(_: Any) -> None:
            seen.pop(place, None)
            log.free(key)

        return forget

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what is allocated inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def _grouped(one: torch.Tensor, other: torch.Tensor, *_: Any) -> float:
    """Return the FLOPs of a product of rows, grouped by expert, with each expert's matrix; or of its gradient."""
    return 2.0 * one.numel() * other.shape[-1]
