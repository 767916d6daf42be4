"""Bytes of every storage that one micro-batch makes, by the part of the model that made it, from birth to release.

For devices whose allocator keeps no statistics: a CPU's. A dispatch mode sees each operator's results; a weak
reference to a storage tells when it is released. Operators run as they would without it, with the same arguments, and
nothing is kept alive. What an operator takes and gives back inside of itself is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.storages import dtype_name, plain_tensors, tensors_in


class Born(NamedTuple):
    """A storage: its size, who made it, and the type of its numbers."""

    size: int
    tag: str
    dtype: str


class StorageCounter(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Counts from :meth:`start` to :meth:`stop`. ``tag`` is who makes what is made from now on."""

    def __init__(self, guard: Guard, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.tag = "outside"
        self.storages: list[Born] = []
        self.events: list[int] = []
        """Index of a storage when it was made, ``~index`` when it was released, in the order of time."""
        self.current = 0
        self._guard = guard
        self._known = known
        self._alive: dict[int, tuple[int, Any]] = {}
        self._running = False

    def start(self) -> None:
        """Count all that is made from now on by this thread, and in backward passes that it starts."""
        self._running = True
        self.__enter__()  # type: ignore[no-untyped-call, unused-ignore]

    def stop(self) -> None:
        """Count no more."""
        if self._running and _get_current_dispatch_mode() is self:  # type: ignore[no-untyped-call, unused-ignore]
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
        self._running = False

    def forget(self) -> None:
        """Let go of all storages."""
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, then look at what it made."""
        result = func(*args, **(kwargs or {}))
        # what ft-insight itself computes is none of the run's
        if self._running and not self._guard.inside and not self._counted(result):
            self._guard.run("memory", self._saw, result, args)
        return result

    def _counted(self, result: Any) -> bool:
        """Tell, before anything else is done, whether this is a view of what is counted: most results are."""
        try:
            key = result.untyped_storage()._cdata
        except Exception:  # noqa: BLE001 - no plain tensor: whoever looks closer does so behind the guard
            return False
        return key in self._alive or key in self._known

    def _saw(self, result: Any, args: Any) -> None:
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor):
                for tensor in plain_tensors(item):
                    self._note(tensor, args)

    def _note(self, tensor: torch.Tensor, args: Any) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        if any(key == inner.untyped_storage()._cdata for given in tensors_in(args) for inner in plain_tensors(given)):
            return  # a view of something that was there before
        index = len(self.storages)
        size = storage.nbytes()
        self.storages.append(Born(size, self.tag, dtype_name(tensor)))
        self._alive[key] = index, weakref.ref(storage, lambda _: self._released(key, index))
        self.events.append(index)
        self.current += size

    def _released(self, key: int, index: int) -> None:
        if key in self._alive and self._alive[key][0] == index:
            del self._alive[key]
            self.events.append(~index)
            self.current -= self.storages[index].size

    def alive(self) -> dict[int, int]:
        """Return the storages that are there now: address -> index."""
        return {key: index for key, (index, _) in self._alive.items()}

    def fullest(self) -> tuple[int, set[int]]:
        """Return the most bytes at once, and which storages that were."""
        current = most = at = 0
        for place, event in enumerate(self.events):
            current += self.storages[event].size if event >= 0 else -self.storages[~event].size
            if current > most:
                most, at = current, place + 1
        there: set[int] = set()
        for event in self.events[:at]:
            if event >= 0:
                there.add(event)
            else:
                there.discard(~event)
        return most, there
