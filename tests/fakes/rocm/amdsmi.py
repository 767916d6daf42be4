"""The part of amdsmi 7.0 that is used, with two GPUs behind it; the second tells less of itself."""

from enum import IntEnum

SERIALS = ("0x1A2B3C4D5E6F7788", "0x99AABBCCDDEEFF00")
ADDRESSES = ("0000:C1:00.0", "0000:C5:00.0")


class AmdSmiException(Exception):  # noqa: N818 (as amdsmi calls it)
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, text):
        self.text = text

    def __str__(self):
        return f"Error code:\n\t2 | {self.text}"


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    JUNCTION = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiClkType(IntEnum):
    GFX = 0
    MEM = 4


def amdsmi_init():
    pass


def amdsmi_shut_down():
    pass


def amdsmi_get_processor_handles():
    return [0, 1]


def amdsmi_get_processor_handle_from_bdf(bdf):
    for handle, address in enumerate(ADDRESSES):
        if address.lower() == bdf.lower():
            return handle
    raise AmdSmiLibraryException("AMDSMI_STATUS_NOT_FOUND - Device Not found")


def amdsmi_get_gpu_asic_info(handle):
    return {"asic_serial": SERIALS[handle]}


def amdsmi_get_gpu_activity(handle):
    return {"gfx_activity": 93 - handle, "umc_activity": 41 if handle == 0 else "N/A", "mm_activity": "N/A"}


def amdsmi_get_gpu_vram_usage(handle):
    return {"vram_total": 196592, "vram_used": 1024}


def amdsmi_get_gpu_process_list(handle):
    import os

    own = {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": 5 << 30}
    return [{"pid": 1, "memory_usage": {**own, "vram_mem": 7}}, {"pid": os.getpid(), "memory_usage": own}]


def amdsmi_get_power_info(handle):
    current = 612 if handle == 0 else "N/A"
    return {"current_socket_power": current, "average_socket_power": 580, "socket_power": 0}


def amdsmi_get_power_cap_info(handle):
    return {"power_cap": 750_000_000}


def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": 2_000_000, "counter_resolution": 15.3, "timestamp": 1}


def amdsmi_get_temp_metric(handle, kind, metric):
    assert (kind, metric) == (AmdSmiTemperatureType.JUNCTION, AmdSmiTemperatureMetric.CURRENT)
    return 71


def amdsmi_get_clock_info(handle, kind):
    return {"clk": {AmdSmiClkType.GFX: 2100, AmdSmiClkType.MEM: 1300}[kind], "max_clk": 2200}


def amdsmi_get_violation_status(handle):
    if handle == 1:
        raise AmdSmiLibraryException("AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
    return {"active_ppt_pwr": True, "active_prochot_thrm": False, "active_socket_thrm": True, "active_vr_thrm": "N/A"}


def amdsmi_get_gpu_pci_throughput(handle):
    return {"sent": 1000, "received": 3000, "max_pkt_sz": 256}


def amdsmi_get_gpu_total_ecc_count(handle):
    return {"correctable_count": 4, "uncorrectable_count": 0, "deferred_count": 0}
