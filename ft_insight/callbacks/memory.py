"""Memory at the end of each step: torch's allocator and the process's resident set. Nothing is ever reset."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from ft_insight.records import Memory


class MemoryReader:
    """Reads what this process holds; host calls only, no synchronisation."""

    def __init__(self, args: Any) -> None:
        self._process = psutil.Process()
        device = getattr(args, "device", None)
        self._device = device if getattr(device, "type", None) == "cuda" else None

    def read(self) -> Memory:
        """Return the figures of now, in bytes."""
        rss = self._process.memory_info().rss
        if self._device is None:
            return Memory(rss_bytes=rss)
        stats = torch.cuda.memory_stats(self._device)
        return Memory(
            allocated_bytes=stats.get("allocated_bytes.all.current"),
            reserved_bytes=stats.get("reserved_bytes.all.current"),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak"),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak"),
            rss_bytes=rss,
        )
