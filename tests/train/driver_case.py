"""Runs the sampler against a driver in a process of its own: pynvml binds the library once.

``python -m tests.train.driver_case`` reads one case per line of JSON and forks for each, so that the imports, which
take seconds, happen once.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from ft_insight.callbacks import gpu

    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(run(gpu, json.loads(line))), flush=True)
            except BaseException as error:
                print(json.dumps({"error": repr(error)}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def run(gpu: Any, case: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from ft_insight.callbacks import gpu_calls
    from ft_insight.records import Device

    os.environ.update(case["environment"])
    sys.path[:0] = case["path"]
    if case["library"]:
        ctypes.CDLL(case["library"])
    gpu.INTERVAL_S = case["interval_s"]
    gpu_calls.DriverThread.limit_s = case["limit_s"]
    records: list[Any] = []
    told: list[Any] = []
    devices = [Device(kind="cuda", name="a GPU", **names) for names in case["devices"]]
    begin = time.perf_counter()
    sampler = gpu.GpuSampler(
        devices,
        lambda samples, host, dropped: records.append([msgspec.to_builtins(samples), dropped, host is not None]),
        lambda text, off: told.append([text, off]),
        lambda: time.perf_counter() - begin,
        os.getpid(),
        rocm=case["rocm"],
    )
    sampler.start()
    release = case["environment"].get("FAKE_NVML_RELEASE")
    deadline = time.monotonic() + 30
    while len(records) < case["records"] and time.monotonic() < deadline:
        time.sleep(0.002)
        if case["until_hanging"] and Path(case["until_hanging"]).exists():
            break
        if release and case["release_after"] is not None and len(records) >= case["release_after"]:
            Path(release).touch()
    hanging = threads("ft-insight-driver")
    at = time.monotonic()
    sampler.stop()
    return {"records": records, "told": told, "stop_s": time.monotonic() - at, "hanging": hanging}


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


if __name__ == "__main__":
    main()
