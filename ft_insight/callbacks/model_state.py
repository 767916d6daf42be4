"""What a model is beside its weights: all that its modules hold, kept so that it can be put back to the last bit.

A forward pass may change more than it returns: a rotary embedding that grows with the longest row, a mask or a table
that is kept for the next call, a counter, a dictionary of one cache per length. Which of these a family has changes
with every release of its library, so nothing here goes by names: whatever hangs on a module is walked, as deep as
containers and plain objects go, and each thing that can change is noted with what it held.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

SMALL_BYTES = 4 << 20
"""Buffers and plain tensors up to this size are copied, so that what is written into them can be undone."""
SMALL_PARAMETER_BYTES = 64 << 10
"""The same for parameters, into which a forward pass hardly ever writes, but for a router's corrections."""
MOST_BYTES = 256 << 20
"""Of all copies together: they must not be what ends a GPU's memory."""
MOST_OBJECTS = 2_000_000

_UNCHANGING = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, property, functools.partial),
)
_CONTAINERS = (dict, list, set, bytearray, collections.deque)
_NOT_THE_MODELS = (
    *(
        "ft_insight.",
        "threading.",
        "_thread.",
        "logging.",
        "torch.utils.hooks.",
        "torch.distributed.",
        "torch.autograd.",
    ),
    "bitsandbytes.",
)
"""Where classes are from whose objects hang on a model without being its state: hooks, locks, loggers, process groups,
and how quantised weights are to be read, which are as large as weights and as constant."""


class ModelState:
    """All that hangs on a model, as it was when this was made.

    Small tensors are copied. Of larger ones only the count of writes is kept: what is written into one of them is
    lost, and ``restore`` says so.

    Raises:
        ValueError: if so much hangs on the model that it cannot all be looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], str | None]] = []
        self._seen: dict[int, Any] = {}  # the objects themselves too, so that no number is given out twice
        self._copied_bytes = 0
        waiting: list[tuple[str, Any]] = [(type(model).__name__, model)]
        while waiting:
            name, thing = waiting.pop()
            if isinstance(thing, _UNCHANGING) or id(thing) in self._seen:
                continue
            if len(self._seen) >= MOST_OBJECTS:
                raise ValueError(f"more than {MOST_OBJECTS:,} objects hang on the model")
            self._seen[id(thing)] = thing
            waiting += self._note(name, thing)

    def restore(self) -> list[str]:
        """Put everything back; return the names of tensors whose content is lost."""
        return [lost for undo in self._undo if (lost := undo()) is not None]

    def _note(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        """Note what ``thing`` holds, and return what is to be walked next."""
        if isinstance(thing, torch.Tensor):
            self._undo.append(self._undo_tensor(name, thing))
            return iter(())
        if isinstance(thing, _CONTAINERS):
            self._undo.append(_undo_container(thing))
            return _inside(name, thing)
        if isinstance(thing, tuple | frozenset):
            return _inside(name, thing)
        if isinstance(thing, types.MethodType):
            return iter([(name, thing.__self__)])
        if not isinstance(thing, nn.Module) and _is_foreign(type(thing)):
            return iter(())
        return self._note_object(thing)

    def _undo_tensor(self, name: str, tensor: torch.Tensor) -> Callable[[], str | None]:
        version, place, size = _version(tensor), _place(tensor), tensor.numel() * tensor.element_size()
        most = SMALL_PARAMETER_BYTES if isinstance(tensor, nn.Parameter) else SMALL_BYTES
        small = place is not None and size <= most and self._copied_bytes + size <= MOST_BYTES
        self._copied_bytes += size if small else 0
        kept = tensor.detach().clone() if small else None

        def undo() -> str | None:
            if kept is None:
                return None if (_version(tensor), _place(tensor)) == (version, place) else name
            if _place(tensor) != place:
                tensor.data = kept
            elif not torch.equal(tensor, kept):
                # by content: what is written through ``.data`` or in inference mode is counted by nobody
                with torch.no_grad():
                    tensor.detach().copy_(kept)
            return None

        return undo

    def _note_object(self, thing: Any) -> Iterator[tuple[str, Any]]:
        own = getattr(thing, "__dict__", None)
        slots = {name: getattr(thing, name) for name in _slots(type(thing)) if hasattr(thing, name)}
        kind = type(thing).__name__
        if isinstance(own, dict):
            self._seen[id(own)] = own
            self._undo.append(_undo_container(own))
            yield from ((f"{kind}.{name}", value) for name, value in own.items())
        if slots:
            self._undo.append(_undo_slots(thing, slots))
            yield from ((f"{kind}.{name}", value) for name, value in slots.items())


def _inside(name: str, container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, bytearray):
        return iter(())
    if isinstance(container, dict):
        # a module's own names are told with its class: ``MixtralRotaryEmbedding.inv_freq``
        return ((f"{name.removesuffix('._buffers').removesuffix('._parameters')}.{k}", v) for k, v in container.items())
    return ((name, value) for value in container)


def _is_foreign(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_NOT_THE_MODELS)


def _slots(kind: type) -> list[str]:
    names = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    flat = [name for group in names for name in ((group,) if isinstance(group, str) else group)]
    return [name for name in flat if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _undo_slots(thing: Any, values: dict[str, Any]) -> Callable[[], None]:
    def undo() -> None:
        for name, value in values.items():
            if getattr(thing, name, None) is not value:
                setattr(thing, name, value)

    return undo


def _undo_container(container: Any) -> Callable[[], None]:
    """Return what gives a container the same items again, in the same order; it stays the same object."""
    kept = next(kind for kind in _CONTAINERS if isinstance(container, kind))(container)

    def undo() -> None:
        if _holds_the_same(container, kept):
            return
        if isinstance(container, list | bytearray):
            container[:] = kept
        elif isinstance(container, collections.deque):
            container.clear()
            container.extend(kept)
        else:
            container.clear()
            container.update(kept)

    return undo


def _holds_the_same(container: Any, kept: Any) -> bool:
    if len(container) != len(kept):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), kept.items(), strict=True)
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(container, set | bytearray):
        return bool(container == kept)
    return all(a is b for a, b in zip(container, kept, strict=True))


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return where a tensor's content lies and how; None where it is not to be copied: meta, sharded, quantised ..."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return None
    if tensor.layout != torch.strided or 0 in tensor.stride():
        return None
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written into; None where torch does not keep count."""
    return None if tensor.is_inference() else tensor._version
