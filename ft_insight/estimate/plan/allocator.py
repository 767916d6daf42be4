"""torch's CUDA caching allocator, replayed on a log of allocations: what is allocated, what is reserved, what fits.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings (no expandable segments, no maximal
split size): sizes are rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, up to 10 MiB from
segments of 20 MiB, larger ones from segments of their own rounded up to 2 MiB; the smallest free block that is large
enough is taken and split if enough is left of it; neighbouring free blocks of a segment are merged. When the device
is full, segments without a used block are given back and the request is tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

ROUND = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_FROM = 10 << 20
SEGMENT_ROUND = 2 << 20


class DeviceFullError(Exception):
    """The replay needed more than the device has."""


@dataclass(slots=True)
class _Block:
    segment: int
    offset: int
    size: int
    used: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class Allocator:
    """Bytes in use and bytes held, after each request; ``capacity`` is what the device has for it, None for any."""

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _segments: int = 0
    _free: dict[bool, list[tuple[int, int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)
    _held: dict[int, _Block] = field(default_factory=dict)

    def allocate(self, key: int, nbytes: int) -> None:
        """Take ``nbytes`` for ``key``. Raises `DeviceFullError`."""
        size = rounded(nbytes)
        small = size <= SMALL
        block = self._take(size, small) or self._new_segment(size, small)
        self._split(block, size, small)
        block.used = True
        self._held[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: int) -> None:
        """Give back what ``key`` took: to the cache, not to the device."""
        block = self._held.pop(key)
        small = self._is_small(block.segment)
        self.allocated -= block.size
        block.used = False
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._forget(other, small)
                block = _merge(block, other)
        self._blocks[block.segment, block.offset] = block
        insort(self._free[small], (block.size, block.segment, block.offset))

    def empty_cache(self) -> None:
        """Give segments without a used block back to the device."""
        for small, free in self._free.items():
            whole = [entry for entry in free if _is_whole(self._blocks[entry[1:]])]
            for entry in whole:
                self.reserved -= entry[0]
                del self._blocks[entry[1:]]
            self._free[small] = [entry for entry in free if entry[1:] in self._blocks]

    def _take(self, size: int, small: bool) -> _Block | None:
        free = self._free[small]
        at = bisect_left(free, (size, -1, -1))
        if at == len(free):
            return None
        _, segment, offset = free.pop(at)
        return self._blocks.pop((segment, offset))

    def _new_segment(self, size: int, small: bool) -> _Block:
        wanted = segment_bytes(size)
        if self.capacity is not None and self.reserved + wanted > self.capacity:
            self.empty_cache()
            if self.reserved + wanted > self.capacity:
                raise DeviceFullError
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments += 1
        return _Block(self._segments * 2 + small, 0, wanted)

    def _split(self, block: _Block, size: int, small: bool) -> None:
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            rest = _Block(block.segment, block.offset + size, left, False, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._blocks[rest.segment, rest.offset] = rest
            insort(self._free[small], (rest.size, rest.segment, rest.offset))

    def _forget(self, block: _Block, small: bool) -> None:
        del self._blocks[block.segment, block.offset]
        free = self._free[small]
        free.pop(bisect_left(free, (block.size, block.segment, block.offset)))

    @staticmethod
    def _is_small(segment: int) -> bool:
        return bool(segment % 2)


def rounded(nbytes: int) -> int:
    """Round up as the allocator does: to 512 bytes, at least as much."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_bytes(size: int) -> int:
    """Return how much the allocator asks of the device for a request of ``size`` that its cache cannot serve."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


def replay(events: Iterable[tuple[int, int]], capacity: int | None = None) -> Allocator:
    """Run a log of (key, bytes), where -1 bytes frees the key, through an allocator of ``capacity`` bytes.

    Raises `DeviceFullError` where the device would have.
    """
    allocator = Allocator(capacity)
    for key, nbytes in events:
        if nbytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, nbytes)
    return allocator


def _merge(one: _Block, other: _Block) -> _Block:
    first, second = (one, other) if one.offset < other.offset else (other, one)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def _is_whole(block: _Block) -> bool:
    return block.before is None and block.after is None
