"""What the sampler reads of GPUs, with the real pynvml against a compiled stand-in for the driver's library.

``tests/fakes/nvml.c`` fixes what each GPU answers; the values here are worked out from there by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_insight.callbacks.gpu_nvml import throttle_words
from tests.train.nvml_library import CUT, FIRST, SECOND, SLICE, Cases, compiled, samples_of

GIB = 1 << 30
MIB = 1 << 20
NO_DCGM = "NVML has GPM counters from Hopper on; DCGM: its Python bindings are not on the path"


def without_times(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in ("window_s", "unknown")}


def test_every_field_of_a_gpu_without_counters(cases: Cases, library: Path) -> None:
    first, second, *_ = samples_of(cases.run(library, SECOND))
    assert without_times(second) == {
        "uuid": SECOND,
        "gpu_percent": 71,
        "memory_controller_percent": 40,
        "memory_used_bytes": 44 * GIB,
        "memory_total_bytes": 48 * GIB,
        "process_memory_bytes": 40 * GIB,
        "power_w": 271.5,
        "power_limit_w": 300,
        "energy_j": 5000,
        "temperature_c": 62,
        "sm_clock_mhz": 1740,
        "memory_clock_mhz": 7251,
        "throttle": ["software power cap", "hardware thermal slowdown", "reason 0x4000"],
        "pcie_tx_bytes_per_s": 3000 * 1024,
        "pcie_rx_bytes_per_s": 5000 * 1024,
        "nvlink_tx_bytes_per_s": 3000 * 1024 * 4,
        "nvlink_rx_bytes_per_s": 500 * 1024 * 4,
        "ecc_corrected": 17,
        "ecc_uncorrected": 2,
        "xid": [],
    }
    assert first["xid"] == [79, 31]
    assert "nvlink_tx_bytes_per_s" not in first  # a rate needs two readings
    counters = {"sm_percent", "sm_occupancy_percent", "tensor_percent", "dram_percent"}
    assert counters < set(first["unknown"])
    assert all(reason.startswith(NO_DCGM) for reason in first["unknown"].values())
    assert "unknown" not in second  # told once


def test_what_is_not_known_is_told_in_one_line(cases: Cases, library: Path) -> None:
    result = cases.run(library, FIRST, SECOND, FAKE_NVML_FAULTS="energy:3,pcie:4,ecc/0:3")
    assert len(result["told"]) == 1
    text, off = result["told"][0]
    assert not off
    assert "of 2 GPUs: SM counters (NVML has GPM" in text
    assert "of 2 GPUs: energy, ECC errors (Not Supported)" in text
    assert "of 2 GPUs: PCIe traffic (Insufficient Permissions)" in text
    for place in (0, 1):
        sample = samples_of(result, place)[1]
        assert "energy_j" not in sample
        assert sample["power_w"] == 271.5
    assert "ecc_corrected" in samples_of(result, 1)[1]


def test_counters_of_hopper(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, FAKE_NVML_GPM="1", records=4, interval_s=0.02)
    first, second, third, *_ = samples_of(result)
    assert "sm_percent" not in first  # the first reading has no window
    wanted = {
        "sm_percent": 2.1,
        "sm_occupancy_percent": 3.1,
        "tensor_percent": 5.1,
        "dfma_percent": 6.1,
        "hmma_percent": 7.1,
        "dram_percent": 10.1,
        "pcie_tx_bytes_per_s": 20.1 * MIB,
        "pcie_rx_bytes_per_s": 21.1 * MIB,
    }
    for sample in (second, third):
        assert {name: sample[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
        assert sample["counters"] == "gpm"
        assert "imma_percent" not in sample  # the stand-in gives no number
        assert "dmma_percent" not in sample
    assert second["unknown"]["dmma_percent"] == "GPM says Not Supported"
    assert second["unknown"]["imma_percent"] == "GPM gives no number"
    assert third["nvlink_tx_bytes_per_s"] == 3000 * 1024 * 4  # GPM has none: from NVML's own counters
    assert second["window_s"][1] == third["window_s"][0]
    assert third["window_s"][1] - third["window_s"][0] >= 0.015
    assert result["told"] == []


def test_one_gpu_of_several_is_used(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND)
    assert all(len(record[0]) == 1 and record[0][0]["uuid"] == SECOND for record in result["records"] if record[0])


@pytest.mark.parametrize("uuid", [SECOND, f"GPU-{SECOND}"])
def test_a_uuid_with_and_without_its_prefix(cases: Cases, library: Path, uuid: str) -> None:
    assert samples_of(cases.run(library, uuid))[0]["gpu_percent"] == 71


def test_by_pci_address_where_torch_knows_no_uuid(cases: Cases, library: Path) -> None:
    result = cases.run(library, devices=[{"pci": "0000:41:00.0"}])
    assert samples_of(result)[0]["uuid"] == "0000:41:00.0"
    assert samples_of(result)[0]["gpu_percent"] == 71
    other = cases.run(library, devices=[{"uuid": SECOND, "pci": "0000:41:00.0"}], FAKE_NVML_PCI_ONLY="1")
    assert samples_of(other)[0]["gpu_percent"] == 71


def check_slice(result: dict[str, Any], number: int) -> None:
    sample = samples_of(result)[1]
    assert sample["memory_total_bytes"] == 20 * GIB
    assert sample["sm_percent"] == pytest.approx(2 + number / 10)
    assert sample["temperature_c"] == 62  # of the GPU that it is a slice of
    assert "power_w" not in sample
    assert "gpu_percent" not in sample
    assert samples_of(result)[0]["unknown"]["power_w"] == "not told of a MIG slice"


def test_a_mig_slice_by_its_own_uuid(cases: Cases, library: Path) -> None:
    check_slice(cases.run(library, SLICE, FAKE_NVML_GPM="1"), 3)


def test_a_mig_slice_that_cuda_names_by_its_gpu(cases: Cases, library: Path) -> None:
    named = "MIG-55555555-5555-5555-5555-555555555555"
    check_slice(cases.run(library, CUT, FAKE_NVML_GPM="1", CUDA_VISIBLE_DEVICES=named), 4)
    check_slice(cases.run(library, CUT, FAKE_NVML_GPM="1", FAKE_NVML_SLICES="1"), 3)


def test_a_mig_slice_that_nobody_names_is_not_guessed(cases: Cases, library: Path) -> None:
    result = cases.run(library, CUT, FAKE_NVML_GPM="1")
    assert all(not record[0] for record in result["records"])
    assert "which of 2 MIG slices it is cannot be told" in result["told"][0][0]


def test_in_a_container_the_process_is_not_found(cases: Cases, library: Path) -> None:
    first, second, *_ = samples_of(cases.run(library, SECOND, FAKE_NVML_CONTAINER="1"))
    assert "process_memory_bytes" not in first
    assert "process_memory_bytes" not in second
    assert "a container has numbers of its own" in first["unknown"]["process_memory_bytes"]
    assert first["memory_used_bytes"] == 44 * GIB


def test_no_gpu_is_told_and_the_process_sampled(cases: Cases) -> None:
    result = cases.run(None)
    assert [told[0].split(":")[0] for told in result["told"]] == ["no GPU"]
    assert all(record == [[], 0, True] for record in result["records"])
    assert len(result["records"]) >= 3


def test_without_a_driver_the_process_is_sampled(cases: Cases) -> None:
    result = cases.run(None, SECOND)
    assert result["told"] == [["no GPU statistics: NVML says NVML Shared Library Not Found", True]]
    assert result["records"][-1] == [[], 0, True]


def test_an_old_driver(cases: Cases, tmp_path: Path) -> None:
    result = cases.run(compiled(tmp_path, "-DOLD"), SECOND)
    sample = samples_of(result)[1]
    assert sample["gpu_percent"] == 71
    assert sample["power_w"] == 271.5
    assert sample["throttle"] == ["software thermal slowdown"]  # by the function's earlier name
    reasons = samples_of(result)[0]["unknown"]
    assert reasons["energy_j"] == "the driver is too old for it"
    assert reasons["xid"] == "the driver is too old for it"
    assert reasons["nvlink_tx_bytes_per_s"] == "the driver is too old for it"
    assert reasons["process_memory_bytes"] == "driver and nvidia-ml-py do not fit together"
    assert len(result["told"]) == 1


def test_words_of_throttle_reasons() -> None:
    assert throttle_words(0) == ()
    assert throttle_words(0x1) == ("idle",)
    assert throttle_words(0x80 | 0x8 | 0x200) == ("hardware slowdown", "hardware power brake", "reason 0x200")


DCGM = Path(__file__).parent.parent / "fakes" / "dcgm"
ROCM = Path(__file__).parent.parent / "fakes" / "rocm"


def test_dcgm_before_hopper(cases: Cases, library: Path) -> None:
    result = cases.run(library, SECOND, path=[DCGM], records=4)
    first, second, *_ = samples_of(result)
    assert first["unknown"]["sm_percent"] == "DCGM has no value yet"
    assert {n: second[n] for n in ("sm_percent", "sm_occupancy_percent", "tensor_percent")} == {
        "sm_percent": 73.0,
        "sm_occupancy_percent": 41.0,
        "tensor_percent": 12.5,
    }
    assert "dram_percent" not in second
    assert second["unknown"]["dram_percent"] == "DCGM has no value of it"
    assert second["counters"] == "dcgm"
    begin, end = second["window_s"]
    assert end - begin == pytest.approx(0.5, abs=2e-4)
    assert second["pcie_tx_bytes_per_s"] == 3000 * 1024  # NVML's: DCGM is not asked for it
    assert result["told"] == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no library", "DCGM: no host engine answers (DCGM library not found)"),
        ("no engine", "DCGM: no host engine answers (The connection to the host engine"),
        ("no permission", "DCGM: its fields cannot be watched (Profiling is not allowed"),
        ("stale", "DCGM's host engine has stopped updating"),
    ],
)
def test_dcgm_that_does_not_help(cases: Cases, library: Path, fault: str, reason: str) -> None:
    result = cases.run(library, SECOND, path=[DCGM], FAKE_DCGM=fault)
    reasons = {s["unknown"]["sm_percent"] for s in samples_of(result) if "sm_percent" in s.get("unknown", {})}
    assert any(reason in r for r in reasons)
    assert all("sm_percent" not in s for s in samples_of(result))
    assert samples_of(result)[1]["gpu_percent"] == 71


def test_amd(cases: Cases) -> None:
    letters = "99aabbcc-ddee-ff00".replace("-", "").encode().hex()  # ROCm's UUID: the serial number's letters
    devices = [{"pci": "0000:c1:00.0"}, {"uuid": f"{letters[:8]}-{letters[8:]}"}]
    result = cases.run(None, devices=devices, path=[ROCM], rocm=True)
    first, other = samples_of(result)[1], samples_of(result, 1)[1]
    assert without_times(first) == {
        "uuid": "0000:c1:00.0",
        "gpu_percent": 93,
        "memory_controller_percent": 41,
        "memory_used_bytes": 1024 * MIB,
        "memory_total_bytes": 196592 * MIB,
        "process_memory_bytes": 5 * GIB,
        "power_w": 612,
        "power_limit_w": 750,
        "energy_j": pytest.approx(2_000_000 * 15.3e-6),
        "temperature_c": 71,
        "sm_clock_mhz": 2100,
        "memory_clock_mhz": 1300,
        "throttle": ["package power limit", "socket too hot"],
        "pcie_tx_bytes_per_s": 256_000,
        "pcie_rx_bytes_per_s": 768_000,
        "ecc_corrected": 4,
        "ecc_uncorrected": 0,
    }
    assert other["gpu_percent"] == 92
    assert "memory_controller_percent" not in other
    assert other["power_w"] == 580  # the mean, where there is no figure of the moment
    assert "throttle" not in other
    assert "of 2 GPUs: compute unit counters (amdsmi has no such counters)" in result["told"][0][0]


def test_amd_without_its_library(cases: Cases) -> None:
    result = cases.run(None, devices=[{"pci": "0000:c1:00.0"}], rocm=True)
    assert result["told"] == [
        ["no GPU statistics: amdsmi cannot be imported, which comes with ROCm (ModuleNotFoundError)", True]
    ]
