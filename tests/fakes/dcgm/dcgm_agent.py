"""The part of DCGM's bindings of this name that is used, with a host engine that knows two GPUs behind it.

FAKE_DCGM says what is wrong with it: "no engine", "no permission", "stale". Values appear with the second reading.
"""

import os
import time
from types import SimpleNamespace

from dcgm_structs import DCGM_GROUP_EMPTY, DCGMError

UUIDS = (b"GPU-22222222-2222-2222-2222-222222222222", b"GPU-11111111-1111-1111-1111-111111111111")
VALUES = {1002: 0.73, 1003: 0.41, 1004: 0.125, 1005: 2.0**47 + 2}  # the last: not supported
state = {"group": [], "fields": [], "watched": False, "reads": 0}


def dcgmInit():  # noqa: N802
    return 0


def dcgmConnect(ip_address):  # noqa: N802
    if os.environ.get("FAKE_DCGM") == "no engine":
        raise DCGMError("The connection to the host engine is not valid any longer")
    assert ip_address == "127.0.0.1"
    return "handle"


def dcgmDisconnect(handle):  # noqa: N802
    assert handle == "handle"


def dcgmGetAllSupportedDevices(handle):  # noqa: N802
    return [0, 1]


def dcgmGetDeviceAttributes(handle, number):  # noqa: N802
    known = {"uuid": UUIDS[number], "pciBusId": (b"00000000:41:00.0", b"00000000:01:00.0")[number]}
    return SimpleNamespace(identifiers=SimpleNamespace(**known))


def dcgmGroupCreate(handle, kind, name):  # noqa: N802
    assert kind == DCGM_GROUP_EMPTY
    assert name
    return "group"


def dcgmGroupAddDevice(handle, group, number):  # noqa: N802
    state["group"].append(number)


def dcgmFieldGroupCreate(handle, fields, name):  # noqa: N802
    state["fields"] = list(fields)
    return "fields"


def dcgmWatchFields(handle, group, fields, update_microseconds, keep_s, keep_samples):  # noqa: N802
    if os.environ.get("FAKE_DCGM") == "no permission":
        raise DCGMError("Profiling is not allowed for this user")
    assert (group, fields, update_microseconds) == ("group", "fields", 500_000)
    state["watched"] = True


def dcgmEntityGetLatestValues(handle, entity_group, number, fields):  # noqa: N802
    assert state["watched"]
    assert number in state["group"]
    assert entity_group == 1
    state["reads"] += 1
    age_s = 60.0 if os.environ.get("FAKE_DCGM") == "stale" else 0.25
    absent = state["reads"] == 1
    at = int((time.time() - age_s) * 1e6)
    value = lambda field: 2.0**47 if absent else VALUES[field]  # noqa: E731
    return [SimpleNamespace(fieldId=f, status=0, ts=at, value=SimpleNamespace(dbl=value(f), i64=0)) for f in fields]
