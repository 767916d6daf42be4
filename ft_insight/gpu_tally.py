"""One GPU's samples, folded: its curves, what held its clocks down, the errors that it had."""

from __future__ import annotations

from collections import deque

import msgspec

from ft_insight import records as r
from ft_insight.gpu_phases import PhaseUse
from ft_insight.run_view import GpuView
from ft_insight.stats import RowCurves

CURVES = (
    "gpu_percent",
    "sm_percent",
    "sm_occupancy_percent",
    "tensor_percent",
    "memory_controller_percent",
    "dram_percent",
    "memory_used_bytes",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s",
    "nvlink_rx_bytes_per_s",
)
MOST_XIDS = 32


class GpuTally:
    """Folds the samples of one GPU, in constant memory."""

    def __init__(self) -> None:
        self._curves = RowCurves(CURVES)
        self._unknown: dict[str, str] = {}
        self._throttles: dict[str, int] = {}
        self._throttle_samples = 0
        self._power_samples = 0
        self._thermal_samples = 0
        self._xids: deque[tuple[float, int]] = deque(maxlen=MOST_XIDS)
        self._first: r.GpuSample | None = None
        self._latest: r.GpuSample | None = None
        self._lost_at_s: float | None = None

    def add(self, t_s: float, sample: r.GpuSample) -> None:
        """Take a sample in."""
        for field, reason in sample.unknown.items():
            if reason:
                self._unknown[field] = reason
            else:
                self._unknown.pop(field, None)
        self._curves.add(t_s, sample)
        self._xids.extend((t_s, number) for number in sample.xid or ())
        self._note_throttle(sample.throttle)
        if sample.lost:
            self._lost_at_s = t_s
        if self._latest is None or not sample.lost:
            self._latest = sample  # the last one of a lost GPU holds nothing
        self._first = self._first or sample

    def _note_throttle(self, words: tuple[str, ...] | None) -> None:
        if words is None:
            return
        self._throttle_samples += 1
        self._power_samples += any(word in r.POWER_THROTTLES for word in words)
        self._thermal_samples += any(word in r.THERMAL_THROTTLES for word in words)
        for word in words:
            if word in self._throttles or len(self._throttles) < MOST_XIDS:
                self._throttles[word] = self._throttles.get(word, 0) + 1

    def view(self, phases: tuple[PhaseUse, ...], phases_unknown: str | None) -> GpuView:
        """Return a snapshot, with what ``gpu_phases`` says of this GPU."""
        latest, first = self._latest, self._first
        assert latest is not None  # noqa: S101 - it is made with its first sample
        assert first is not None  # noqa: S101
        count = self._throttle_samples
        return GpuView(
            latest=msgspec.structs.replace(latest, unknown=dict(self._unknown)),
            curves=self._curves.curves(),
            throttles={word: times / count for word, times in self._throttles.items()},
            power_throttled=self._power_samples / count if count else None,
            thermal_throttled=self._thermal_samples / count if count else None,
            xids=tuple(self._xids),
            ecc_corrected=_since(first.ecc_corrected, latest.ecc_corrected),
            ecc_uncorrected=_since(first.ecc_uncorrected, latest.ecc_uncorrected),
            energy_j=_since(first.energy_j, latest.energy_j),
            lost_at_s=self._lost_at_s,
            phases=phases,
            phases_unknown=phases_unknown,
        )


def _since(first: float | None, latest: float | None) -> float | None:
    """Return what a counter has gone up by; None where it is unknown, or began anew."""
    if first is None or latest is None or latest < first:
        return None
    return latest - first
