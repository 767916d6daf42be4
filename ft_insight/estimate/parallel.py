"""Data-parallel training: batch and accumulation that keep the global batch, and the time gradients take on the way."""

from __future__ import annotations

import math

import msgspec

from ft_insight.catalog import Gpu
from ft_insight.estimate.measured import Measured
from ft_insight.records import Header

LINK_SHARE = 0.8
"""Of a link's published rate that an all-reduce of large buckets reaches."""
BUCKET_BYTES = 25 * (1 << 20)
"""DDP's ``bucket_cap_mb``: the last bucket is sent when backward is over, with nothing left to hide behind."""
BACKWARD_SHARE = 0.5
"""Of a micro-batch, at least: what the other buckets can hide behind."""
MOST_GPUS = 8
"""GPUs of one machine; what joins machines is in no catalogue."""


class Setting(msgspec.Struct, frozen=True):
    """How a job runs: ``gpus`` ranks of ``accumulation`` micro-batches of ``batch`` queries a step."""

    gpus: int
    ranks: int
    batch: int
    accumulation: float

    @property
    def global_batch(self) -> float:
        """Queries of one optimizer step."""
        return self.batch * self.accumulation * self.ranks


def setting_for(measured: Measured, gpus: int, largest: int | None, batch: int | None) -> Setting | None:
    """Return how the run's job runs on ``gpus`` GPUs that hold ``largest`` queries each; None if its batch is unknown.

    The global batch stays: accumulation makes up for what a card does not hold, and shrinks where it holds more. Only
    a run that did not accumulate is taken to run at what fits, for its batch was the card's and nobody's choice; then
    the global batch grows. ``batch`` is what the user asks for instead of what fits.
    """
    now = measured.batch
    if not now:
        return None
    ranks = ranks_of(measured, gpus)
    accumulation = measured.accumulation
    wanted = now * accumulation * measured.ranks
    most = batch or largest or now
    if batch is None and accumulation <= 1 and most >= now:
        return Setting(gpus, ranks, most, accumulation)
    if most == now and ranks == measured.ranks:
        return Setting(gpus, ranks, now, accumulation)
    share = wanted / ranks
    times = max(1, math.ceil(share / most - 1e-9)) if batch is None else max(1, round(share / most))
    return Setting(gpus, ranks, batch or max(1, math.ceil(share / times - 1e-9)), float(times))


def present_setting(measured: Measured, gpus: int) -> Setting | None:
    """Return the run's own batch and accumulation on ``gpus`` GPUs."""
    if not measured.batch:
        return None
    return Setting(gpus, ranks_of(measured, gpus), measured.batch, measured.accumulation)


def ranks_of(measured: Measured, gpus: int) -> int:
    """Return the ranks with data of their own on ``gpus`` GPUs."""
    return measured.ranks if gpus == measured.gpu_count else gpus


def refuse_count(measured: Measured, gpus: int) -> str | None:
    """Return why the run does not tell what ``gpus`` GPUs take; None if it does."""
    header = measured.view.header
    if header is None or gpus == measured.gpu_count:
        return None
    if gpus > MOST_GPUS:
        return f"more than {MOST_GPUS} GPUs: what joins machines is not in the catalogue"
    if len(header.devices) > 1 or measured.ranks != header.world_size:
        return "the run splits its model over GPUs: other numbers of them cannot be told"
    if gradient_bytes(header) is None:
        return "the number of trainable parameters is not known, and so not what GPUs send each other"
    return None


def gradient_bytes(header: Header) -> float | None:
    """Return the bytes of all gradients: of adapters in fp32, as PEFT keeps them, else of the model's own type."""
    trainable = header.model.trainable_parameters
    if trainable is None:
        trainable = header.model.parameters if header.train.method == "full" else None
    if trainable is None:
        return None
    half = header.train.method == "full" and any(x in (header.model.dtype or "") for x in ("bfloat16", "float16"))
    return trainable * (2.0 if half else 4.0)


def exposed_s(header: Header, gpu: Gpu, ranks: int, micro_s: float) -> float:
    """Return the seconds that a step waits for gradients: a ring all-reduce, less what hides behind backward.

    Each GPU sends ``2 (n - 1) / n`` times the gradients. Buckets are sent while backward computes the next ones.
    """
    size = gradient_bytes(header)
    if ranks < 2 or not size:
        return 0.0
    whole = 2 * (ranks - 1) / ranks * size / (gpu.link_gbs * 1e9 * LINK_SHARE)
    last = whole * min(1.0, BUCKET_BYTES / size)
    return max(last, whole - BACKWARD_SHARE * micro_s)
