"""The sentences and rows that readers share of memory: what fills the card, the room that is left, what failed."""

from __future__ import annotations

import msgspec

from ft_insight import units
from ft_insight.estimate.memory import Room, limit_here
from ft_insight.layer_times import KIND_WORDS
from ft_insight.records import MemoryMoment, OutOfMemory
from ft_insight.run_view import RunView
from ft_insight.words import clean, phase_word

CATEGORY_WORDS = {
    "weights": "weights",
    "quantised_weights": "quantised weights",
    "adapters": "adapters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "temporaries": "temporaries",
    "other": "other",
}
MOMENT_WORDS = {
    "between": "between steps",
    "forward": "forward is done",
    "backward": "backward is done",
    "peak": "at the peak of a micro-batch",
    "optimizer": "at the peak of the optimizer",
}
RESERVE, CONTEXT, OTHERS, FREE = "allocator reserve", "CUDA context", "other processes", "free"


class Filled(msgspec.Struct, frozen=True):
    """One row of what fills memory."""

    name: str
    bytes: int
    detail: str = ""
    """What it is made of, in words."""


def fullest(view: RunView) -> MemoryMoment | None:
    """Return the moment at which the most was allocated, of those that were looked at."""
    return max(view.filling.moments, key=lambda m: m.allocated_bytes, default=None)


def filled(moment: MemoryMoment) -> list[Filled]:
    """Return what fills memory at a moment by category, in the order of ``MEMORY_CATEGORIES``."""
    rows = []
    for category, word in CATEGORY_WORDS.items():
        parts = [p for p in moment.parts if p.category == category]
        if not parts:
            continue
        named = [(clean(_detail(category, p.detail), 30), p.bytes) for p in parts if p.detail]
        many = len(named) > 1
        detail = ", ".join(f"{name} {units.size(count)}" if many else name for name, count in named)
        rows.append(Filled(word, sum(p.bytes for p in parts), detail))
    return rows


def _detail(category: str, detail: str) -> str:
    return KIND_WORDS.get(detail, detail.replace("_", " ")) if category == "activations" else detail


def beside(view: RunView) -> tuple[list[Filled], list[str]]:
    """Return what fills a card beside the process's tensors, and in words what of that is not known."""
    memory, limit = view.memory, limit_here(view)
    if memory is None or limit is None:
        return [], []
    rows, unknown = [], []
    if memory.peak_reserved_bytes is not None and memory.peak_allocated_bytes is not None:
        split = view.filling.latest.split_bytes if view.filling.latest else None
        detail = "" if split is None else f"{units.size(split)} of it in pieces between steps"
        rows.append(Filled(RESERVE, max(0, memory.peak_reserved_bytes - memory.peak_allocated_bytes), detail))
    sample = next((g.latest for g in view.gpus), None)
    if sample is not None and sample.process_memory_bytes is not None and memory.reserved_bytes is not None:
        rows += [Filled(CONTEXT, round(limit.context)), Filled(OTHERS, round(limit.others))]
    elif sample is not None and sample.memory_used_bytes is not None and memory.reserved_bytes is not None:
        rows.append(Filled(f"{CONTEXT} and {OTHERS}", max(0, sample.memory_used_bytes - memory.reserved_bytes)))
        unknown.append("the driver does not tell what is this process's: its context and other processes are together")
    else:
        unknown.append("context and other processes: no GPU statistics")
    return rows, unknown


def no_parts_reason(view: RunView) -> str:
    """Say why it is not known what activations take."""
    header = view.header
    device = header.devices[0].kind if header and header.devices else "cpu"
    if any(m.name != "between" for m in view.filling.moments):
        return ""
    if device not in ("cuda", "cpu"):
        return f"activations: {clean(device, 12)} has no memory statistics that are read"
    if device == "cpu" and header is not None and header.train.compiled:
        return "activations: not counted in compiled code"
    if device == "cpu" and header is not None and header.world_size > 1:
        return "activations: not counted on CPUs with several processes"
    off = next((n.text for n in view.notices if n.collector == "memory" and n.off), None)
    return f"activations: {clean(off)}" if off else "activations: no step was looked at yet"


def room_text(room: Room) -> str:
    """Return ``largest batch 4 [4-5] on this card at 1,024 tokens (uses 44.1 of 46.0 GiB)``."""
    interval = f" [{room.low}-{room.high}]" if room.low != room.high else ""
    total = units.size(room.limit.total)
    used = units.size(room.use_bytes).removesuffix(" GiB") if total.endswith("GiB") else units.size(room.use_bytes)
    text = f"largest batch {room.batch}{interval} on this card at {room.longest:,} tokens (uses {used} of {total})"
    if room.typical is not None and room.typical[0] != room.batch:
        text += f", {room.typical[0]} of typical rows"
    return text


def headroom_text(room: Room, batch: int | None) -> str:
    """Return ``room for batch 11; you use 4``."""
    if batch is None:
        return f"room for batch {room.batch}"
    if room.batch < batch:
        return f"room for batch {room.batch} of the longest rows; you use {batch}: one such batch may end the run"
    return f"room for batch {room.batch}; you use {batch}"


def basis_text(room: Room) -> str:
    """Say what the largest batch rests on."""
    return (
        f"from {room.peak.basis}; {units.size(room.limit.margin)} left free for fragmentation; interval 90%, "
        "with none to twice that margin"
    )


def failure_text(failure: OutOfMemory) -> str:
    """Return a failure in words: where, which batch, what filled memory, and what would have fitted."""
    shape = ""
    if failure.queries is not None and failure.slots is not None:
        row = -(-failure.slots // max(1, failure.queries))
        shape = f" with {failure.queries:,} x {row:,} slots"
    text = f"memory ended in step {failure.step:,}, {phase_word(failure.phase)}{shape}"
    if failure.requested_bytes is not None:
        text += f", for want of {units.size(failure.requested_bytes)}"
    if failure.largest is not None:
        size = sum(p.bytes for p in failure.parts if p.category == failure.largest)
        text += f"; most was {clean(CATEGORY_WORDS.get(failure.largest, failure.largest), 30)} ({units.size(size)}"
        text += f" of {units.size(failure.allocated_bytes)})" if failure.allocated_bytes is not None else ")"
    if failure.fits is not None:
        batch, low, high = failure.fits
        interval = f" [{low}-{high}]" if low != high else ""
        text += f"; batch {batch}{interval} would have fitted"
    elif failure.unknown is not None:
        text += f"; what would have fitted is unknown: {clean(failure.unknown)}"
    return text
