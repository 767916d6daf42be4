"""NVIDIA's management library: what it tells of a GPU, and what its errors mean. The only place that imports pynvml.

Written against nvidia-ml-py 12.560 and newer; a driver or a binding that lacks a function is a figure not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ft_insight.callbacks.gpu_card import Card, GpuLost, NotNow, NotOffered, Reading, Values
from ft_insight.callbacks.gpu_dcgm import Dcgm
from ft_insight.callbacks.gpu_gpm import COUNTERS, Counters, Gpm
from ft_insight.callbacks.gpu_identity import Handle, NotFound, nvml_handle
from ft_insight.records import Device

THROTTLES = (
    (0x001, "idle"),
    (0x002, "clocks set by a user"),
    (0x004, "software power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "software thermal slowdown"),
    (0x040, "hardware thermal slowdown"),
    (0x080, "hardware power brake"),
    (0x100, "display clock setting"),
)
"""Bits of NVML's clock event reasons, nvml.h ``nvmlClocksEventReason*``."""
ALL_LINKS = 0xFFFFFFFF
MOST_EVENTS = 16


def throttle_words(bits: int) -> tuple[str, ...]:
    """Put a bit mask of clock event reasons into words; a bit that nobody here knows is told as a number."""
    known = tuple(word for bit, word in THROTTLES if bits & bit)
    rest = bits & ~sum(bit for bit, _ in THROTTLES)
    return (*known, f"reason 0x{rest:x}") if rest else known


class Nvml:
    """The GPUs of this process, by NVML. ``clock`` is the log's."""

    def __init__(self, devices: Sequence[Device], pid: int, clock: Callable[[], float]) -> None:
        self._devices = devices
        self._pid = pid
        self._clock = clock
        self._nvml: Any = None
        self._dcgm = Dcgm()

    def open(self) -> tuple[list[Card], list[str]]:
        """Return the GPUs and what is to be told of those that cannot be found."""
        try:
            import pynvml
        except ImportError:
            raise NotFound("nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NotFound(f"NVML says {error}") from None
        self._nvml = pynvml
        cards, told = [], []
        for device in self._devices:
            try:
                cards.append(self._card(device, nvml_handle(pynvml, device)))
            except NotFound as error:
                told.append(f"no statistics of GPU {device.uuid or device.pci or device.name}: {error}")
        return cards, told

    def close(self) -> None:
        """Give NVML back, which counts its users."""
        self._dcgm.close()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def _card(self, device: Device, handle: Handle) -> Card:
        gpm = Gpm(self._nvml, handle, self._clock)
        counters = Counters(gpm, self._dcgm, device, self._clock, sliced=handle.instance is not None)
        translated = [
            Reading(name, fields, _translated(self._nvml, read, sliced=handle.instance is not None))
            for name, fields, read in _readings(self._nvml, handle, self._pid, counters)
        ]
        return Card(device.uuid or device.pci or device.name, translated)


def _readings(
    nvml: Any, handle: Handle, pid: int, counters: Counters
) -> list[tuple[str, Sequence[str], Callable[[], Values]]]:
    """List what NVML tells of a GPU. Heat, clocks and errors of a MIG slice are those of its GPU."""
    own, whole = handle.own, handle.whole
    pcie = ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
    links = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
    link_counter = _LinkCounter(nvml, own)
    power = nvml.nvmlDeviceGetPowerUsage
    limit = nvml.nvmlDeviceGetEnforcedPowerLimit
    energy = nvml.nvmlDeviceGetTotalEnergyConsumption
    heat = nvml.NVML_TEMPERATURE_GPU
    return [
        ("SM counters", COUNTERS, counters.read),
        ("utilisation", ("gpu_percent", "memory_controller_percent"), lambda: _utilisation(nvml, own)),
        ("memory", ("memory_used_bytes", "memory_total_bytes"), lambda: _memory(nvml, own)),
        ("memory of this process", ("process_memory_bytes",), lambda: _process_memory(nvml, own, pid)),
        ("power", ("power_w",), lambda: {"power_w": power(own) / 1e3}),
        ("power limit", ("power_limit_w",), lambda: {"power_limit_w": limit(own) / 1e3}),
        ("energy", ("energy_j",), lambda: {"energy_j": energy(own) / 1e3}),
        ("temperature", ("temperature_c",), lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(whole, heat)}),
        ("SM clock", ("sm_clock_mhz",), lambda: _clock(nvml, whole, "sm_clock_mhz", nvml.NVML_CLOCK_SM)),
        ("memory clock", ("memory_clock_mhz",), lambda: _clock(nvml, whole, "memory_clock_mhz", nvml.NVML_CLOCK_MEM)),
        ("throttle reasons", ("throttle",), lambda: {"throttle": throttle_words(_event_reasons(nvml, whole))}),
        ("PCIe traffic", pcie, lambda: {} if counters.gives(pcie[0]) else _pcie(nvml, own)),
        ("NVLink traffic", links, lambda: {} if counters.gives(links[0]) else link_counter.read()),
        ("ECC errors", ("ecc_corrected", "ecc_uncorrected"), lambda: _ecc(nvml, whole)),
        ("Xid events", ("xid",), _Events(nvml, whole).read),
    ]


