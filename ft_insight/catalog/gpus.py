"""Published figures of data-centre and workstation GPUs, and finding one by the name people or drivers use.

The figures live in ``gpus.toml`` beside this module, each GPU with its source. A wrong GPU makes every number
downstream wrong without a sign, so names are matched whole (case, spaces, dashes and vendor words aside) and
never by nearness: what is not known is refused, with suggestions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USABLE_GIB_PER_MARKETING_GB: Final = 0.91
"""GiB that torch reports for each GB on the box, where the card itself has no figure; see `Gpu`."""

_GIB: Final = 1024**3
_DATA: Final = Path(__file__).with_name("gpus.toml")
_SEPARATORS: Final = re.compile(r"[\s\-_()]+")
_ONE_OF: Final = re.compile(r"^\s*1\s*x\s+|^\s*1x(?=[a-z])")
_GIGABYTES: Final = re.compile(r"(16|24|32|40|48|80|94|96)g(?=$|[^b])")  # not that of the A10G
_VENDOR_WORDS: Final = re.compile(r"(?:nvidia|amd|instinct|geforce|tesla)(?=.)")
# Reported over marketing memory (GiB per GB): 0.91 with ECC on GDDR6 up to 1.0 on HBM seen by NVML. Outside
# this the device is a slice or another variant than its name says.
_PLAUSIBLE_SHARE: Final = (0.88, 1.02)
_SUSTAINED: Final = {"NVIDIA": 0.8, "AMD": 0.6}
_SUSTAINED_FP32: Final = {"8.6": 0.5, "8.9": 0.5, "12.0": 0.5, "9.0": 0.75, "10.0": 0.75, "10.3": 0.75}
_ONE_PIPE: Final = 0.95
_PCIE_GBS: Final = {"Volta": 16.0, "Turing": 16.0, "Ampere": 32.0, "Ada": 32.0, "Hopper": 64.0, "Blackwell": 64.0}
# one direction of 16 lanes: generation 3, 4 and 5
_MAX_SUGGESTIONS: Final = 3
_SUGGEST_FROM: Final = 60.0  # rapidfuzz ratio, per cent; below it a suggestion is noise
_SHOWN_NAME_CHARS: Final = 60


class UnknownGpuError(ValueError):
    """A name that stands for no GPU of the catalogue for certain; its message is one line, fit to show."""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as its maker publishes it, with units in the field names, so projections can cite a source.

    Rates are dense TFLOPS (no sparsity), None where not published or not supported in hardware. `memory_gb`
    is what marketing says; `usable_memory_gib` is what torch reports as total memory (GiB, lower end of
    what has been seen, ECC on), None where nobody noted it. `measured_bf16_tflops` is the best matmul rate
    measured, which can be half the published one. `sustained` is the share of the published matmul rate that a
    power-capped card keeps up, and `sustained_why` the reason; `nvlink_bridge` says that NVLink joins only pairs
    of this card. `device_names` are what torch or NVML report for exactly this card, `aliases` what people type.
    `note` holds what is doubtful about the figures: show it beside them.
    """

    name: str
    vendor: str
    memory_gb: float
    bandwidth_gbs: float
    fp16_tflops: float
    fp32_tflops: float
    sm_count: int
    tdp_w: float
    compute_capability: str
    architecture: str
    source: str
    usable_memory_gib: float | None = None
    bf16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp8_tflops: float | None = None
    measured_bf16_tflops: float | None = None
    nvlink_gbs: float | None = None
    nvlink_bridge: bool = False
    sustained: float | None = None
    sustained_why: str = ""
    note: str = ""
    device_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes a training process can hope for, to judge whether a run fits.

        The noted figure where there is one; otherwise 0.91 GiB for each marketing GB. Of the seven noted
        cards, A100-80 and H100-80 report 0.989 GiB per GB, RTX 4090 0.983, A40 and L40S 0.925, A10G 0.917
        and T4 0.9125 (ECC on GDDR6 takes a sixteenth): 0.91 is just under the lowest, so a fit is never
        promised on memory that is not there, at the price of about 8% on HBM cards such as the H200.
        """
        gib = self.usable_memory_gib
        if gib is None:
            gib = self.memory_gb * USABLE_GIB_PER_MARKETING_GB
        return int(gib * _GIB)

    @property
    def matmul_tflops(self) -> float:
        """Dense TFLOPS that mixed-precision training can use: bf16, or fp16 where the card has no bf16."""
        return self.fp16_tflops if self.bf16_tflops is None else self.bf16_tflops

    @property
    def sustained_tflops(self) -> float:
        """Dense 16-bit TFLOPS that training can count on for hours, which power caps keep below the published rate.

        The best rate measured where there is one; else the published rate times ``sustained``, which is 0.8 unless
        the catalogue says otherwise: the measured NVIDIA cards reach 0.77 to 0.87 of theirs, AMD's 0.51 to 0.62.
        """
        if self.measured_bf16_tflops is not None:
            return self.measured_bf16_tflops
        return self.matmul_tflops * (self.sustained or _SUSTAINED.get(self.vendor, _SUSTAINED["NVIDIA"]))

    @property
    def sustained_fp32_tflops(self) -> float:
        """TFLOPS that matmuls in plain fp32, without tensor cores, can count on.

        Cards with one fp32 pipe per partition keep up nearly all of the published rate. Where the second pipe is
        shared with integers (compute capability 8.6, 8.9 and 12.x) the published rate counts both, and half of it
        is reached; Hopper and data-centre Blackwell are held back by power. With these shares the published QLoRA
        runs that compute in fp32 carry over between A100, H100 and RTX PRO 6000 within 5%.
        """
        return self.fp32_tflops * _SUSTAINED_FP32.get(self.compute_capability, _ONE_PIPE)

    @property
    def link_gbs(self) -> float:
        """GB/s that one GPU can send to its peers in a ring: NVLink's one direction, or that of its PCIe slot.

        A bridge joins only two cards and is often not fitted, so that a bridged card counts as on PCIe.
        """
        if self.nvlink_gbs and not self.nvlink_bridge:
            return self.nvlink_gbs / 2
        return _PCIE_GBS.get(self.architecture, _PCIE_GBS["Ampere"])


class _Catalogue(msgspec.Struct, frozen=True):
    gpu: tuple[Gpu, ...]


@lru_cache(maxsize=1)
def load_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalogue in file order, read once and kept."""
    return msgspec.convert(tomllib.loads(_DATA.read_text(encoding="utf-8")), _Catalogue).gpu


