"""The part of DCGM's bindings of this name that is used."""

DCGM_FE_GPU = 1
