"""From the device of a run to another GPU: how much longer or shorter the same step takes, and how sure that is.

Two rules, each calibrated on published fine-tuning throughputs (the paper's artifact stsxxx/finetune, ljm565's
gpu_test, transformers issues 14608 and 15026):

* from a GPU: step time goes with ``(matmul rate x bandwidth)^-0.3``. On 168 pairs of the same work on two GPUs the
  truth lay within a factor of 0.73 to 1.37 of it for 80%. A smaller exponent than a roofline would give, since the
  host's share of a step does not scale with the card.
* from a CPU, whose speed says nothing of a GPU: the work in FLOPs over the share of the peak rate that fine-tunes
  reach (139 runs), and not less than what launching a decoder layer's kernels takes the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ft_insight.catalog import Gpu
from ft_insight.records import Header

EXPONENT = 0.3
GPU_INTERVAL = (0.73, 1.37)

PEAK_SHARE = {"full": (0.023, 0.044, 0.20), "lora": (0.079, 0.126, 0.22), "qlora": (0.025, 0.051, 0.11)}
"""Share of the peak matmul rate that fine-tunes reach, by method: 10%, 50% and 90% of the published runs."""
LAYER_FLOOR_S = (0.0042, 0.0047, 0.014)
"""Seconds of a whole step per decoder layer when the host limits it: T5-base (24 layers) takes 0.100 to 0.129 s
whatever its batch. The upper end is for mixtures of experts and recomputation, which launch about three times as
much."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor on time with its 80% interval, and what it rests on."""

    factor: float
    low: float
    high: float
    basis: str


@dataclass(frozen=True, slots=True)
class TransferError:
    """Why no figure can be given for this GPU."""

    reason: str


def between_gpus(source: Gpu, target: Gpu) -> Scale | TransferError:
    """Return the factor from the time on ``source`` to the time on ``target``."""
    if source.name == target.name:
        return Scale(1.0, 1.0, 1.0, "measured")
    if source.vendor != target.vendor:
        return TransferError(f"measured on {source.vendor}: peak rates do not carry over to {target.vendor}")
    gain = target.matmul_tflops / source.matmul_tflops * target.bandwidth_gbs / source.bandwidth_gbs
    factor = gain**-EXPONENT
    return Scale(factor, factor * GPU_INTERVAL[0], factor * GPU_INTERVAL[1], f"scaled from {source.name}")


def flops_per_slot(header: Header) -> float | None:
    """FLOPs of a training step per slot: 2 forward, 2 or (full) 4 backward, 2 recomputed, per active parameter."""
    active = header.model.active_parameters or header.model.parameters
    if not active:
        return None
    passes = 6 if header.train.method == "full" else 4
    if header.train.gradient_checkpointing not in (None, "none"):
        passes += 2
    return float(passes * active)


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