def find_gpu(name: str) -> Gpu:
    """Give the GPU that a typed name stands for, or refuse: a wrong guess would be worse than an error.

    Case, spaces, dashes, underscores, brackets and vendor words do not matter, and what torch or NVML
    report is understood too. A name that leaves the variant open means the one most commonly rented:
    ``a100`` and ``h100`` the SXM card with 80 GB (``a100 pcie`` the 80 GB one), ``h200``, ``b200`` and
    ``b300`` the SXM card, ``gh200`` the 96 GB one, ``v100`` and ``v100 pcie`` the 16 GB one (``v100`` being
    SXM2). Raises `UnknownGpuError` with up to three suggestions otherwise.
    """
    gpu = _by_key().get(_key(name))
    if gpu is None:
        raise UnknownGpuError(_refusal(name))
    return gpu


def find_gpus(names: Iterable[str]) -> tuple[Gpu, ...]:
    """Give the GPUs that typed names stand for, each once; commas part names too, and ``all`` is the whole catalogue.

    Raises `UnknownGpuError` as `find_gpu` does.
    """
    found: dict[str, Gpu] = {}
    for name in (part for given in names for part in given.split(",")):
        chosen = load_gpus() if name.strip().lower() == "all" else (find_gpu(name),)
        found.update((gpu.name, gpu) for gpu in chosen)
    return tuple(found.values())


def gpu_for_device(device_name: str, memory_bytes: int | None) -> Gpu | None:
    """Give the catalogue entry of a device as torch or NVML names it, or None when that is not certain.

    `memory_bytes` is the total memory reported, None if unknown; it tells variants of one name apart and
    unmasks a slice. The name must be a reported one in full, so laptop, Max-Q, vGPU and MIG devices give
    None, and so does the MI250X, which torch shows as two devices of half the published figures.
    """
    named = _by_device_name().get(_device_key(device_name), ())
    fitting = [gpu for gpu in named if memory_bytes is None or _memory_fits(gpu, memory_bytes)]
    return fitting[0] if len(fitting) == 1 else None


def _memory_fits(gpu: Gpu, memory_bytes: int) -> bool:
    low, high = _PLAUSIBLE_SHARE
    return low <= memory_bytes / _GIB / gpu.memory_gb <= high


def _key(name: str) -> str:
    """Reduce a name to what tells GPUs apart; vendor words go from the front only, never leaving nothing.

    ``1x`` before a name, as cloud instances are called, says nothing of the card; ``80g`` is ``80gb``.
    """
    key = _SEPARATORS.sub("", _ONE_OF.sub("", name.casefold()))
    key = _GIGABYTES.sub(r"\1gb", key)
    while match := _VENDOR_WORDS.match(key):
        key = key[match.end() :]
    return key


def _device_key(name: str) -> str:
    """Reduce a reported name: older drivers leave out the leading NVIDIA, and nothing else may differ."""
    return " ".join(name.casefold().split()).removeprefix("nvidia ")


@lru_cache(maxsize=1)
def _by_key() -> dict[str, Gpu]:
    return {_key(each): gpu for gpu in load_gpus() for each in (gpu.name, *gpu.device_names, *gpu.aliases)}


@lru_cache(maxsize=1)
def _by_device_name() -> dict[str, tuple[Gpu, ...]]:
    found: dict[str, tuple[Gpu, ...]] = {}
    for gpu in load_gpus():
        for key in {_device_key(each) for each in gpu.device_names}:
            found[key] = (*found.get(key, ()), gpu)
    return found


def _refusal(name: str) -> str:
    shown = name if len(name) <= _SHOWN_NAME_CHARS else name[:_SHOWN_NAME_CHARS] + "..."
    near = _suggestions(name)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return f"unknown GPU {shown!r}: {hint}`ft-insight prices` names all {len(load_gpus())}"


def _suggestions(name: str) -> list[str]:
    """Canonical names nearest to a refused one, best first, each once."""
    from rapidfuzz import fuzz, process  # only wanted when a name is refused

    by_key = _by_key()
    key = _key(name[:_SHOWN_NAME_CHARS])
    hits = process.extract(key, list(by_key), scorer=fuzz.ratio, score_cutoff=_SUGGEST_FROM, limit=None)
    return list(dict.fromkeys(by_key[hit].name for hit, _, _ in hits))[:_MAX_SUGGESTIONS]
