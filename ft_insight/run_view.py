"""``RunView``: every figure of a run that a reader shows, as one frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft_insight import records as r
from ft_insight.experts import LayerLoad, ModelLoad
from ft_insight.layer_times import LayerTime

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A named part of a whole: seconds in all, and the fraction of the whole."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Work per second of wall time; None where a count was not to be had."""

    queries_per_s: float | None = None
    real_tokens_per_s: float | None = None
    loss_tokens_per_s: float | None = None
    slots_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Work done in training steps so far, this segment."""

    steps: int = 0
    queries: int | None = None
    slots: int | None = None
    real_tokens: int | None = None
    loss_tokens: int | None = None

    @property
    def padding_share(self) -> float | None:
        """Fraction of the computed positions that were padding."""
        if not self.slots or self.real_tokens is None:
            return None
        return 1 - self.real_tokens / self.slots


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU: its latest sample, and what it did over time (x in seconds of the segment)."""

    latest: r.GpuSample
    gpu_percent: Points = ()
    sm_percent: Points = ()
    memory_used_bytes: Points = ()
    power_w: Points = ()


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that can be said of a run at one moment. Frozen; None is unmeasured.

    Totals, rates and phases are of the current segment; ``elapsed_s`` and ``usd_so_far`` are of all segments.
    """

    header: r.Header | None = None
    end: r.End | None = None
    segments: int = 0
    ranks: int = 1
    data_ranks: int = 1
    """Ranks whose work the totals and rates hold: those that saw different data."""
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    clock_s: float = 0.0
    """Time of the latest record, in seconds of the segment."""
    elapsed_s: float = 0.0
    to_go_s: float | None = None
    usd_so_far: float | None = None
    usd_at_end: float | None = None
    totals: Totals = Totals()
    rates: Rates = Rates()
    """From the second step on: the first warms up."""
    recent: Rates = Rates()
    step_s: float | None = None
    """Median wall time of the last ``RECENT_STEPS`` steps."""
    phase_clock: str = "host"
    idle_at_most: float | None = None
    """Upper bound of the fraction of the steps' time in which the device had nothing to do; None on a CPU."""
    phases: tuple[Share, ...] = ()
    recent_phases: tuple[Share, ...] = ()
    ledger_gap: float | None = None
    """(sum of all phases) / (sum of all steps' wall times) - 1."""
    outside: tuple[Share, ...] = ()
    """Time outside of steps, as a fraction of the elapsed time of the segment."""
    unaccounted_s: float | None = None
    """Elapsed time of the segment that is neither a step's nor a span's."""
    curves: dict[str, Points] = field(default_factory=dict)
    """By step: queries_per_s, real_tokens_per_s, step_s, and all that the trainer logged."""
    latest_logs: dict[str, float | None] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    memory: r.Memory | None = None
    gpus: tuple[GpuView, ...] = ()
    experts: tuple[LayerLoad, ...] = ()
    expert_load: ModelLoad | None = None
    """All layers together, over the segment."""
    experts_start: tuple[LayerLoad, ...] = ()
    """Load at the start: the first ``EDGE`` of the run's steps, at least one flush of counts."""
    experts_end: tuple[LayerLoad, ...] = ()
    """Load of the latest ``EDGE`` of the run's steps."""
    load_start: ModelLoad | None = None
    load_end: ModelLoad | None = None
    layers: tuple[LayerTime, ...] = ()
    """Mean time per layer and kind, per micro-batch, from the sampled steps."""
    kernels: r.Kernels | None = None
    """Operators and kernels of one step by role, where that was asked for."""
    layer_steps: int = 0
    """Steps that were sampled for it."""
    expert_method: str | None = None
    expert_padding_counted: bool = False
    notices: tuple[r.Notice, ...] = ()
    micro: tuple[r.MicroBatch, ...] = ()
    """An even sample of the segment's micro-batches, the first step's left out."""
    rest_s: tuple[float, ...] = ()
    """What sampled steps took besides their micro-batches."""
    accumulation: float | None = None
    """Mean number of micro-batches in a step."""
    mean_evaluation_s: float | None = None
    mean_save_s: float | None = None
    memory_points: tuple[tuple[int, int, int], ...] = ()
    """(most slots of a micro-batch so far, peak allocated bytes so far, bytes allocated between steps)."""
    self_share: float | None = None
    """What ft-insight itself took, as a fraction of the steps' wall time."""
    skipped_steps: int = 0
    fit: r.Fit | None = None
    projection: r.Projection | None = None
    unknown_lines: int = 0
    malformed_lines: int = 0

    @property
    def title(self) -> str:
        """Short name of the run: its model and method."""
        if self.header is None:
            return "waiting for a run"
        train = self.header.train
        method = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}.get(train.method, train.method)
        rank = f" r{train.lora_rank}" if train.lora_rank else ""
        return f"{self.header.model.name} {method}{rank}"

    @property
    def device(self) -> str:
        """The devices that all ranks computed on, in words: ``2x NVIDIA A40``."""
        if self.header is None or not self.header.devices:
            return "unknown device"
        names = [d.name for d in self.header.devices]
        count = len(names) * max(self.ranks, self.header.world_size)
        kinds = sorted(set(names))
        return f"{count}x {kinds[0]}" if count > 1 and len(kinds) == 1 else ", ".join(kinds)
