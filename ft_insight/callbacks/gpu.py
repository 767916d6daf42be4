"""NVML sampler: one thread, never waited for, each field on its own.

GPUs are found by the UUID that CUDA reports, never by index. A field that this card or driver does not offer is
asked for once and is null from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ft_insight.records import Device, GpuSample

INTERVAL_S = 0.5
Emit = Callable[[tuple[GpuSample, ...]], None]
Tell = Callable[[str, bool], None]


class GpuSampler:
    """Samples the GPUs of this process every half second. ``tell(reason, off)`` is told what cannot be had."""

    def __init__(self, devices: tuple[Device, ...], emit: Emit, tell: Tell, pid: int) -> None:
        self._uuids = [d.uuid for d in devices if d.kind == "cuda" and d.uuid]
        self._emit = emit
        self._tell = tell
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-insight-gpu", daemon=True)

    def start(self) -> None:
        """Begin to sample, if this process computes on a GPU."""
        if self._uuids:
            self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End sampling; a call that hangs in the driver is left behind after ``timeout_s``."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            self._tell("no GPU statistics: nvidia-ml-py is not installed (pip install nvidia-ml-py)", True)
            return
        except Exception as error:  # noqa: BLE001 - whatever the driver does, training goes on
            self._tell(f"no GPU statistics: NVML says {error}", True)
            return
        try:
            self._sample_until_stopped(pynvml)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(f"GPU statistics end here: {error}", True)

    def _sample_until_stopped(self, nvml: Any) -> None:
        cards = [card for card in (self._card(nvml, uuid) for uuid in self._uuids) if card is not None]
        while cards and not self._stop.is_set():
            self._emit(tuple(card.sample() for card in cards))
            self._stop.wait(INTERVAL_S)

    def _card(self, nvml: Any, uuid: str) -> Card | None:
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        for prefix in ("GPU-", "MIG-"):
            try:
                return Card(nvml, nvml.nvmlDeviceGetHandleByUUID(prefix + bare), uuid, self._pid, self._tell)
            except nvml.NVMLError:
                continue
        self._tell(f"no statistics of GPU {uuid}: NVML does not know it", False)
        return None


class Card:
    """One GPU's handle and what it offers."""

    def __init__(self, nvml: Any, handle: Any, uuid: str, pid: int, tell: Tell) -> None:
        self._nvml = nvml
        self._handle = handle
        self._uuid = uuid
        self._pid = pid
        self._tell = tell
        self._readers: dict[str, Callable[[], dict[str, float | int | None]]] = {
            "utilisation": self._utilisation,
            "memory": self._memory,
            "process memory": self._process_memory,
            "power": lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3},
            "power limit": lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3},
            "energy": lambda: {"energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3},
            "temperature": lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
            "clocks": self._clocks,
        }

    def sample(self) -> GpuSample:
        """Read all that the card offers; raises ``NVMLError`` when it is lost."""
        values: dict[str, float | int | None] = {}
        for name, read in list(self._readers.items()):
            try:
                values.update(read())
            except self._nvml.NVMLError as error:
                self._lost(name, error)
        return GpuSample(uuid=self._uuid, **values)  # type: ignore[arg-type]

    def _lost(self, name: str, error: Any) -> None:
        if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
            raise error
        del self._readers[name]
        self._tell(f"no {name} of GPU {self._uuid}: {error}", False)

    def _utilisation(self) -> dict[str, float | int | None]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"gpu_percent": rates.gpu, "memory_controller_percent": rates.memory}

    def _memory(self) -> dict[str, float | int | None]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}

    def _process_memory(self) -> dict[str, float | int | None]:
        # in a container the driver may report the host's process numbers, or none: then ours is not among them
        own = [
            p.usedGpuMemory for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle) if p.pid == self._pid
        ]
        return {"process_memory_bytes": own[0] if own else None}

    def _clocks(self) -> dict[str, float | int | None]:
        nvml = self._nvml
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM),
        }
