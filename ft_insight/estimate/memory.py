"""The largest batch that fits into a card's memory, from the measured peak of a run's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from ft_insight.catalog import Gpu, gpu_for_device
from ft_insight.estimate.peak_fit import PeakMemory, fit_peak
from ft_insight.estimate.workload import Workload, WorkloadError, workload_of
from ft_insight.memory_points import MemoryView
from ft_insight.records import GpuSample, OutOfMemory
from ft_insight.run_view import RunView

CONTEXT_BYTES = 700 << 20
"""CUDA context and libraries, which torch's allocator does not count: 0.4 to 0.7 GiB on current drivers. Used where
the run did not measure its own."""
FRAGMENTATION = 0.04
"""Share of the card that the caching allocator cannot use for lack of a contiguous piece: the margin. The interval
goes from none to twice as much."""
MOST = 1 << 20
ON_CPU = "the run computed on a CPU: no GPU memory was measured"
UNKNOWN_LENGTHS = "the lengths of the rows are not known; add --seq-len L"


class Limit(msgspec.Struct, frozen=True):
    """What a card leaves to the tensors of a process, in bytes."""

    total: float
    context: float
    """Taken by the CUDA context."""
    others: float = 0.0
    """Taken by other processes."""

    @property
    def margin(self) -> float:
        """Left free for fragmentation."""
        return FRAGMENTATION * self.total

    @property
    def tensors(self) -> tuple[float, float, float]:
        """Bytes for tensors: with the margin, with twice the margin, without."""
        free = self.total - self.context - self.others
        return free - self.margin, free - 2 * self.margin, free


class Room(msgspec.Struct, frozen=True):
    """How many queries a micro-batch can hold on a card, and what that rests on."""

    batch: int
    """All as long as the longest row that the data set can produce, since one such batch ends a run."""
    low: int
    high: int
    typical: tuple[int, int, int] | None
    """Of rows drawn from the data set: estimate, low, high."""
    longest: int
    """Slots of the longest row."""
    use_bytes: float
    """Of the card at ``batch``, the context included."""
    limit: Limit
    peak: PeakMemory


def limit_here(view: RunView) -> Limit | None:
    """Return what the run's own GPU leaves it; None where it computes on none whose memory is known."""
    device = view.header.devices[0] if view.header and view.header.devices else None
    if device is None or device.kind != "cuda":
        return None
    gpu = gpu_for_device(device.name, device.memory_bytes)
    size = device.memory_bytes or (gpu.usable_memory_bytes if gpu is not None else None)
    if size is None:
        return None
    sample = next((g.latest for g in view.gpus if g.latest.uuid == device.uuid), None)
    context, others = _beside(sample, view.memory.reserved_bytes if view.memory else None)
    return Limit(float(size), context, others)


def _beside(sample: GpuSample | None, reserved: int | None) -> tuple[float, float]:
    """Return the bytes of the context and of other processes, where the driver tells the process's own."""
    own = sample.process_memory_bytes if sample is not None else None
    if sample is None or own is None or reserved is None or own <= reserved:
        return float(CONTEXT_BYTES), 0.0
    return float(own - reserved), float(max(0, (sample.memory_used_bytes or 0) - own))


def limit_on(gpu: Gpu, here: Limit | None = None) -> Limit:
    """Return what another GPU leaves a process, with the context as measured here where it was."""
    return Limit(float(gpu.usable_memory_bytes), here.context if here is not None else float(CONTEXT_BYTES))


def room(peak: PeakMemory, work: Workload, limit: Limit, longest: int, typical: bool = True) -> Room:
    """Return the largest batch of a job on a card."""

    def at_longest(batch: int) -> float:
        return float(batch * longest)

    def drawn(batch: int) -> float:
        return work.slots(batch) or math.inf

    batch, low, high = largest(peak, limit.tensors, at_longest)
    return Room(
        batch=batch,
        low=low,
        high=high,
        typical=largest(peak, limit.tensors, drawn) if typical and work.length_values else None,
        longest=longest,
        use_bytes=peak.predict(at_longest(batch))[0] + limit.context,
        limit=limit,
        peak=peak,
    )


def room_on(peak: PeakMemory, work: Workload, gpu: Gpu, longest: int, view: RunView) -> Room:
    """Return the largest batch on another card than the run's."""
    return room(peak, work, limit_on(gpu, limit_here(view)), longest)


