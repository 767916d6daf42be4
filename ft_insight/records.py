"""What a run log can say: one Struct per kind of line, one integer schema.

A log is strict JSON, one object a line, UTF-8, ``type`` first. Rules that every record keeps:

* An absent field and ``null`` both mean *unmeasured*; ``0`` means measured as zero.
* NaN and infinity become ``null``, and the field's name is listed in ``nonfinite``.
* ``t_s`` and ``*_s`` are seconds. Times of day are seconds on the monotonic clock since the segment's header,
  whose ``wall_time_s`` is the only wall-clock anchor.
* Facts that do not change during a run stand once, in the header.
* Records hold no references to one another, so that Python's collector need not know of them (``gc=False``).
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

OUTSIDE_KINDS = ("startup", "baseline", "evaluation", "saving", "logging", "callbacks", "between")
"""What happens outside of optimizer steps. ``baseline`` is a pass over rows of the user's before or after the run;
``between`` is the remainder: epoch turns, dataloader start-up."""


class Base(msgspec.Struct, frozen=True, gc=False, tag_field="type", omit_defaults=True, kw_only=True):
    """Common ground of all records; ``type`` is the tag that comes first on the line."""


class ModelFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
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


class TrainFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
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
    loader_workers: int | None = None
    """Processes that load data while the device computes; 0: the training process loads it, between micro-batches."""
    max_length: int | None = None
    max_steps: int | None = None
    """Optimizer steps at which this run ends."""
    epochs: float | None = None
    """``num_train_epochs`` as configured, also when ``max_steps`` cuts the run short."""
    eval_every_steps: float | None = None
    save_every_steps: float | None = None
    output_dir: str | None = None


class DatasetFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
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


class Device(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One device that this process computes on."""

    kind: str
    """``cuda``, ``cpu``, ``mps``, ``xpu`` ..."""
    name: str
    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    """PCI address, as ``0000:3b:00.0``."""
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
    purpose: str | None = None
    """``sweep`` or ``probe`` where these steps were done to measure: ``train`` then says what the job is set to do
    whose trainer was measured, at the batch that the rates are of. None for training itself."""


class MicroBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
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
    begin_s: float | None = None
    """When it began, by the clock of the step's phases, since the step began."""


