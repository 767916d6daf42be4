"""SM, tensor-core and DRAM use from the GPU's own counters: NVML's GPM on Hopper and newer, DCGM before.

They are means between two readings: over a window that is known, unlike NVML's utilisation. Both take the same
counters, and a GPU has one set of them: what profiles it at the same time can disturb them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ft_insight.callbacks.gpu_card import NotOffered, Partly, Values
from ft_insight.callbacks.gpu_dcgm import Dcgm
from ft_insight.callbacks.gpu_identity import Handle
from ft_insight.records import Device

MIB = 1024.0 * 1024.0
METRICS = {
    "sm_percent": ("NVML_GPM_METRIC_SM_UTIL", 1.0),
    "sm_occupancy_percent": ("NVML_GPM_METRIC_SM_OCCUPANCY", 1.0),
    "tensor_percent": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
    "hmma_percent": ("NVML_GPM_METRIC_HMMA_TENSOR_UTIL", 1.0),
    "imma_percent": ("NVML_GPM_METRIC_IMMA_TENSOR_UTIL", 1.0),
    "dfma_percent": ("NVML_GPM_METRIC_DFMA_TENSOR_UTIL", 1.0),
    "dmma_percent": ("NVML_GPM_METRIC_DMMA_TENSOR_UTIL", 1.0),
    "dram_percent": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 1.0),
    "pcie_tx_bytes_per_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB),
    "pcie_rx_bytes_per_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB),
    "nvlink_tx_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB),
    "nvlink_rx_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB),
}
"""Field -> GPM's metric, and what its unit (percent, MiB/s) is multiplied by."""
COUNTERS = tuple(field for field in METRICS if field.endswith("_percent"))


class Gpm:
    """One GPU's, or MIG slice's, GPM counters."""

    def __init__(self, nvml: Any, handle: Handle, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._samples: list[Any] = []
        self._at_s: float | None = None
        self._request: Any = None

    def supported(self) -> bool:
        """Ask the driver whether this GPU has them."""
        nvml = self._nvml
        try:
            return bool(nvml.nvmlGpmQueryDeviceSupport(self._handle.whole).isSupportedDevice)
        except AttributeError:
            return False
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_SUPPORTED):
                return False
            raise

    def read(self) -> Values:
        """Return the means since the reading before, which the first one lacks."""
        nvml = self._nvml
        if self._request is None:
            self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            self._request = nvml.c_nvmlGpmMetricsGet_t()
        older, newer = self._samples
        if self._handle.instance is None:
            nvml.nvmlGpmSampleGet(self._handle.whole, newer)
        else:
            nvml.nvmlGpmMigSampleGet(self._handle.whole, self._handle.instance, newer)
        before, self._at_s = self._at_s, self._clock()
        self._samples = [newer, older]
        return {} if before is None else self._means(older, newer, (round(before, 4), round(self._at_s, 4)))

    def _means(self, older: Any, newer: Any, window: tuple[float, float]) -> Values:
        nvml, request = self._nvml, self._request
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = older, newer
        for place, (name, _) in enumerate(METRICS.values()):
            request.metrics[place].metricId = getattr(nvml, name)
        nvml.nvmlGpmMetricsGet(request)
        values: Values = {"counters": "gpm", "window_s": window}
        reasons = {}
        for place, (field, (_, unit)) in enumerate(METRICS.items()):
            metric = request.metrics[place]
            if metric.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(metric.value):
                values[field] = round(metric.value * unit, 3)
            elif metric.nvmlReturn == nvml.NVML_SUCCESS:
                reasons[field] = "GPM gives no number"
            else:
                reasons[field] = f"GPM says {nvml.NVMLError(metric.nvmlReturn)}"
        return Partly(values, reasons)


class Counters:
    """The counters of one GPU from whoever gives them, asked in turn once."""

    def __init__(self, gpm: Gpm, dcgm: Dcgm, device: Device, clock: Callable[[], float], *, sliced: bool) -> None:
        self._gpm = gpm
        self._dcgm = dcgm
        self._device = device
        self._clock = clock
        self._sliced = sliced
        self._source: Callable[[], Values] | None = None
        self._given: frozenset[str] = frozenset()

    def gives(self, field: str) -> bool:
        """Tell whether the latest reading had this field."""
        return field in self._given

    def read(self) -> Values:
        """Return what there is; raise ``NotOffered`` with both reasons where nobody has any."""
        if self._source is None:
            self._source = self._choose()
        values = self._source()
        self._given = frozenset(values)
        return values

    def _choose(self) -> Callable[[], Values]:
        if self._gpm.supported():
            return self._gpm.read
        if self._sliced:
            raise NotOffered("NVML has GPM counters from Hopper on, and DCGM's are of the GPU, not of a MIG slice")
        try:
            entity = self._dcgm.watch(self._device)
        except NotOffered as error:
            raise NotOffered(f"NVML has GPM counters from Hopper on; DCGM: {error}") from None
        return lambda: self._dcgm.read(entity, self._clock)