def room_fields(found: Room | None) -> dict[str, Any]:
    """Return what a projection's row says of it."""
    if found is None:
        return {}
    return {
        "largest_batch": found.batch,
        "largest_interval": (found.low, found.high),
        "typical_batch": found.typical,
        "longest": found.longest,
        "memory_use_bytes": round(found.use_bytes),
        "memory_total_bytes": round(found.limit.total),
        "memory_margin_bytes": round(found.limit.margin),
    }


def largest(
    peak: PeakMemory, bytes_for: tuple[float, float, float], slots: Callable[[int], float]
) -> tuple[int, int, int]:
    """Return the largest batch whose peak is within ``bytes_for`` (estimate, low, high): estimate, low, high."""
    middle, least, most = bytes_for
    return (
        _last(lambda n: peak.predict(slots(n))[0] <= middle),
        _last(lambda n: peak.predict(slots(n))[2] <= least),
        _last(lambda n: peak.predict(slots(n))[1] <= most),
    )


def _last(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, 0 if none does; what is larger fits no better."""
    if not fits(1):
        return 0
    below, above = 1, 2
    while above < MOST and fits(above):
        below, above = above, above * 2
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def longest_row(view: RunView, work: Workload) -> int | None:
    """Return the slots of the longest padded row that the data set can produce.

    A collator may pad beyond the longest row, to a multiple: where the rows are the run's own, the longest padded row
    that was seen counts too.
    """
    own = view.header is not None and work.length_values == (view.header.dataset.length_values or ())
    padded = [-(-m.slots // m.queries) for m in view.micro if m.slots and m.queries] if own and work.padded else []
    return max([work.longest or 0, *padded]) or None


def room_here(view: RunView, work: Workload | None = None) -> Room | str:
    """Return the largest batch on the run's own GPU, within what did fit and what did not; or why it is unknown."""
    limit = limit_here(view)
    if limit is None:
        devices = view.header.devices if view.header else ()
        on_gpu = bool(devices and devices[0].kind == "cuda")
        return "the memory of this GPU is not known" if on_gpu else ON_CPU
    peak = fit_peak(view.filling)
    if isinstance(peak, str):
        return peak
    if work is None:
        try:
            work = workload_of(view)
        except WorkloadError:
            work = Workload(0, 1.0, "")
    longest = longest_row(view, work)
    if longest is None:
        return UNKNOWN_LENGTHS
    found = room(peak, work, limit, longest)
    batch, low, high = within((found.batch, found.low, found.high), view.filling, longest)
    use = peak.predict(float(batch * longest))[0] + limit.context
    return msgspec.structs.replace(found, batch=batch, low=low, high=high, use_bytes=use)


def within(triple: tuple[int, int, int], filling: MemoryView, row: int) -> tuple[int, int, int]:
    """Keep a batch of rows of so many slots between what was computed and what memory was too small for."""
    least = (filling.fits_slots or 0) // row
    most = -(-filling.fails_slots // row) - 1 if filling.fails_slots else MOST
    batch, low, high = (min(max(count, least), max(most, least)) for count in triple)
    return batch, low, high


def would_have_fitted(view: RunView, failure: OutOfMemory) -> OutOfMemory:
    """Add to a failure the largest batch of rows as long as its own that would have fitted, or why that is unknown."""
    if not failure.slots or not failure.queries:
        return _told(failure, None, "it was not a micro-batch that failed")
    row = -(-failure.slots // failure.queries)
    filling = view.filling
    fails = min(failure.slots, filling.fails_slots or failure.slots)
    known = msgspec.structs.replace(filling, fails_slots=fails if fails > (filling.fits_slots or 0) else None)
    peak = fit_peak(filling)
    if failure.device_free_bytes is not None and failure.reserved_bytes is not None and not isinstance(peak, str):
        free = float(failure.device_free_bytes + failure.reserved_bytes)
        margin = FRAGMENTATION * free
        triple = largest(peak, (free - margin, free - 2 * margin, free), lambda batch: float(batch * row))
        return _told(failure, within(triple, known, row), None)
    fitted = (filling.fits_slots or 0) // row
    if not fitted:
        return _told(failure, None, "no smaller micro-batch was computed before it")
    # nothing is known between what fitted and what did not
    return _told(failure, within((fitted, fitted, failure.queries - 1), known, row), None)


def _told(failure: OutOfMemory, fits: tuple[int, int, int] | None, unknown: str | None) -> OutOfMemory:
    """Return the record with what would have fitted."""
    return msgspec.structs.replace(failure, fits=fits, unknown=unknown)
