"""Which GPUs a process computes on: by UUID or PCI address as torch knows them, never by index.

CUDA numbers what ``CUDA_VISIBLE_DEVICES`` names, in its order; where that is absent, by ``CUDA_DEVICE_ORDER``. NVML
numbers what is in the machine. Only what CUDA itself says of a device finds the same one there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ft_insight.records import Device


def cuda_devices(device: torch.device, model: nn.Module, replicas: int = 1) -> tuple[Device, ...]:
    """Describe the GPUs that hold parts of ``model`` or compute for it.

    ``replicas`` is how many GPUs ``nn.DataParallel`` spreads a batch over, from the first one on.
    """
    return tuple(_cuda_device(index) for index in sorted(_indices(device, model, replicas)))


def _indices(device: torch.device, model: nn.Module, replicas: int) -> set[int]:
    found = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    found |= set(_mapped(getattr(model, "hf_device_map", None) or {}))
    if len(found) <= 1 and replicas > 1:
        found |= set(range(replicas))
    found.add(device.index if device.index is not None else torch.cuda.current_device())
    return {i for i in found if i is not None}


def _mapped(placed: dict[str, Any]) -> Iterator[int]:
    """Yield the GPUs of a device map, which names them as numbers, words or devices, beside ``cpu`` and ``disk``."""
    for place in placed.values():
        if isinstance(place, int):
            yield place
            continue
        with contextlib.suppress(RuntimeError, TypeError):
            there = torch.device(place)
            if there.type == "cuda":
                yield there.index if there.index is not None else 0


def _cuda_device(index: int) -> Device:
    facts: Any = torch.cuda.get_device_properties(index)
    uuid = getattr(facts, "uuid", None)
    return Device(
        kind="cuda",
        name=facts.name,
        index=index,
        uuid=None if uuid is None else str(uuid),
        pci=_pci(facts),
        memory_bytes=facts.total_memory,
        sm_count=facts.multi_processor_count,
        capability=f"{facts.major}.{facts.minor}",
    )


def _pci(facts: Any) -> str | None:
    """Write the PCI address as the drivers do; torch tells it from 2.8 on."""
    parts = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


class NotFound(Exception):  # noqa: N818 - told to the user, not raised through training
    """NVML has no GPU of this identity, or it cannot be told which."""


class Handle:
    """A GPU as NVML knows it. A MIG slice has handles of its own for what is its own."""

    def __init__(self, own: Any, whole: Any, instance: int | None) -> None:
        self.own = own
        self.whole = whole
        """The GPU that the slice is part of; the GPU itself where it is not cut up."""
        self.instance = instance
        """GPU instance of the slice."""


def nvml_handle(nvml: Any, device: Device) -> Handle:
    """Find a GPU of CUDA's in NVML; raise :class:`NotFound` where it has none of the kind."""
    handle = next(_by_identity(nvml, device), None)
    if handle is None:
        raise NotFound(f"NVML does not know GPU {device.uuid or device.pci or device.name}")
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        if nvml.nvmlDeviceIsMigDeviceHandle(handle).value:
            return _slice(nvml, handle)
    # older CUDA names the whole GPU where it means a slice of it
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return _slice(nvml, _only_slice(nvml, handle))
    return Handle(handle, handle, None)


def _by_identity(nvml: Any, device: Device) -> Iterator[Any]:
    bare = (device.uuid or "").removeprefix("GPU-").removeprefix("MIG-")
    for prefix in ("MIG-", "GPU-") if bare else ():
        with contextlib.suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetHandleByUUID(prefix + bare)
    if device.pci:
        with contextlib.suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetHandleByPciBusId(device.pci)


def _slice(nvml: Any, handle: Any) -> Handle:
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Handle(handle, whole, nvml.nvmlDeviceGetGpuInstanceId(handle))


def _only_slice(nvml: Any, whole: Any) -> Any:
    """Return the slice that this process has of a GPU: a process computes on one at most."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if named.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(named)
    slices = list(_slices(nvml, whole))
    if len(slices) != 1:
        raise NotFound(f"which of {len(slices)} MIG slices it is cannot be told: name it in CUDA_VISIBLE_DEVICES")
    return slices[0]


def _slices(nvml: Any, whole: Any) -> Iterable[Any]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        with contextlib.suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index)
