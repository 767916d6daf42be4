"""What a micro-batch computes and moves, told from the size of its model: FLOPs, bytes and launches."""

from __future__ import annotations

import msgspec

from ft_insight.records import Header

LAUNCH_S_PER_LAYER = 0.0047
"""Host seconds of a decoder layer's kernel launches, all passes: T5-base (24 layers) takes 0.100 to 0.129 s a step
whatever its batch."""
MIXTURE_LAUNCHES = 6.0
"""Times as many launches where a layer loops over its experts, each with three matmuls and their index operations."""
PACKED_BYTES, UNPACKED_BYTES = 0.5, 2.0
"""Bytes of a 4-bit weight as it is read, and as it is written for the matmul."""
STATEFUL = ("mamba", "rwkv", "xlstm")
"""In the names of models that carry a state along a row instead of attending to all of it."""
ADAM_BYTES = 16.0
"""Bytes that an optimizer step moves per trained parameter: gradient and weight read, weight written, in bf16, and
two moments, in and out."""


class Work(msgspec.Struct, frozen=True):
    """The work of one micro-batch, and of one optimizer step. 0 is none; None is not known."""

    flops: float | None
    """Of matrix products: all passes, as if nothing were masked; attention's own products are not counted."""
    weight_bytes: float
    """Of weights that every micro-batch reads, however few slots it holds."""
    dequantised_bytes: float
    """Read packed and written unpacked by dequantisation, all passes."""
    optimizer_bytes: float
    """Moved by one optimizer step."""
    launch_s: float | None
    """Host seconds of launching all kernels, roughly."""
    quantised: bool = False


def work_of(
    *,
    parameters: float,
    active: float | None = None,
    trainable: float | None = None,
    method: str = "full",
    recomputed: bool = False,
    quantised: bool | None = None,
    slots: float | None = None,
    layers: int | None = None,
    experts: int | None = None,
) -> Work:
    """Return the work of a micro-batch of ``slots`` positions (None: not known) through a model of this size.

    A parameter that a token passes through costs 2 FLOPs forward, 2 or (where all is trained) 4 backward, and 2
    more where gradient checkpointing recomputes. All experts' weights are read and unpacked, whichever tokens go
    where: with more than a few rows every expert gets some.
    """
    quantised = method == "qlora" if quantised is None else quantised
    readings = 3 if recomputed else 2
    trained = trainable if trainable is not None else (parameters if method == "full" else 0.0)
    per_slot = flops_per_parameter(method, recomputed=recomputed) * (active or parameters)
    launches = MIXTURE_LAUNCHES if experts else 1.0
    return Work(
        flops=None if slots is None else per_slot * slots,
        weight_bytes=UNPACKED_BYTES * parameters * readings,
        dequantised_bytes=(PACKED_BYTES + UNPACKED_BYTES) * parameters * readings if quantised else 0.0,
        optimizer_bytes=ADAM_BYTES * trained,
        launch_s=None if layers is None else LAUNCH_S_PER_LAYER * layers * launches,
        quantised=quantised,
    )


def flops_per_parameter(method: str, *, recomputed: bool) -> int:
    """Return the FLOPs of one training step per slot and active parameter."""
    return (6 if method == "full" else 4) + (2 if recomputed else 0)


def flops_per_slot(header: Header) -> float | None:
    """Return the FLOPs of a training step per slot; None where the size of the model is not known."""
    active = header.model.active_parameters or header.model.parameters
    if not active:
        return None
    return float(flops_per_parameter(header.train.method, recomputed=_recomputes(header)) * active)


def attention_share(header: Header, length: float, layers: int | None = None) -> float:
    """Return attention's own products in FLOPs for each FLOP of matrix products with weights, rows ``length`` long.

    Scores and their sums over values are ``2 L d`` FLOPs each per slot and layer, as if nothing were masked; backward
    does both twice, recomputation once more. ``layers`` is how many attend, all of them unless told. 0 where the
    model's shape is not known, or its kind has a state instead.
    """
    model = header.model
    layers = model.layers if layers is None else layers
    per_slot = flops_per_slot(header)
    if not per_slot or not layers or not model.hidden or any(word in (model.kind or "") for word in STATEFUL):
        return 0.0
    passes = 4 if _recomputes(header) else 3
    return passes * 4.0 * length * model.hidden * layers / per_slot


def header_work(header: Header, slots: float | None, density: float | None = None) -> Work | None:
    """Return the work of a micro-batch of the run that ``header`` describes; None without the model's size.

    ``density`` is the share of the experts that a token passes through, where that is another than in the run.
    """
    model = header.model
    if not model.parameters:
        return None
    active = model.active_parameters
    if density is not None and active and model.expert_parameters and model.experts and model.experts_per_token:
        active += round((density - model.experts_per_token / model.experts) * model.expert_parameters)
    return work_of(
        parameters=model.parameters,
        active=active,
        trainable=model.trainable_parameters,
        method=header.train.method,
        recomputed=_recomputes(header),
        slots=slots,
        layers=model.layers,
        experts=model.experts,
    )


def _recomputes(header: Header) -> bool:
    return header.train.gradient_checkpointing not in (None, "none")
