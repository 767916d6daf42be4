"""What a report says of memory: what fills it, how the peak goes with the slots, the room that is left, failures."""

from __future__ import annotations

from ft_insight import units
from ft_insight.catalog import gpu_for_device
from ft_insight.estimate.density import active_share
from ft_insight.estimate.memory import room_here
from ft_insight.estimate.peak_fit import fit_peak
from ft_insight.estimate.workload import median_length
from ft_insight.memory_words import (
    MOMENT_WORDS,
    basis_text,
    beside,
    failure_text,
    filled,
    fullest,
    headroom_text,
    no_parts_reason,
    room_text,
)
from ft_insight.report.layout import Section
from ft_insight.run_view import RunView


def memory_parts_section(view: RunView) -> Section:
    """Tabulate what filled memory when most of it was filled."""
    moment = fullest(view)
    if moment is None:
        return Section("What fills memory")
    outside, unknown = beside(view)
    whole = moment.allocated_bytes
    rows: list[tuple[str, ...]] = [("what", "bytes", "share", "made of")]
    rows += [
        (row.name, units.size(row.bytes), units.share(row.bytes / max(1, whole)), row.detail) for row in filled(moment)
    ]
    rows += [(row.name, units.size(row.bytes), "-", row.detail) for row in outside]
    how = "counted by storage" if view.filling.method == "storages" else "of what torch's allocator gave out"
    after = [f"{MOMENT_WORDS.get(moment.name, 'then')}, step {moment.step:,}: {units.size(whole)}, {how}"]
    after += [f"n/a: {text}" for text in (no_parts_reason(view), *unknown) if text]
    return Section("What fills memory", table=tuple(rows), after=tuple(after))


def memory_room_section(view: RunView) -> Section:
    """Say what a slot takes, how large a batch can be on this card, and what memory was too small for."""
    lines = []
    peak = fit_peak(view.filling)
    if not isinstance(peak, str):
        (low, high), (least, most) = peak.per_slot_interval, peak.fixed_interval
        lines.append(
            f"peak of a micro-batch: {units.size(peak.bytes_per_slot)} [{units.size(low)}-{units.size(high)}] a slot, "
            f"{units.size(peak.fixed_bytes)} [{units.size(least)}-{units.size(most)}] fixed; from {peak.basis}"
        )
        found = room_here(view)
        if not isinstance(found, str):
            batch = view.header.train.batch if view.header else None
            lines += [f"{headroom_text(found, batch)}: {room_text(found)}", basis_text(found)]
            lines += _by_equation_1(view, found.longest)
    lines += [failure_text(failure) for failure in view.filling.failures]
    return Section("Room in memory", tuple(lines))


_PAPERS = {"mixtral": "Mixtral", "blackmamba": "BlackMamba"}


def _by_equation_1(view: RunView, longest: int) -> list[str]:
    """Set the paper's eq. (1) beside it, by both its readings; it has coefficients for two models only."""
    header = view.header
    name = _PAPERS.get((header.model.kind or "").lower()) if header else None
    density, typical = active_share(view), median_length(view)
    if header is None or name is None or density is None or typical is None:
        return []
    gpu = gpu_for_device(header.devices[0].name, header.devices[0].memory_bytes) if header.devices else None
    if gpu is None:
        return []
    from ft_insight.estimate.paper import NEEDED, PRINTED, max_batch

    printed = max_batch(PRINTED[name], gpu.memory_gb, typical, density)
    needed = max_batch(NEEDED[name], gpu.memory_gb, longest, density)
    return [
        f"by the paper's eq. (1), fitted to another run: {printed} as printed (median row of {typical:,} tokens), "
        f"{needed} as its tables need it (longest row)"
    ]
