"""AMD's management library, for GPUs under ROCm: what it tells, in the same fields.

Written against amdsmi 7.0, whose calls return dictionaries with "N/A" for what a card does not tell. The counters that
would give the use of compute units over a known window need a profiler of AMD's; amdsmi has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ft_insight.callbacks.gpu_card import Card, NotNow, NotOffered, Reading, Values
from ft_insight.callbacks.gpu_gpm import COUNTERS
from ft_insight.callbacks.gpu_identity import NotFound
from ft_insight.records import Device

MIB = 1024 * 1024
VIOLATIONS = {
    "active_ppt_pwr": "package power limit",
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "socket too hot",
    "active_vr_thrm": "voltage regulator too hot",
    "active_hbm_thrm": "memory too hot",
}


class Amd:
    """The GPUs of this process, by amdsmi."""

    def __init__(self, devices: Sequence[Device], pid: int) -> None:
        self._devices = devices
        self._pid = pid
        self._smi: Any = None

    def open(self) -> tuple[list[Card], list[str]]:
        """Return the GPUs and what is to be told of those that cannot be found."""
        try:
            import amdsmi  # type: ignore[import-not-found]
        except (ImportError, OSError, KeyError) as error:
            # the binding looks for its library while it is imported
            raise NotFound(f"amdsmi cannot be imported, which comes with ROCm ({type(error).__name__})") from None
        try:
            amdsmi.amdsmi_init()
        except amdsmi.AmdSmiException as error:
            raise NotFound(f"amdsmi says {_short(error)}") from None
        self._smi = amdsmi
        cards, told = [], []
        for device in self._devices:
            handle = next(_by_identity(amdsmi, device), None)
            name = device.uuid or device.pci or device.name
            if handle is None:
                told.append(f"no statistics of GPU {name}: amdsmi does not know it")
            else:
                cards.append(Card(name, self._card_readings(handle)))
        return cards, told

    def close(self) -> None:
        """Give amdsmi back."""
        if self._smi is not None:
            self._smi.amdsmi_shut_down()

    def _card_readings(self, handle: Any) -> list[Reading]:
        return [Reading(n, fields, _translated(self._smi, read)) for n, fields, read in self._readings(handle)]

    def _readings(self, handle: Any) -> list[tuple[str, Sequence[str], Callable[[], Values]]]:
        smi = self._smi
        clocks, ecc = ("sm_clock_mhz", "memory_clock_mhz"), ("ecc_corrected", "ecc_uncorrected")
        links = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
        pcie = ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
        return [
            ("compute unit counters", COUNTERS, _never("amdsmi has no such counters")),
            ("utilisation", ("gpu_percent", "memory_controller_percent"), lambda: _activity(smi, handle)),
            ("memory", ("memory_used_bytes", "memory_total_bytes"), lambda: _memory(smi, handle)),
            ("memory of this process", ("process_memory_bytes",), lambda: _process_memory(smi, handle, self._pid)),
            ("power", ("power_w",), lambda: _power(smi, handle)),
            ("power limit", ("power_limit_w",), lambda: _power_limit(smi, handle)),
            ("energy", ("energy_j",), lambda: _energy(smi, handle)),
            ("temperature", ("temperature_c",), lambda: _temperature(smi, handle)),
            ("clocks", clocks, lambda: _clocks(smi, handle)),
            ("throttle reasons", ("throttle",), lambda: _throttle(smi, handle)),
            ("PCIe traffic", pcie, lambda: _pcie(smi, handle)),
            ("traffic between GPUs", links, _never("amdsmi tells the links' totals, not their traffic")),
            ("ECC errors", ecc, lambda: _ecc(smi, handle)),
            ("Xid events", ("xid",), _never("they are NVIDIA's")),
        ]


def _never(reason: str) -> Callable[[], Values]:
    def read() -> Values:
        raise NotOffered(reason)

    return read


def _by_identity(smi: Any, device: Device) -> Iterator[Any]:
    if device.pci:
        with contextlib.suppress(smi.AmdSmiException):
            yield smi.amdsmi_get_processor_handle_from_bdf(device.pci)
    if device.uuid:
        for handle in smi.amdsmi_get_processor_handles():
            with contextlib.suppress(smi.AmdSmiException):
                serial = str(smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]).lower().removeprefix("0x")
                if serial in (device.uuid.lower(), _letters(device.uuid)):
                    yield handle


def _letters(uuid: str) -> str | None:
    """Read the serial number out of ROCm's UUID: its 16 bytes are the number's letters."""
    with contextlib.suppress(ValueError):
        return bytes.fromhex(uuid.replace("-", "")).decode().lower()
    return None


def _translated(smi: Any, read: Callable[[], Values]) -> Callable[[], Values]:
    """Turn amdsmi's errors into what they mean for a figure."""
    never = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "INVAL", "UNEXPECTED_DATA")

    def translated() -> Values:
        try:
            return read()
        except smi.AmdSmiException as error:
            if any(f"STATUS_{name}" in str(error) for name in never):
                raise NotOffered(_short(error)) from None
            raise
        except (AttributeError, KeyError) as error:
            raise NotOffered(f"this amdsmi does not know it ({_short(error)})") from None

    return translated


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _known(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _first(*values: Any) -> float:
    known = next((k for k in map(_known, values) if k is not None), None)
    if known is None:
        raise NotOffered("N/A")
    return known


def _activity(smi: Any, handle: Any) -> Values:
    activity = smi.amdsmi_get_gpu_activity(handle)
    return {
        "gpu_percent": _known(activity["gfx_activity"]),
        "memory_controller_percent": _known(activity["umc_activity"]),
    }


def _memory(smi: Any, handle: Any) -> Values:
    usage = smi.amdsmi_get_gpu_vram_usage(handle)  # in MiB
    return {"memory_used_bytes": usage["vram_used"] * MIB, "memory_total_bytes": usage["vram_total"] * MIB}


def _process_memory(smi: Any, handle: Any, pid: int) -> Values:
    own = [p["memory_usage"]["vram_mem"] for p in smi.amdsmi_get_gpu_process_list(handle) if p["pid"] == pid]
    if not own:
        raise NotNow("the driver lists no process of our number: a container has numbers of its own")
    return {"process_memory_bytes": sum(own)}


def _power(smi: Any, handle: Any) -> Values:
    info = smi.amdsmi_get_power_info(handle)
    return {"power_w": _first(info["current_socket_power"], info["average_socket_power"])}


def _power_limit(smi: Any, handle: Any) -> Values:
    return {"power_limit_w": smi.amdsmi_get_power_cap_info(handle)["power_cap"] / 1e6}  # in microwatts


def _energy(smi: Any, handle: Any) -> Values:
    count = smi.amdsmi_get_energy_count(handle)  # a counter, and microjoules per count
    return {"energy_j": count["energy_accumulator"] * count["counter_resolution"] / 1e6}


def _temperature(smi: Any, handle: Any) -> Values:
    kind = smi.AmdSmiTemperatureType.JUNCTION
    return {"temperature_c": float(smi.amdsmi_get_temp_metric(handle, kind, smi.AmdSmiTemperatureMetric.CURRENT))}


def _clocks(smi: Any, handle: Any) -> Values:
    kinds = {"sm_clock_mhz": smi.AmdSmiClkType.GFX, "memory_clock_mhz": smi.AmdSmiClkType.MEM}
    told = {field: smi.amdsmi_get_clock_info(handle, kind) for field, kind in kinds.items()}
    return {field: _known(clock.get("clk", clock.get("cur_clk"))) for field, clock in told.items()}


def _throttle(smi: Any, handle: Any) -> Values:
    told = smi.amdsmi_get_violation_status(handle)
    if not any(isinstance(told.get(key), bool) for key in VIOLATIONS):
        raise NotOffered("N/A")
    return {"throttle": tuple(word for key, word in VIOLATIONS.items() if told.get(key) is True)}


def _pcie(smi: Any, handle: Any) -> Values:
    packets = smi.amdsmi_get_gpu_pci_throughput(handle)  # of the last second; each of up to this size
    size = packets["max_pkt_sz"]
    return {
        "pcie_tx_bytes_per_s": float(packets["sent"] * size),
        "pcie_rx_bytes_per_s": float(packets["received"] * size),
    }


def _ecc(smi: Any, handle: Any) -> Values:
    count = smi.amdsmi_get_gpu_total_ecc_count(handle)
    return {"ecc_corrected": count["correctable_count"], "ecc_uncorrected": count["uncorrectable_count"]}
