"""The time of a micro-batch by what limits it: host, dequantisation, matrix products, memory. Measured, else traced."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from ft_insight.catalog import Gpu
from ft_insight.estimate.work import Work
from ft_insight.layer_times import LayerTime
from ft_insight.records import KernelRole, Kernels

HALF, FP32 = "16-bit", "fp32"
OVERLAP = 2.0
"""How far fixed time and the work of the slots overlap, as in ``StepTime``: 1 not at all, 2 as on most sweeps."""
DEQUANTISE_SHARE = 0.59
"""Of the bandwidth that dequantisation reaches: the paper's artifact, 358.6 us for 59 M weights on an A40."""
READ_SHARE = 0.8
"""Of the bandwidth that plain reading and writing reaches."""
LEAST_HOST = 0.1
"""Of the fixed time that stays the host's, however much device work the model's size explains."""
SPREAD = {"kernels": (0.36, 0.15), "fit": (0.36, 0.15), "layers": (0.45, 0.18), "total": (0.45, 0.18)}
"""80% half-widths in logarithms by basis: of the host's time, for the target's host is another, and of the device's.
Calibrated on the published pairs, see ``ft_insight.validate.pairs``."""
UNKNOWN_WORK_SPREAD = 0.3
"""Half-width of the device's time where even the number of slots is not known."""
MOST_EXPLAINED = 0.15
"""Of a time, by all that a quantised model does in 16 bits, below which it must compute in fp32: the published runs
that do are at 0.02 to 0.07, those that do not at 0.3 and more."""
MEMORY_KINDS = frozenset({"embedding", "input_norm", "post_attention_norm", "final_norm", "layer", "moe", "router"})
"""Kinds of layers whose time is not that of large matrix products."""
_PLAIN_FP32 = re.compile(r"sgemm|simt", re.IGNORECASE)


