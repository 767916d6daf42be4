"""From the device of a run to another GPU: what carries over, how much longer or shorter it takes, and how sure it is.

* From a GPU the buckets of a micro-batch are scaled one by one (``buckets``): matrix products with the rate that the
  cards sustain, all else on the device with their bandwidth, and the host's part not at all.
* From a CPU, whose speed says nothing of a GPU: the work in FLOPs over the share of the peak rate that fine-tunes
  reach (139 published runs), and not less than what launching a decoder layer's kernels takes the host.
* From a few steps on the target itself, a probe: the whole run is rescaled by what the probe took.
"""

from __future__ import annotations

import math
import re

import msgspec

from ft_insight.catalog import Gpu
from ft_insight.estimate.work import LAUNCH_S_PER_LAYER, flops_per_slot
from ft_insight.records import Header

PEAK_SHARE = {"full": (0.023, 0.044, 0.20), "lora": (0.079, 0.126, 0.22), "qlora": (0.025, 0.051, 0.11)}
"""Share of the peak matmul rate that fine-tunes reach, by method: 10%, 50% and 90% of the published runs."""
LAYER_FLOOR_S = (0.0042, LAUNCH_S_PER_LAYER, 0.014)
"""Seconds of a whole step per decoder layer when the host limits it. The upper end is for mixtures of experts and
recomputation, which launch about three times as much."""
_LOW_BITS = re.compile(r"fp8|float8|e4m3|e5m2|fp4|float4", re.IGNORECASE)


class TransferError(msgspec.Struct, frozen=True):
    """Why no figure can be given for this GPU."""

    reason: str


def refusal(source: Gpu, target: Gpu, precision: str | None) -> TransferError | None:
    """Return why times on ``source`` say nothing of ``target``; None where they do.

    ``precision`` is what the run computes in, in words. Peak rates of two vendors, or of two number formats, are
    reached to shares too different for one to be told from the other.
    """
    if source.name == target.name:
        return None
    if source.vendor != target.vendor:
        return TransferError(
            f"measured on {source.vendor}: peak rates do not carry over to {target.vendor}; probe it with --probe"
        )
    said = precision or ""
    if _LOW_BITS.search(said):
        return TransferError(
            "computed in fp8 or fp4, whose rates do not carry over between cards; probe it with --probe"
        )
    if "bf16" in said.lower() and (source.bf16_tflops is None) != (target.bf16_tflops is None):
        without = target if target.bf16_tflops is None else source
        return TransferError(f"the run is in bf16, which the {without.name} only emulates; probe it with --probe")
    return None


def precision_of(header: Header) -> str:
    """Return all that a header says of number formats, in words."""
    return " ".join(filter(None, (header.train.precision, header.model.dtype, header.model.quantization)))


def from_work(
    header: Header, target: Gpu, slots: float, micro_batches: float
) -> tuple[float, float, float] | TransferError:
    """Return (estimate, low, high) seconds of a step of ``micro_batches`` x ``slots`` on ``target``, from its work."""
    work = flops_per_slot(header)
    if work is None or not header.model.layers:
        return TransferError("the size of the model is not known")
    if target.vendor != "NVIDIA":
        return TransferError("no published fine-tunes to calibrate on for this vendor")
    low_share, share, high_share = PEAK_SHARE.get(header.train.method, PEAK_SHARE["full"])
    rate = target.matmul_tflops * 1e12

    def seconds(reached: float, floor: float) -> float:
        compute = work * slots / (rate * reached)
        return micro_batches * math.hypot(compute, floor * (header.model.layers or 1))

    floor_low, floor, floor_high = LAYER_FLOOR_S
    return seconds(share, floor), seconds(high_share, floor_low), seconds(low_share, floor_high)
