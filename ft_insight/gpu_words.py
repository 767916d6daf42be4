"""What is said of a GPU in words, in the dashboard and in reports alike."""

from __future__ import annotations

from ft_insight import units
from ft_insight.gpu_phases import Estimate
from ft_insight.run_view import GpuView
from ft_insight.words import clean, phase_word

FIELD_WORDS = {
    "gpu_percent": "utilisation",
    "sm_percent": "SM active",
    "sm_occupancy_percent": "SM occupancy",
    "tensor_percent": "tensor cores",
    "hmma_percent": "tensor cores (half precision)",
    "imma_percent": "tensor cores (integer)",
    "dfma_percent": "tensor cores (double precision)",
    "dmma_percent": "tensor cores (double-precision matrices)",
    "memory_controller_percent": "memory controller",
    "dram_percent": "DRAM bandwidth",
    "memory_used_bytes": "memory used",
    "memory_total_bytes": "memory in all",
    "process_memory_bytes": "memory of this process",
    "power_w": "power",
    "power_limit_w": "power limit",
    "energy_j": "energy",
    "temperature_c": "temperature",
    "sm_clock_mhz": "SM clock",
    "memory_clock_mhz": "memory clock",
    "throttle": "throttle reasons",
    "pcie_tx_bytes_per_s": "PCIe out",
    "pcie_rx_bytes_per_s": "PCIe in",
    "nvlink_tx_bytes_per_s": "NVLink out",
    "nvlink_rx_bytes_per_s": "NVLink in",
    "ecc_corrected": "ECC errors",
    "ecc_uncorrected": "uncorrected ECC errors",
    "xid": "Xid events",
}
SOURCES = {"gpm": "GPM", "dcgm": "DCGM"}
PHASE_FIELDS = ("sm_percent", "gpu_percent", "tensor_percent", "dram_percent")


def percent(value: float | None) -> str:
    """Write a figure that drivers give in percent."""
    return units.NA if value is None else units.share(value / 100)


def per_second(value: float | None) -> str:
    """Write a traffic."""
    return units.NA if value is None else f"{units.size(value)}/s"


def phase_fields(gpu: GpuView) -> tuple[str, ...]:
    """Return the fields of which something is known by phase."""
    return tuple(f for f in PHASE_FIELDS if any(f in use.means for use in gpu.phases))


def mean_words(estimate: Estimate | None) -> str:
    """Write a phase's mean with its interval."""
    if estimate is None:
        return units.NA
    mean, low, high = estimate
    return f"{mean:.0f}% [{low:.0f}-{high:.0f}]"


def phase_rows(gpu: GpuView) -> list[tuple[str, ...]]:
    """Return a table of use by phase, its head first; [] where nothing is known."""
    fields = phase_fields(gpu)
    if not fields:
        return []
    rows = [
        (phase_word(use.phase), units.share(use.share), *(mean_words(use.means.get(f)) for f in fields))
        for use in gpu.phases
    ]
    return [("phase", "of the time", *(FIELD_WORDS[f] for f in fields)), *rows]


def phase_reasons(gpu: GpuView) -> list[str]:
    """Say why means are missing from the table of phases."""
    by_reason: dict[str, list[str]] = {}
    for use in gpu.phases:
        if use.reason:
            by_reason.setdefault(use.reason, []).append(phase_word(use.phase))
    return [f"n/a for {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def phases_reason(gpu: GpuView) -> str:
    """Say why there is no table of phases."""
    if gpu.phases_unknown:
        return gpu.phases_unknown
    return next((use.reason for use in gpu.phases if use.reason), "no sample lies within a step yet")


def held_down(gpu: GpuView) -> str:
    """Say what held the clocks down, and how often."""
    if gpu.power_throttled is None:
        return units.NA
    told = sorted(gpu.throttles.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{clean(word, 40)} {units.share(share)}" for word, share in told) or "nothing"


def errors(gpu: GpuView) -> str:
    """Say what errors the card had since the first sample."""
    corrected, uncorrected = units.count(gpu.ecc_corrected), units.count(gpu.ecc_uncorrected)
    watched = "xid" not in gpu.latest.unknown
    xids = ", ".join(f"{number} at {units.clock(t_s)}" for t_s, number in gpu.xids[-4:])
    return f"ECC corrected {corrected}, uncorrected {uncorrected}; Xid {xids or ('none' if watched else units.NA)}"


def unknown_lines(gpu: GpuView) -> list[str]:
    """Return the fields that are not known, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in gpu.latest.unknown.items():
        by_reason.setdefault(reason, []).append(FIELD_WORDS.get(name, clean(name, 30)))
    return [f"n/a: {', '.join(names)} ({clean(reason, 160)})" for reason, names in by_reason.items()]