class Buckets(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch by what limits them. ``fixed`` ones do not grow with its slots."""

    host_s: float
    dequantise_s: float
    matmul_s: float
    memory_s: float
    overlap: float
    basis: str
    """``kernels``, ``fit`` (fixed and per-slot time told apart), ``layers`` or ``total``."""
    number_format: str = HALF
    work_known: bool = True

    @property
    def total_s(self) -> float:
        """All of it; what overlaps is not added."""
        fixed, device = self.host_s + self.dequantise_s, self.matmul_s + self.memory_s
        if self.overlap == 1:
            return fixed + device
        return float((fixed**self.overlap + device**self.overlap) ** (1 / self.overlap))

    @property
    def host_share(self) -> float:
        """Of the sum of all buckets."""
        whole = self.host_s + self.dequantise_s + self.matmul_s + self.memory_s
        return self.host_s / whole if whole else 0.0

    @property
    def spread(self) -> float:
        """80% half-width of the total on another GPU, in logarithms: the host's and the device's in quadrature."""
        host, device = SPREAD[self.basis]
        if not self.work_known:
            device = UNKNOWN_WORK_SPREAD
        return math.hypot(self.host_share * host, (1 - self.host_share) * device)

    def on(self, source: Gpu, target: Gpu) -> Buckets:
        """Return the same work on ``target``. The host's part stays as it is."""
        compute = matmul_rate(source, self.number_format) / matmul_rate(target, self.number_format)
        memory = source.bandwidth_gbs / target.bandwidth_gbs
        return msgspec.structs.replace(
            self,
            dequantise_s=self.dequantise_s * memory,
            matmul_s=self.matmul_s * compute,
            memory_s=self.memory_s * memory,
        )

    def bound_by(self) -> str:
        """Name the longest bucket."""
        parts = {
            "matmul": self.matmul_s,
            "memory bandwidth": self.memory_s + self.dequantise_s,
            "host": self.host_s,
        }
        return max(parts, key=parts.__getitem__)


class KernelShares(msgspec.Struct, frozen=True):
    """What a profiled step says: shares of the device's busy time, and the share of the window it was busy."""

    matmul: float
    dequantise: float
    busy: float
    number_format: str


def matmul_rate(gpu: Gpu, number_format: str) -> float:
    """Return FLOP/s that matrix products sustain."""
    tflops = gpu.sustained_fp32_tflops if number_format == FP32 else gpu.sustained_tflops
    return tflops * 1e12


def split(
    total_s: float,
    work: Work,
    gpu: Gpu,
    *,
    fixed_s: float | None = None,
    seen: KernelShares | None = None,
    memory_share: float | None = None,
    number_format: str | None = None,
    with_optimizer: bool = False,
) -> Buckets:
    """Split the measured ``total_s`` of a micro-batch on ``gpu``.

    ``fixed_s`` is the part that a fit says does not grow with the slots: what dequantisation and the reading of
    weights do not explain of it is the host's. ``seen`` is a profile's, ``memory_share`` the share of the layers'
    time that no large product takes. What neither says is traced from ``work``: matrix products at the rate that the
    card sustains, and the rest is memory's. ``with_optimizer`` says that ``total_s`` holds an optimizer step.
    """
    moved = (work.optimizer_bytes if with_optimizer else 0.0) / _bytes_per_s(gpu, READ_SHARE)
    if fixed_s is None:
        return _split_total(total_s, work, gpu, seen, memory_share, number_format, moved)
    form = number_format or (seen.number_format if seen else HALF)
    fixed = min(max(fixed_s, 0.0), total_s)
    slots = (total_s**OVERLAP - fixed**OVERLAP) ** (1 / OVERLAP)
    busy = seen.busy * total_s if seen else 0.0
    matmul = seen.matmul * busy if seen else _traced_matmul(work, gpu, form, slots)
    matmul = min(matmul, slots * (1 - (memory_share or 0.0)))
    unpacking = seen.dequantise * busy if seen else _dequantise_s(work, gpu)
    reading = max(0.0, work.weight_bytes / _bytes_per_s(gpu, READ_SHARE) - matmul)
    device = min(unpacking + moved + reading, (1 - LEAST_HOST) * fixed)
    return Buckets(
        host_s=fixed - device,
        dequantise_s=device,
        matmul_s=matmul,
        memory_s=slots - matmul,
        overlap=OVERLAP,
        basis="kernels" if seen else "fit",
        number_format=form,
        work_known=seen is not None or work.flops is not None,
    )


def _split_total(
    total_s: float,
    work: Work,
    gpu: Gpu,
    seen: KernelShares | None,
    memory_share: float | None,
    number_format: str | None,
    moved: float,
) -> Buckets:
    """Split a time of which no fit says what part is fixed; nothing is taken to overlap."""
    if seen is not None:
        busy = seen.busy * total_s
        host, form = total_s - busy, number_format or seen.number_format
        matmul, unpacking = seen.matmul * busy, seen.dequantise * busy
        basis = "kernels"
    else:
        host = min(work.launch_s or 0.0, total_s)
        busy = total_s - host
        form = number_format or (FP32 if _computes_in_fp32(total_s, host, work, gpu) else HALF)
        matmul = min(_traced_matmul(work, gpu, form, busy), busy * (1 - (memory_share or 0.0)))
        unpacking = min(_dequantise_s(work, gpu) + moved, busy - matmul)
        basis = "total" if memory_share is None else "layers"
    return Buckets(
        host_s=host,
        dequantise_s=unpacking,
        matmul_s=matmul,
        memory_s=max(0.0, busy - matmul - unpacking),
        overlap=1.0,
        basis=basis,
        number_format=form,
        work_known=seen is not None or work.flops is not None,
    )


def _bytes_per_s(gpu: Gpu, share: float) -> float:
    return gpu.bandwidth_gbs * 1e9 * share


def _dequantise_s(work: Work, gpu: Gpu) -> float:
    return work.dequantised_bytes / _bytes_per_s(gpu, DEQUANTISE_SHARE)


def _traced_matmul(work: Work, gpu: Gpu, number_format: str, most_s: float) -> float:
    """Return the seconds of the matrix products, at most ``most_s``; half of it where the work is not known."""
    return most_s / 2 if work.flops is None else min(work.flops / matmul_rate(gpu, number_format), most_s)


def _computes_in_fp32(total_s: float, host_s: float, work: Work, gpu: Gpu) -> bool:
    """Tell whether a quantised model multiplies in fp32, as bitsandbytes does unless told otherwise.

    It is so slow that the time itself tells: where products in fp32 fit into the time, and launches, dequantisation
    and products in 16 bits explain next to nothing of it.
    """
    if not work.quantised or work.flops is None or work.flops / matmul_rate(gpu, FP32) > total_s:
        return False
    explained = host_s + _dequantise_s(work, gpu) + work.flops / matmul_rate(gpu, HALF)
    return explained < MOST_EXPLAINED * total_s


def kernel_shares(kernels: Kernels | None, gpu: Gpu) -> KernelShares | None:
    """Return what a profiled step on ``gpu`` says; None where none was recorded on the device.

    A role is matrix work where its FLOPs take longer than its bytes, at the rates that the card sustains.
    """
    if kernels is None or kernels.clock == "host" or not kernels.window_s:
        return None
    roles = [role for role in kernels.roles if role.pass_name in ("forward", "recompute", "backward")]
    busy = sum(role.seconds for role in roles)
    if not busy:
        return None
    form = FP32 if _mostly_plain_fp32(kernels) else HALF
    matmul = sum(role.seconds for role in roles if _is_compute(role, gpu, form))
    unpacking = sum(role.seconds for role in roles if role.role == "dequantise")
    return KernelShares(matmul / busy, unpacking / busy, min(1.0, kernels.busy_s / kernels.window_s), form)


def _is_compute(role: KernelRole, gpu: Gpu, number_format: str) -> bool:
    if not role.flops or role.role == "dequantise":
        return False
    return role.flops / matmul_rate(gpu, number_format) >= (role.bytes or 0.0) / _bytes_per_s(gpu, 1.0)


def _mostly_plain_fp32(kernels: Kernels) -> bool:
    """Most of the time of products is in kernels whose names say that they use no tensor core."""
    named = [each for each in kernels.names if each.role.startswith("matmul")]
    plain = sum(each.seconds for each in named if _PLAIN_FP32.search(each.name) and "tf32" not in each.name.lower())
    return plain > sum(each.seconds for each in named) / 2


def memory_share_of(layers: Sequence[LayerTime]) -> float | None:
    """Return the share of the layers' time in kinds that hold no large product; None where none was sampled."""
    whole = sum(layer.total_s for layer in layers)
    if not whole:
        return None
    return sum(layer.total_s for layer in layers if layer.kind in MEMORY_KINDS) / whole