class MicroMemory(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Memory of one micro-batch, in bytes. Written as an array, for there are many."""

    peak_bytes: int | None
    """Highest during it where ``exact``; else no less than that, for the allocator only tells the highest so far."""
    exact: bool
    seen_bytes: int | None
    """The most that was read during it, so no more than its peak."""


class Memory(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """Memory of this process at the end of a step, in bytes. Device figures are torch's allocator's."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    """Highest since the allocator's statistics were last reset, which ft-insight never does."""
    peak_reserved_bytes: int | None = None
    rss_bytes: int | None = None
    """Resident memory of the process on the host."""
    base_bytes: int | None = None
    """Allocated when the step's first micro-batch began."""
    micro: tuple[MicroMemory, ...] = ()
    """In step with the step's micro-batches; empty where none was measured."""
    optimizer_peak_bytes: int | None = None
    """Highest after the last micro-batch, where that was the highest so far."""


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
    optimizer_begin_s: float | None = None
    """When clipping and the optimizer began, by ``clock``, since the step did."""
    lag_s: float | None = None
    """Where ``clock`` is a device's: how far it was behind the host when the step began; the least that its marks
    allow."""
    before_s: Mapping[str, float] = {}
    """Host seconds between the step before and this one, by kind of ``OUTSIDE_KINDS``, but for what has a span
    record of its own."""
    micro: tuple[MicroBatch, ...] = ()
    epoch: float | None = None
    memory: Memory | None = None
    skipped: bool | None = None
    """The fp16 gradient scaler skipped the optimizer."""
    other_batch: int | None = None
    """In a sweep, the batch size of this step where it is not the header's: then it counts for the fits alone."""
    profiled: bool | None = None
    """A profiler recorded this step, or on a CPU memory was counted in it, and it took longer for it: it counts in no
    rate and no fit."""
    self_s: float | None = None
    """What ft-insight itself took of this step, by the host's clock."""


class Tried(Base, frozen=True, kw_only=True, tag="tried"):
    """A batch of the training set's longest rows that a sweep tried before it measured, for whether it fits."""

    t_s: float
    batch: int
    fits: bool
    slots: int | None = None
    """Positions of its micro-batch, padding included."""
    step_s: float | None = None
    peak_allocated_bytes: int | None = None
    """Highest since before this trial; None where it ran out of memory, or memory is the host's."""
    allocated_bytes: int | None = None
    """Between its steps."""


class Span(Base, frozen=True, kw_only=True, tag="span"):
    """An evaluation, a checkpoint being saved or a baseline pass, outside of optimizer steps."""

    kind: str
    t_s: float
    wall_s: float
    step: int


MEMORY_CATEGORIES = (
    "weights",
    "quantised_weights",
    "adapters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "logits_and_loss",
    "temporaries",
    "other",
)
"""What fills the memory of a training process. ``temporaries`` are what a moment holds beyond all that waits for
backward; ``other`` is the batch, and the remainder."""


class MemoryPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Bytes of one category of ``MEMORY_CATEGORIES``. Written as an array, for there are many."""

    category: str
    detail: str
    """Type of the numbers; of ``activations`` the kind of layer that made them."""
    bytes: int


class MemoryMoment(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What filled memory at one moment: parts that do not overlap and add up to ``allocated_bytes``."""

    name: str
    """``between`` steps, ``forward`` (all that backward waits for is there), ``backward`` (it is over; before the
    optimizer), ``peak`` of a micro-batch, or ``optimizer`` at its highest."""
    step: int
    allocated_bytes: int
    parts: tuple[MemoryPart, ...]
    slots: int | None = None
    """Of the micro-batch that it is a moment of."""


class MemoryParts(Base, frozen=True, kw_only=True, tag="memory_parts"):
    """What fills memory, by category: after the first step, on sampled steps, and when it has changed much."""

    step: int
    t_s: float
    method: str
    """``allocator``: the sums are torch's for the device, the parts counted; ``storages``: all is counted."""
    moments: tuple[MemoryMoment, ...]
    reserved_bytes: int | None = None
    """Between steps: what the allocator holds of the device."""
    split_bytes: int | None = None
    """Of the reserve: free pieces beside pieces in use, which only fit what is smaller."""
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None


class OutOfMemory(Base, frozen=True, kw_only=True, tag="out_of_memory"):
    """Memory ended: what filled it then, and which micro-batch it was too small for."""

    step: int
    """The step that failed; the one before was the last to be finished."""
    t_s: float
    phase: str
    """Of ``STEP_PHASES``, or of ``OUTSIDE_KINDS``."""
    message: str
    queries: int | None = None
    slots: int | None = None
    """Of the micro-batch that did not fit, padding included."""
    requested_bytes: int | None = None
    """What could not be had, as the message tells it."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None
    parts: tuple[MemoryPart, ...] = ()
    """What filled memory, as far as it could be counted; on a GPU they add up to ``allocated_bytes``."""
    largest: str | None = None
    """The largest category."""
    fits: tuple[int, int, int] | None = None
    """The largest batch of rows as long as these that would have fitted: estimate, low, high."""
    unknown: str | None = None
    """Why that cannot be said."""


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
    """``train``, ``evaluation``, or ``before`` or ``after``: one pass over the same rows before and after the run."""
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


POWER_THROTTLES = ("software power cap", "hardware power brake", "package power limit")
THERMAL_THROTTLES = (
    "software thermal slowdown",
    "hardware thermal slowdown",
    "processor hot",
    "socket too hot",
    "voltage regulator too hot",
    "memory too hot",
)
"""Of the words of ``GpuSample.throttle``, those that say that power, or heat, holds the clocks down."""


class GpuSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One reading of one GPU. Why a field is null stands in ``unknown``."""

    uuid: str
    """As CUDA names it; its PCI address where torch knows no UUID."""
    gpu_percent: float | None = None
    """Share of time in which *some* kernel ran, over a window that the driver does not tell (1/6 s to 1 s). It is
    not SM activity."""
    sm_percent: float | None = None
    """Share of cycles in which an SM had work, mean of all SMs, over ``window_s``. From ``counters``."""
    sm_occupancy_percent: float | None = None
    """Warps resident of the most that there can be, over ``window_s``."""
    tensor_percent: float | None = None
    """Share of cycles in which the tensor cores were busy, by whatever type, over ``window_s``."""
    hmma_percent: float | None = None
    """Of these, half precision (fp16, bf16, tf32); ``imma`` is integer, ``dfma`` and ``dmma`` double precision."""
    imma_percent: float | None = None
    dfma_percent: float | None = None
    dmma_percent: float | None = None
    memory_controller_percent: float | None = None
    """Share of time in which device memory was read or written at all, over the window of ``gpu_percent``."""
    dram_percent: float | None = None
    """Of the bandwidth of device memory, over ``window_s``."""
    counters: str | None = None
    """Where the fields over ``window_s`` come from: ``gpm`` (NVML, Hopper and newer) or ``dcgm``."""
    window_s: tuple[float, float] | None = None
    """Begin and end, on the log's clock, of the time over which they are means."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    process_memory_bytes: int | None = None
    power_w: float | None = None
    """On Ampere and newer the driver's mean over a second."""
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Since the driver was loaded: differences tell."""
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    """Why the clocks are not at their highest, in words; empty where nothing holds them down."""
    pcie_tx_bytes_per_s: float | None = None
    """Sent by the GPU; ``rx`` is what it received."""
    pcie_rx_bytes_per_s: float | None = None
    nvlink_tx_bytes_per_s: float | None = None
    """All links together."""
    nvlink_rx_bytes_per_s: float | None = None
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    xid: tuple[int, ...] | None = None
    """Critical errors that the driver reported since the sample before, by NVIDIA's Xid numbers."""
    lost: bool | None = None
    """The driver has lost this GPU: no sample of it follows."""
    unknown: Mapping[str, str] = {}
    """Field -> why it is null. Only what changed since the sample before; an empty reason: it is known again."""


class HostSample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What the training process takes of the host."""

    cpu_percent: float | None = None
    """CPU time over wall time since the sample before; 100 is one core, workers of a data loader left out."""
    rss_bytes: int | None = None


class Gpu(Base, frozen=True, kw_only=True, tag="gpu"):
    """All GPUs of this process at one moment, and the process itself."""

    t_s: float
    samples: tuple[GpuSample, ...] = ()
    host: HostSample | None = None
    dropped: int = 0
    """Readings that are missing since the record before because the driver did not answer in time."""


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


class PhaseFit(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """One phase of an optimizer step: ``seconds = fixed_s + per_slot_s * slots of the step``."""

    median_s: float
    fixed_s: float | None = None
    """The optimizer's and the host's own time; None where the run's steps are all alike."""
    per_slot_s: float | None = None


class Fit(Base, frozen=True, kw_only=True, tag="fit"):
    """The step-time model fitted at the end: ``seconds = (fixed_s^n + (per_slot_s * slots)^n)^(1/n)``.

    ``seconds`` is the compute time of one micro-batch of ``slots`` positions; ``rest_s`` is what an optimizer
    step takes besides its micro-batches. Intervals are 95%.
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
    phases: Mapping[str, PhaseFit] = {}
    """By name of ``STEP_PHASES``."""


class ProjectionRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The whole job on one kind of GPU. Triples are (estimate, low, high); a measured figure has low = high."""

    gpu: str
    here: bool = False
    gpus: int | None = None
    """How many of them."""
    memory_gb: float | None = None
    batch: int | None = None
    """Queries of a micro-batch that the figures are of."""
    accumulation: float | None = None
    global_batch: float | None = None
    """Queries of an optimizer step, over all GPUs; the run's own unless the card's memory alone had set that."""
    largest_batch: int | None = None
    """Queries per micro-batch, all as long as the longest row that the data set can produce."""
    largest_interval: tuple[int, int] | None = None
    typical_batch: tuple[int, int, int] | None = None
    """The same of rows drawn from the data set: estimate, low, high."""
    longest: int | None = None
    """Slots of that longest row."""
    memory_use_bytes: int | None = None
    """Of the card's memory at ``largest_batch``, the CUDA context included."""
    memory_total_bytes: int | None = None
    memory_margin_bytes: int | None = None
    """Left free for what the allocator cannot use for lack of a contiguous piece."""
    queries_per_s: tuple[float, float, float] | None = None
    hours: tuple[float, float, float] | None = None
    usd: tuple[float, float, float] | None = None
    usd_per_hour: float | None = None
    price_source: str | None = None
    basis: str | None = None
    present_queries_per_s: tuple[float, float, float] | None = None
    """At the run's own batch and accumulation."""
    bound_by: str | None = None
    """``memory capacity``, ``matmul``, ``memory bandwidth``, ``host``, ``data`` or ``communication``."""
    marks: tuple[str, ...] = ()
    """``cheapest``, ``fastest``, ``best value`` (least dollars times hours) of all rows."""
    unknown: Mapping[str, str] = {}
    """Field -> why it cannot be known from this run."""


class Projection(Base, frozen=True, kw_only=True, tag="projection"):
    """What the whole job takes and costs, here and elsewhere."""

    t_s: float
    queries: int | None = None
    epochs: float | None = None
    job: str | None = None
    prices: str | None = None
    """Where the prices come from that nobody gave, with their dates."""
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


class KernelRole(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
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


class KernelName(msgspec.Struct, frozen=True, gc=False, array_like=True):
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


Record = (
    Header
    | Tried
    | Step
    | Span
    | Logs
    | Experts
    | Layers
    | Kernels
    | Gpu
    | MemoryParts
    | OutOfMemory
    | Notice
    | Heartbeat
    | Fit
    | Projection
    | End
)
"""Every line of a log is one of these."""


def finite(values: Mapping[str, float]) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Make numbers safe for strict JSON: the values with NaN and infinity as None, and the names of those."""
    safe = {name: (value if math.isfinite(value) else None) for name, value in values.items()}
    return safe, tuple(name for name, value in safe.items() if value is None)