def _translated(nvml: Any, read: Callable[[], Values], *, sliced: bool) -> Callable[[], Values]:
    """Turn NVML's errors into what they mean for a figure."""
    lost = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
    never = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION, nvml.NVML_ERROR_INVALID_ARGUMENT)

    def translated() -> Values:
        try:
            return read()
        except nvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code in lost:
                raise GpuLost(str(error)) from None
            if code == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise NotOffered("the driver is too old for it") from None
            if code in never and sliced and code != nvml.NVML_ERROR_NO_PERMISSION:
                raise NotOffered("not told of a MIG slice") from None
            if code in never:
                raise NotOffered(str(error)) from None
            raise
        except (nvml.NVMLLibraryMismatchError, AttributeError):
            raise NotOffered("driver and nvidia-ml-py do not fit together") from None

    return translated


def _utilisation(nvml: Any, handle: Any) -> Values:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"gpu_percent": rates.gpu, "memory_controller_percent": rates.memory}


def _memory(nvml: Any, handle: Any) -> Values:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _process_memory(nvml: Any, handle: Any, pid: int) -> Values:
    own = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == pid]
    if not own or None in own:
        raise NotNow("the driver lists no process of our number: a container has numbers of its own")
    return {"process_memory_bytes": sum(own)}


def _clock(nvml: Any, handle: Any, field: str, kind: int) -> Values:
    return {field: nvml.nvmlDeviceGetClockInfo(handle, kind)}


def _event_reasons(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before driver 535


def _pcie(nvml: Any, handle: Any) -> Values:
    """Read both directions, each over 20 ms, in the driver's KB of 1,024 bytes."""
    sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"pcie_tx_bytes_per_s": sent * 1024.0, "pcie_rx_bytes_per_s": received * 1024.0}


def _ecc(nvml: Any, handle: Any) -> Values:
    count = nvml.nvmlDeviceGetTotalEccErrors
    volatile = nvml.NVML_VOLATILE_ECC
    return {
        "ecc_corrected": count(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
        "ecc_uncorrected": count(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
    }


class _LinkCounter:
    """NVLink's payload, all links together: counters in KiB, and the driver's own times in microseconds."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before: list[tuple[int, int]] | None = None

    def read(self) -> Values:
        nvml = self._nvml
        ids = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        fields = nvml.nvmlDeviceGetFieldValues(self._handle, [(i, ALL_LINKS) for i in ids])
        for field in fields:
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(field.nvmlReturn)
        now = [(int(f.value.ullVal), int(f.timestamp)) for f in fields]
        before, self._before = self._before, now
        if before is None:
            return {}
        rates = [_rate(old, new) for old, new in zip(before, now, strict=True)]
        return {"nvlink_tx_bytes_per_s": rates[0], "nvlink_rx_bytes_per_s": rates[1]}


def _rate(old: tuple[int, int], new: tuple[int, int]) -> float | None:
    kib, microseconds = new[0] - old[0], new[1] - old[1]
    return kib * 1024 / (microseconds / 1e6) if microseconds > 0 and kib >= 0 else None


class _Events:
    """Critical errors of the driver, asked for without waiting."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._set: Any = None

    def read(self) -> Values:
        nvml = self._nvml
        if self._set is None:
            if not nvml.nvmlDeviceGetSupportedEventTypes(self._handle) & nvml.nvmlEventTypeXidCriticalError:
                raise NotOffered("Not Supported")
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._set = events
        found: list[int] = []
        while len(found) < MOST_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    raise
                break
            if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                found.append(int(event.eventData))
        return {"xid": tuple(found)}
