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
        self._foreign: dict[str, int] = {}

    def peaks(self) -> dict[str, int]:
        """Return the allocator's peaks so far, in bytes, by their names in its statistics; {} without a device."""
        stats = torch.cuda.memory_stats(self._device) if self._device is not None else {}
        return {name: stats[name] for name in ("allocated_bytes.all.peak", "reserved_bytes.all.peak") if name in stats}

    def disregard_since(self, earlier: dict[str, int]) -> None:
        """Peaks that rose since were none of training: they are unknown until training has passed them."""
        now = self.peaks()
        self._foreign = {name: now[name] for name, peak in earlier.items() if now.get(name, 0) > peak}

    def read(self) -> Memory:
        """Return the figures of now, in bytes."""
        rss = self._process.memory_info().rss
        if self._device is None:
            return Memory(rss_bytes=rss)
        stats = torch.cuda.memory_stats(self._device)
        stats = {name: value for name, value in stats.items() if value > self._foreign.get(name, -1)}
        return Memory(
            allocated_bytes=stats.get("allocated_bytes.all.current"),
            reserved_bytes=stats.get("reserved_bytes.all.current"),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak"),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak"),
            rss_bytes=rss,
        )
