"""``RunView``: every figure of a run that a reader shows, as one frozen snapshot."""

from __future__ import annotations

import msgspec

from ft_insight import records as r
from ft_insight.experts import LayerLoad, LoadChange, ModelLoad
from ft_insight.gpu_phases import PhaseUse
from ft_insight.layer_times import LayerTime
from ft_insight.memory_points import MemoryView
from ft_insight.part_points import PartView

Points = tuple[tuple[float, float], ...]


class Share(msgspec.Struct, frozen=True):
    """A named part of a whole: seconds in all, and the fraction of the whole."""

    name: str
    seconds: float
    share: float


class Rates(msgspec.Struct, frozen=True):
    """Work per second of wall time; None where a count was not to be had."""

    queries_per_s: float | None = None
    real_tokens_per_s: float | None = None
    loss_tokens_per_s: float | None = None
    slots_per_s: float | None = None


class Totals(msgspec.Struct, frozen=True):
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


class GpuView(msgspec.Struct, frozen=True):
    """One GPU: its latest sample, and what it did over time (x in seconds of the segment)."""

    latest: r.GpuSample
    """Its ``unknown`` is of all fields that are not known."""
    curves: dict[str, Points] = msgspec.field(default_factory=dict)
    """By field of the sample, those that were ever known."""
    throttles: dict[str, float] = msgspec.field(default_factory=dict)
    """What held the clocks down, by the share of samples."""
    power_throttled: float | None = None
    """Share of samples in which power held the clocks down; None where the driver does not tell."""
    thermal_throttled: float | None = None
    xids: tuple[tuple[float, int], ...] = ()
    """The latest critical errors: when, and NVIDIA's number."""
    ecc_corrected: float | None = None
    """Memory errors since the first sample."""
    ecc_uncorrected: float | None = None
    energy_j: float | None = None
    """Since the first sample."""
    lost_at_s: float | None = None
    phases: tuple[PhaseUse, ...] = ()
    phases_unknown: str | None = None
    """Why nothing is known by phase."""

    def curve(self, name: str) -> Points:
        """Return a field over time; nothing where it was never known."""
        return self.curves.get(name, ())


class HostView(msgspec.Struct, frozen=True):
    """The training process on its host: its latest sample, and what it took over time."""

    latest: r.HostSample
    cpu_percent: Points = ()
    rss_bytes: Points = ()


class RunView(msgspec.Struct, frozen=True):
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
    curves: dict[str, Points] = msgspec.field(default_factory=dict)
    """By step: queries_per_s, real_tokens_per_s, step_s, and all that the trainer logged."""
    latest_logs: dict[str, float | None] = msgspec.field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    memory: r.Memory | None = None
    gpus: tuple[GpuView, ...] = ()
    gpu_dropped: int = 0
    """Readings of GPUs that are missing because a driver did not answer in time."""
    host: HostView | None = None
    experts: tuple[LayerLoad, ...] = ()
    expert_load: ModelLoad | None = None
    """All layers together, over the segment."""
    experts_start: tuple[LayerLoad, ...] = ()
    """Load at the start: the first ``EDGE`` of the run's steps, at least one flush of counts."""
    experts_end: tuple[LayerLoad, ...] = ()
    """Load of the latest ``EDGE`` of the run's steps."""
    load_start: ModelLoad | None = None
    load_end: ModelLoad | None = None
    experts_before: tuple[LayerLoad, ...] = ()
    """Load in a pass over rows of the user's before the first step; of an earlier segment in a resumed run."""
    experts_after: tuple[LayerLoad, ...] = ()
    """Load in a pass over those rows after the last step."""
    load_before: ModelLoad | None = None
    load_after: ModelLoad | None = None
    rows_before: int | None = None
    rows_after: int | None = None
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
    parts: PartView = msgspec.field(default_factory=PartView)
    """What phases and experts took, step by step, against slots."""
    rest_s: tuple[float, ...] = ()
    """What sampled steps took besides their micro-batches."""
    accumulation: float | None = None
    """Mean number of micro-batches in a step."""
    mean_evaluation_s: float | None = None
    mean_save_s: float | None = None
    filling: MemoryView = msgspec.field(default_factory=MemoryView)
    """What fills memory, and how its peak goes with the slots of a micro-batch."""
    self_share: float | None = None
    """What ft-insight itself took, as a fraction of the steps' wall time."""
    skipped_steps: int = 0
    fit: r.Fit | None = None
    projection: r.Projection | None = None
    unknown_lines: int = 0
    malformed_lines: int = 0

    @property
    def load_change(self) -> LoadChange | None:
        """What the run did to the load of the experts: on the same rows where they were shown before and after it."""
        if self.same_rows:
            return LoadChange(
                self.experts_before, self.experts_after, self.load_before, self.load_after, self.rows_after
            )
        if self.experts_start:
            return LoadChange(self.experts_start, self.experts_end, self.load_start, self.load_end)
        return None

    @property
    def same_rows(self) -> bool:
        """There were passes before and after the run, and over the same rows, as far as their tokens tell."""
        before, after = ({load.layer: load.tokens for load in x} for x in (self.experts_before, self.experts_after))
        return bool(before) and before == after and self.rows_before == self.rows_after

    @property
    def micro_batches(self) -> float:
        """Micro-batches that the totals hold, of all ranks that saw different data."""
        return (self.accumulation or 1.0) * self.totals.steps * self.data_ranks

    @property
    def title(self) -> str:
        """Short name of the run: its model and method."""
        if self.header is None:
            return "waiting for a run"
        train = self.header.train
        method = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}.get(train.method, train.method)
        rank = f" r{train.lora_rank}" if train.lora_rank else ""
        purpose = f" {self.header.purpose}" if self.header.purpose else ""
        return f"{self.header.model.name} {method}{rank}{purpose}"

    @property
    def device(self) -> str:
        """The devices that all ranks computed on, in words: ``2x NVIDIA A40``."""
        if self.header is None or not self.header.devices:
            return "unknown device"
        names = [d.name for d in self.header.devices]
        count = len(names) * max(self.ranks, self.header.world_size)
        kinds = sorted(set(names))
        return f"{count}x {kinds[0]}" if count > 1 and len(kinds) == 1 else ", ".join(kinds)
