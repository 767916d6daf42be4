"""The part of DCGM's bindings of this name that is used, with what is in dcgm_structs.h behind it."""

import os

DCGM_GROUP_EMPTY = 1
DCGM_ST_OK = 0


class DCGMError(Exception):
    pass


def _dcgmInit(libDcgmPath=None):  # noqa: N802, N803
    if os.environ.get("FAKE_DCGM") == "no library":
        raise DCGMError("DCGM library not found")
