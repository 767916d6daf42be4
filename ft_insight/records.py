"""What a run log can say: one Struct per kind of line, one integer schema.

A log is strict JSON, one object a line, UTF-8, ``type`` first. Rules that every record keeps:

* An absent field and ``null`` both mean *unmeasured*; ``0`` means measured as zero.
* NaN and infinity become ``null``, and the field's name is listed in ``nonfinite``.
* ``t_s`` and ``*_s`` are seconds. Times of day are seconds on the monotonic clock since the segment's header,
  whose ``wall_time_s`` is the only wall-clock anchor.
* Facts that do not change during a run stand once, in the header.
* Readers ignore unknown fields and skip (and count) unknown types; an older schema is read, a newer one is
  refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

SCHEMA = 1
"""Version of this vocabulary. Raised only when an old reader would misunderstand a new log."""

STEP_PHASES = ("data_wait", "forward", "loss", "recompute", "backward", "clip", "optimizer", "callbacks", "other")
"""The step ledger's buckets, in the order in which a step passes through them.

``data_wait`` is fetching, collating and moving to the device; ``loss`` is what lies between the model's forward
and backward; ``recompute`` is what gradient checkpointing computes anew within backward; ``callbacks`` are all
callbacks of the trainer, this one included; ``other`` is the remainder.
"""

OUTSIDE_KINDS = ("startup", "evaluation", "saving", "logging", "callbacks", "between")
"""What happens outside of optimizer steps. ``between`` is the remainder: epoch turns, dataloader start-up."""


class Base(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True, kw_only=True):
    """Common ground of all records; ``type`` is the tag that comes first on the line."""


class ModelFacts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The shape of the model being trained. Parameter counts are of logical parameters, not of packed bytes."""

    name: str
    kind: str | None = None
    parameters: int | None = None
    trainable_parameters: int | None = None
    active_parameters: int | None = None
    """Parameters that one token passes through: all of them but the experts that its router leaves out."""
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    expert_parameters: int | None = None


class TrainFacts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the trainer was set to do."""

    trainer: str
    method: str
    """``full``, ``lora`` or ``qlora``."""
    lora_rank: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    batch: int | None = None
    """Queries per device and micro-batch, as really used (after ``auto_find_batch_size``)."""
    accumulation: int | None = None
    gradient_checkpointing: str | None = None
    """``none``, ``non-reentrant`` or ``reentrant``."""
    compiled: bool | None = None
    packing: str | None = None
    padding_free: bool | None = None
    max_length: int | None = None
    max_steps: int | None = None
    """Optimizer steps at which this run ends."""
    epochs: float | None = None
    """``num_train_epochs`` as configured, also when ``max_steps`` cuts the run short."""
    eval_every_steps: float | None = None
    save_every_steps: float | None = None
    output_dir: str | None = None


class DatasetFacts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The training set. Lengths are in tokens after truncation, one entry per query, sorted into bins."""

    queries: int | None = None
    query_unit: str = "row"
    """``row`` (of the training set), ``chunk`` (wrapped packing hides rows) or ``piece`` (long rows were split)."""
    length_values: tuple[int, ...] | None = None
    """Upper edge of each length bin, ascending, in tokens."""
    length_counts: tuple[int, ...] | None = None
    longest: int | None = None
    lengths_from: str | None = None
    """``all rows``, or ``a sample of N rows``."""


