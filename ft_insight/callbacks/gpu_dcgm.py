"""DCGM's profiling fields, for GPUs before Hopper: SM, tensor-core and DRAM use where a host engine runs.

It is asked through NVIDIA's own Python bindings, which come with DCGM and not from PyPI. Field numbers and units are
those of ``dcgm_fields.h``: fractions from 0 to 1. With more fields than a GPU counts at a time, DCGM takes turns.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

from ft_insight.callbacks.gpu_card import NotNow, NotOffered, Partly, Values
from ft_insight.records import Device

FIELDS = {"sm_percent": 1002, "sm_occupancy_percent": 1003, "tensor_percent": 1004, "dram_percent": 1005}
UPDATE_S = 0.5
KEEP_S = 10.0
STALE_S = 3.0
BLANK = 2.0**47
"""``DCGM_FP64_BLANK``: from here on, a value is the reason why there is none."""
WHERE = "/usr/share/datacenter-gpu-manager-4/bindings/python3"


class Dcgm:
    """One connection to this machine's host engine, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._agent: Any = None
        self._entities: Any = None
        self._handle: Any = None
        self._refused: str | None = None

    def watch(self, device: Device) -> int:
        """Have a GPU's fields updated; return DCGM's number of it. Raises ``NotOffered`` with the reason."""
        with self._lock:
            if self._handle is None and self._refused is None:
                self._refused = self._connect()
            if self._refused is not None:
                raise NotOffered(self._refused)
            number = self._number(device)
            try:
                self._watch(number)
            except Exception as error:  # noqa: BLE001 - its own exception classes are made at run time
                raise NotOffered(f"its fields cannot be watched ({_short(error)})") from None
            return number

    def _connect(self) -> str | None:
        try:
            import dcgm_agent  # type: ignore[import-not-found]
            import dcgm_fields  # type: ignore[import-not-found]
            import dcgm_structs  # type: ignore[import-not-found]
        except ImportError:
            return f"its Python bindings are not on the path (PYTHONPATH={WHERE})"
        try:
            dcgm_structs._dcgmInit()
            dcgm_agent.dcgmInit()
            self._handle = dcgm_agent.dcgmConnect("127.0.0.1")
        except Exception as error:  # noqa: BLE001 - its own exception classes are made at run time
            return f"no host engine answers ({_short(error)})"
        self._agent, self._entities = dcgm_agent, dcgm_fields
        self._empty_group = dcgm_structs.DCGM_GROUP_EMPTY
        return None

    def _number(self, device: Device) -> int:
        for number in self._agent.dcgmGetAllSupportedDevices(self._handle):
            known = self._agent.dcgmGetDeviceAttributes(self._handle, number).identifiers
            same_uuid = device.uuid and _text(known.uuid).removeprefix("GPU-") == device.uuid.removeprefix("GPU-")
            if same_uuid or (device.pci and _text(known.pciBusId).lower().endswith(device.pci)):
                return int(number)
        raise NotOffered(f"it does not know GPU {device.uuid or device.pci}")

    def _watch(self, number: int) -> None:
        agent, handle = self._agent, self._handle
        name = f"ft-insight-{os.getpid()}-{number}"
        group = agent.dcgmGroupCreate(handle, self._empty_group, name)
        agent.dcgmGroupAddDevice(handle, group, number)
        fields = agent.dcgmFieldGroupCreate(handle, list(FIELDS.values()), name)
        agent.dcgmWatchFields(handle, group, fields, int(UPDATE_S * 1e6), KEEP_S, 0)

    def read(self, number: int, clock: Callable[[], float]) -> Values:
        """Return the latest values, in percent, and the log's time over which they are means."""
        gpu = self._entities.DCGM_FE_GPU
        found = self._agent.dcgmEntityGetLatestValues(self._handle, gpu, number, list(FIELDS.values()))
        values: Values = {}
        reasons = {}
        ends_s = []
        for field, value in zip(FIELDS, found, strict=True):
            if value.status == 0 and 0.0 <= value.value.dbl < BLANK:
                values[field] = round(100.0 * value.value.dbl, 3)
                ends_s.append(value.ts / 1e6)
            else:
                reasons[field] = "DCGM has no value of it"
        if not values:
            raise NotNow("DCGM has no value yet")
        age_s = time.time() - min(ends_s)
        if age_s > STALE_S:
            raise NotNow("DCGM's host engine has stopped updating")
        end = clock() - age_s
        return Partly({**values, "counters": "dcgm", "window_s": (round(end - UPDATE_S, 4), round(end, 4))}, reasons)

    def close(self) -> None:
        """Leave the host engine, which forgets what was watched for us."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(Exception):
                self._agent.dcgmDisconnect(handle)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
