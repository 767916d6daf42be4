"""Memory that ended: told from other exceptions, and recorded before the exception goes on its way."""

from __future__ import annotations

import re

import torch

from ft_insight import records as r
from ft_insight.callbacks.memory_look import as_parts
from ft_insight.callbacks.memory_watch import MemoryWatch, device_memory

MESSAGES = (" out of memory", "DefaultCPUAllocator: can't allocate memory")
"""Of a ``RuntimeError``, for not every allocator raises torch's own class."""
MOST_CHARACTERS = 400
"""Of a message that are kept: torch appends its whole bookkeeping."""
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]?i?B)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory ended, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


def requested_bytes(message: str) -> int | None:
    """Return what could not be had, as torch's message tells it: ``Tried to allocate 2.00 GiB``."""
    found = _REQUESTED.search(message)
    if found is None or found[2] not in _UNITS:
        return None
    return round(float(found[1]) * _UNITS[found[2]])


def out_of_memory(
    error: BaseException, watch: MemoryWatch, phase: str, step: int, t_s: float, shape: tuple[int | None, int | None]
) -> r.OutOfMemory:
    """Return what is known at the moment of failure; ``shape`` is queries and slots of the micro-batch."""
    message = str(error)
    allocated, counted = watch.filled()
    by_category: dict[str, int] = {}
    for (category, _), count in counted.items():
        by_category[category] = by_category.get(category, 0) + count
    reserved = None
    if watch.on_gpu:
        stats = torch.cuda.memory_stats_as_nested_dict(watch.device).get("reserved_bytes", {}).get("all", {})
        reserved = stats.get("current")
    driver = device_memory(watch.device)
    return r.OutOfMemory(
        step=step,
        t_s=t_s,
        phase=phase,
        message=" ".join(message.split())[:MOST_CHARACTERS],
        queries=shape[0],
        slots=shape[1],
        requested_bytes=requested_bytes(message),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_free_bytes=driver.get("device_free_bytes"),
        device_total_bytes=driver.get("device_total_bytes"),
        parts=as_parts(counted),
        largest=max(by_category, key=by_category.__getitem__) if by_category else None,
    )
