"""The NVML sampler with the real pynvml, against a compiled stand-in for the driver's library.

Each case runs in a process of its own: pynvml binds the library once. A missing compiler is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent / "fakes" / "nvml.c"
SECOND = "22222222-2222-2222-2222-222222222222"

SCRIPT = """
import json, os, sys, time
from ft_insight.callbacks import gpu
from ft_insight.records import Device
gpu.INTERVAL_S = 0.01
samples, told = [], []
devices = tuple(Device(kind="cuda", name="A40", uuid=u) for u in json.loads(sys.argv[1]))
sampler = gpu.GpuSampler(devices, samples.append, lambda text, off: told.append([text, off]), os.getpid())
sampler.start()
deadline = time.monotonic() + 10
while len(samples) < 3 and sampler._thread.is_alive() and time.monotonic() < deadline:
    time.sleep(0.01)
begin = time.monotonic()
sampler.stop()
import msgspec
print(json.dumps({"samples": msgspec.to_builtins(samples), "told": told, "stop_s": time.monotonic() - begin}))
os._exit(0)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(target), str(SOURCE)], check=True
    )
    return target


def sample(library: Path | None, uuids: list[str], **environment: str) -> dict[str, Any]:
    paths = {"LD_LIBRARY_PATH": str(library.parent)} if library else {}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(uuids)],
        capture_output=True,
        text=True,
        env={**os.environ, **paths, **environment},
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_field_of_the_gpu_that_torch_names(library: Path) -> None:
    result = sample(library, [SECOND])
    assert result["told"] == []
    assert len(result["samples"]) >= 3
    assert result["samples"][0] == [
        {
            "uuid": SECOND,
            "gpu_percent": 71,
            "memory_controller_percent": 40,
            "memory_used_bytes": 44 << 30,
            "memory_total_bytes": 48 << 30,
            "process_memory_bytes": 40 << 30,
            "power_w": 271.5,
            "power_limit_w": 300,
            "energy_j": 5000,
            "temperature_c": 62,
            "sm_clock_mhz": 1740,
            "memory_clock_mhz": 7251,
        }
    ]


def test_a_field_that_is_not_offered_is_null_and_told_once(library: Path) -> None:
    result = sample(library, [SECOND], FAKE_NVML_NO="power")
    assert all("power_w" not in s[0] and s[0]["gpu_percent"] == 71 for s in result["samples"])
    assert result["told"] == [[f"no power of GPU {SECOND}: Not Supported", False]]


def test_a_gpu_that_is_lost_ends_the_samples(library: Path) -> None:
    result = sample(library, [SECOND], FAKE_NVML_LOST_AFTER="2")
    assert len(result["samples"]) == 2
    assert result["told"] == [["GPU statistics end here: GPU is lost", True]]


def test_no_driver() -> None:
    result = sample(None, [SECOND])
    assert result["samples"] == []
    assert len(result["told"]) == 1
    assert result["told"][0][0].startswith("no GPU statistics: NVML says")


def test_a_driver_that_is_not_loaded(library: Path) -> None:
    result = sample(library, [SECOND], FAKE_NVML_INIT="9")
    assert result["told"] == [["no GPU statistics: NVML says Driver Not Loaded", True]]


def test_a_gpu_that_nvml_does_not_know(library: Path) -> None:
    result = sample(library, ["33333333-0000-0000-0000-000000000000", SECOND])
    assert [s["uuid"] for s in result["samples"][0]] == [SECOND]
    assert "NVML does not know it" in result["told"][0][0]


def test_a_call_that_hangs_is_not_waited_for(library: Path) -> None:
    result = sample(library, [SECOND], FAKE_NVML_SLEEP_MS="4000")
    assert result["stop_s"] < 2  # a limit of ours, not a measurement: stop() gives up after one second


def test_no_gpu_no_thread() -> None:
    assert sample(None, [])["told"] == []