class Device(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One device that this process computes on."""

    kind: str
    """``cuda``, ``cpu``, ``mps``, ``xpu`` ..."""
    name: str
    index: int | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    sm_count: int | None = None
    capability: str | None = None
    threads: int | None = None


class Header(Base, frozen=True, kw_only=True, tag="header"):
    """First line of every segment: all that stays true until the next header."""

    schema: int
    run_id: str
    segment: int
    """0 for a fresh run; one more after each resume, and after each retry of ``auto_find_batch_size``."""
    wall_time_s: float
    """Seconds since the epoch at ``t_s`` = 0."""
    started_at: str
    """Local time with offset, ISO 8601, for people."""
    rank: int = 0
    world_size: int = 1
    host: str | None = None
    pid: int | None = None
    first_step: int = 0
    """``global_step`` at which this segment starts: 0, or the checkpoint's."""
    model: ModelFacts
    train: TrainFacts
    dataset: DatasetFacts
    devices: tuple[Device, ...] = ()
    versions: Mapping[str, str] = {}
    data_parallel_size: int | None = None
    """How many ranks see different data; fewer than ``world_size`` under tensor or context parallelism."""
    price_usd_per_hour: float | None = None
    """Price of the machine that this run is on, as its user stated it."""


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """One micro-batch: its shape and its time. Written as an array, for there are many."""

    queries: int | None
    slots: int | None
    """Positions computed, padding included."""
    real_tokens: int | None
    """Positions that are not padding."""
    loss_tokens: int | None
    """Terms of the cross-entropy sum: labels other than -100 after the shift by one."""
    compute_s: float | None
    """Forward, loss, recomputation and backward together."""


class Memory(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Memory of this process at the end of a step, in bytes. Device figures are torch's allocator's."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    """Highest since the allocator's statistics were last reset, which ft-insight never does."""
    peak_reserved_bytes: int | None = None
    rss_bytes: int | None = None
    """Resident memory of the process on the host."""


class Step(Base, frozen=True, kw_only=True, tag="step"):
    """One optimizer step, from its first request for data to the end of ``zero_grad``."""

    step: int
    """``global_step`` after this step; the first step is 1."""
    t_s: float
    """When it began."""
    wall_s: float
    """How long it took by the host's clock."""
    phases_s: Mapping[str, float]
    """Seconds per phase of ``STEP_PHASES``, by ``clock``; they add up to the wall time."""
    clock: str = "host"
    """``host``, or ``cuda`` where the phases are distances between events on the device's timeline."""
    host_phases_s: Mapping[str, float] | None = None
    """Where ``clock`` is a device's: the same phases by the host's clock."""
    idle_at_most_s: float | None = None
    """Where ``clock`` is a device's: an upper bound of the time in which it had nothing to do."""
    before_s: Mapping[str, float] = {}
    """Host seconds between the step before and this one, by kind of ``OUTSIDE_KINDS``, but for what has a span
    record of its own."""
    micro: tuple[MicroBatch, ...] = ()
    epoch: float | None = None
    memory: Memory | None = None
    skipped: bool | None = None
    """The fp16 gradient scaler skipped the optimizer."""
    profiled: bool | None = None
    """A profiler recorded this step, which took longer for it: it counts in no rate and no fit."""
    self_s: float | None = None
    """What ft-insight itself took of this step, by the host's clock."""


class Span(Base, frozen=True, kw_only=True, tag="span"):
    """An evaluation or a checkpoint being saved, outside of optimizer steps."""

    kind: str
    t_s: float
    wall_s: float
    step: int


class Logs(Base, frozen=True, kw_only=True, tag="logs"):
    """What the trainer logged: loss, grad_norm, learning_rate, eval_loss ... under its own names."""

    step: int
    t_s: float
    epoch: float | None = None
    values: Mapping[str, float | None]
    nonfinite: tuple[str, ...] = ()
    texts: Mapping[str, str] = {}


class Experts(Base, frozen=True, kw_only=True, tag="experts"):
    """Tokens per expert since the last such record, padding and recomputation excluded."""

    step: int
    t_s: float
    mode: str
    """``train`` or ``evaluation``."""
    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """``counts[i][e]``: token-expert assignments that layer ``i`` sent to expert ``e``."""
    tokens: tuple[int, ...]
    """``tokens[i]``: tokens that layer ``i`` routed."""
    method: str = "exact"
    padding_counted: bool = False
    """True where a mask was not to be had, so that padding could not be told from tokens."""
    queries: int | None = None


class Layers(Base, frozen=True, kw_only=True, tag="layers"):
    """Time per layer and kind of layer in one sampled step, summed over its timed micro-batches.

    The columns run in parallel. A part's own time is meant: a layer's leaves out its attention, a mixture's its
    router and experts; so the rows add up to the time of model and loss.
    """

    step: int
    t_s: float
    clock: str
    micro_batches: int
    layers: tuple[int | None, ...]
    """Index of the decoder layer; None for what is outside of them."""
    kinds: tuple[str, ...]
    """embedding, input_norm, attention, post_attention_norm, moe, router, experts, shared_expert, mlp, mamba, layer
    (what is left of it), final_norm, head, head_and_loss, around."""
    forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class GpuSample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One NVML reading of one GPU."""

    uuid: str
    gpu_percent: float | None = None
    """NVML utilisation: share of time in which *some* kernel ran. It is not SM activity."""
    sm_percent: float | None = None
    """SM active cycles from GPM counters, Hopper and newer."""
    memory_controller_percent: float | None = None
    dram_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    process_memory_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None


class Gpu(Base, frozen=True, kw_only=True, tag="gpu"):
    """All GPUs of this process at one moment."""

    t_s: float
    samples: tuple[GpuSample, ...]
    dropped: int = 0


class Notice(Base, frozen=True, kw_only=True, tag="notice"):
    """Something the reader should know: a collector that is off and why, a figure that cannot be had."""

    t_s: float
    collector: str
    text: str
    off: bool = False
    """True where the collector stops for the rest of the run."""


class Heartbeat(Base, frozen=True, kw_only=True, tag="heartbeat"):
    """Written when nothing else was for a while, so that a silent writer can be told from a slow step."""

    t_s: float


class Fit(Base, frozen=True, kw_only=True, tag="fit"):
    """The step-time model fitted at the end: ``seconds = (fixed_s^n + (per_slot_s * slots)^n)^(1/n)``.

    ``seconds`` is the compute time of one micro-batch of ``slots`` positions; ``rest_s`` is what an optimizer
    step takes besides its micro-batches. Intervals are 80%.
    """

    t_s: float
    identifiable: bool
    reason: str | None = None
    exponent: float | None = None
    fixed_s: float | None = None
    per_slot_s: float | None = None
    rest_s: float | None = None
    fixed_interval_s: tuple[float, float] | None = None
    per_slot_interval_s: tuple[float, float] | None = None
    slots_range: tuple[int, int] | None = None
    points: int = 0
    error: float | None = None
    """Median absolute relative error of a micro-batch, left out of the fit."""


class ProjectionRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The whole job on one GPU. Triples are (estimate, low, high); a measured figure has low = high."""

    gpu: str
    here: bool = False
    memory_gb: float | None = None
    largest_batch: int | None = None
    queries_per_s: tuple[float, float, float] | None = None
    hours: tuple[float, float, float] | None = None
    usd: tuple[float, float, float] | None = None
    usd_per_hour: float | None = None
    price_source: str | None = None
    basis: str | None = None
    unknown: Mapping[str, str] = {}
    """Field -> why it cannot be known from this run."""


class Projection(Base, frozen=True, kw_only=True, tag="projection"):
    """What the whole job takes and costs, here and elsewhere."""

    t_s: float
    queries: int | None = None
    epochs: float | None = None
    job: str | None = None
    rows: tuple[ProjectionRow, ...] = ()


class End(Base, frozen=True, kw_only=True, tag="end"):
    """Last line of a segment that ended in an orderly way."""

    t_s: float
    status: str
    """``completed``, ``failed``, ``interrupted`` or ``retried``."""
    step: int
    reason: str | None = None
    before_s: Mapping[str, float] = {}
    """As in ``Step``: what came after the last step."""


class KernelRole(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All operators or kernels of one role, in one kind of part and one pass."""

    kind: str
    """Kind of the part of the model that launched them, ``model`` for what is between parts, ``outside`` of it."""
    role: str
    """What they do there: ``matmul_w1_w3``, ``dequantise``, ``attention`` ..."""
    pass_name: str
    """``forward``, ``recompute``, ``backward``, ``optimizer`` or ``outside``."""
    seconds: float
    share: float
    """Of the time of all roles."""
    calls: int
    flops: float | None = None
    """From shapes: matrix products, convolutions and attention only, the latter as if nothing were masked."""
    bytes: float | None = None
    """From shapes: each operand once, the least that must move. None where shapes do not tell, as in gathering."""
    theoretical_occupancy_percent: float | None = None
    """Computed from launch shape and card, weighted by time. It is not measured, whatever the trace calls it."""
    blocks_per_sm: float | None = None
    sm_percent: float | None = None
    """Measured by Nsight Compute, weighted by time, as in the paper's Fig. 9."""
    memory_percent: float | None = None
    """Measured by Nsight Compute, weighted by time: the busiest part of the memory system, caches included."""
    dram_percent: float | None = None
    """Measured by Nsight Compute, weighted by time, as in the paper's Fig. 10."""
    ncu_coverage: float | None = None
    """Share of this role's time whose kernels are in Nsight Compute's report."""
    flops_share: float | None = None
    """Of what the card could have computed in that time, by its published peak."""
    bandwidth_share: float | None = None


class KernelName(msgspec.Struct, frozen=True, array_like=True):
    """One kernel by its own name. Written as an array, for there are many."""

    name: str
    kind: str
    role: str
    pass_name: str
    seconds: float
    calls: int
    grid: str | None = None
    """Blocks launched, as ``64x8x1``: one kernel serves several roles, with grids of different size."""


class Kernels(Base, frozen=True, kw_only=True, tag="kernels"):
    """One step by what it computes: every operator or kernel that a profiler saw, by role."""

    step: int
    t_s: float
    clock: str
    """``host``: times are of operators, without what they call. ``cuda``: of kernels on the device."""
    window_s: float
    busy_s: float
    """Of the window: operators running, or on a device at least one kernel."""
    idle_s: float | None = None
    """Of the window: no kernel running on the device."""
    roles: tuple[KernelRole, ...]
    names: tuple[KernelName, ...] = ()
    """Kernels of the device, longest first, by which Nsight Compute's figures are told by role."""
    trace: str | None = None
    """Name of the chrome trace beside the log, where it was asked for."""


Record = Header | Step | Span | Logs | Experts | Layers | Kernels | Gpu | Notice | Heartbeat | Fit | Projection | End
"""Every line of a log is one of these."""


def finite(values: Mapping[str, float]) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Make numbers safe for strict JSON: the values with NaN and infinity as None, and the names of those."""
    safe = {name: (value if math.isfinite(value) else None) for name, value in values.items()}
    return safe, tuple(name for name, value in safe.items() if value is None)
