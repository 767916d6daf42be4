"""One run as its log tells it: ``RunState.apply(record)``, and ``RunView`` with every figure a reader shows.

A state folds the records of one rank's log, in constant memory; a view is a frozen snapshot of it. Reports,
dashboard and projections draw views and compute nothing of their own, so that they can never disagree.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ft_insight import records as r
from ft_insight.experts import ExpertTally, LayerLoad, ModelLoad, model_load
from ft_insight.layer_times import LayerTally, LayerTime
from ft_insight.stats import CurveBuilder, EvenSample, median

RECENT_STEPS = 20
LATEST_FLUSHES = 64
EDGE = 0.05
"""Share of a run's steps that its start, or its end, is taken to be where experts' load is compared."""
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


class RunState:
    """Folds the records of one log. ``apply`` returns a view; ``fold`` is for when only the last one matters."""

    def __init__(self) -> None:
        self._notices: dict[tuple[str, str], r.Notice] = {}
        self._earlier_s = 0.0
        self._clock_s = 0.0
        self._segments = 0
        self._curves: dict[str, CurveBuilder] = {}
        self._start_segment(None)

    def apply(self, record: r.Record) -> RunView:
        """Take one record in and return what is known then."""
        self.fold(record)
        return self.view()

    def replay(self, stream: Iterable[r.Record]) -> RunView:
        """Take many records in and return one view after the last."""
        for record in stream:
            self.fold(record)
        return self.view()

    def fold(self, record: r.Record) -> None:
        """Take one record in."""
        if isinstance(record, r.Header):
            self._on_header(record)
            return
        self._clock_s = max(self._clock_s, record.t_s + getattr(record, "wall_s", 0.0))
        handler = getattr(self, f"_on_{type(record).__name__.lower()}", None)
        if handler is not None:
            handler(record)

    # one handler per record

    def _on_header(self, header: r.Header) -> None:
        self._earlier_s += self._clock_s
        self._segments += 1
        if header.first_step == 0:
            self._curves.clear()  # a fresh start, or a retry: the steps before it count for nothing
        else:
            for curve in self._curves.values():
                curve.cut_after(header.first_step)
        self._start_segment(header)

    def _start_segment(self, header: r.Header | None) -> None:
        self._header = header
        self._end: r.End | None = None
        self._fit: r.Fit | None = None
        self._projection: r.Projection | None = None
        self._clock_s = 0.0
        self._step = header.first_step if header else 0
        self._epoch: float | None = None
        self._sums = _Sums()
        self._warm = _Sums()
        self._last: deque[r.Step] = deque(maxlen=RECENT_STEPS)
        self._spans: dict[str, float] = {}
        self._span_counts: dict[str, int] = {}
        self._logs: dict[str, float | None] = {}
        self._nonfinite: tuple[str, ...] = ()
        self._memory: r.Memory | None = None
        self._memory_points: dict[int, tuple[int, int, int]] = {}
        self._most_slots = 0
        self._gpus: dict[str, _GpuState] = {}
        self._experts = ExpertTally()
        self._experts_first = ExpertTally()
        self._experts_latest: deque[r.Experts] = deque(maxlen=LATEST_FLUSHES)
        self._layers = LayerTally()
        self._kernels: r.Kernels | None = None
        self._micro: EvenSample[r.MicroBatch] = EvenSample()
        self._rest: EvenSample[float] = EvenSample(512)
        self._phase_clock = "host"
        self._skipped = 0

    def _on_step(self, step: r.Step) -> None:
        self._step = step.step
        self._epoch = step.epoch if step.epoch is not None else self._epoch
        self._phase_clock = step.clock
        self._skipped += bool(step.skipped)
        self._note_outside(step.before_s)
        first = self._sums.steps == 0
        work = _work(step)
        self._sums.add(step, work)
        self._note_memory(step)
        if step.profiled:
            return
        self._last.append(step)
        if first:
            return
        self._warm.add(step, work)
        for micro in step.micro:
            self._micro.add(micro)
        compute = [m.compute_s for m in step.micro if m.compute_s is not None]
        if len(compute) == len(step.micro) and compute:
            self._rest.add(step.wall_s - sum(compute))
        if step.wall_s > 0:
            for name, count in (("queries_per_s", work[0]), ("real_tokens_per_s", work[2])):
                if count is not None:
                    self._curve(name).add(step.step, count / step.wall_s)
        self._curve("step_s").add(step.step, step.wall_s)

    def _note_memory(self, step: r.Step) -> None:
        if step.memory is None:
            return
        self._memory = step.memory
        slots = [m.slots for m in step.micro if m.slots is not None]
        peak, allocated = step.memory.peak_allocated_bytes, step.memory.allocated_bytes
        if slots and peak is not None and allocated is not None:
            self._most_slots = max(self._most_slots, *slots)
            # the optimizer's states appear during the first step: its peak says nothing of the later ones
            if self._sums.steps > 1:
                self._memory_points[self._most_slots] = (self._most_slots, peak, allocated)

    def _note_outside(self, parts: Mapping[str, float]) -> None:
        for kind, seconds in parts.items():
            self._spans[kind] = self._spans.get(kind, 0.0) + seconds

    def _on_span(self, span: r.Span) -> None:
        self._note_outside({span.kind: span.wall_s})
        self._span_counts[span.kind] = self._span_counts.get(span.kind, 0) + 1

    def _on_logs(self, logs: r.Logs) -> None:
        self._logs.update(logs.values)
        # an evaluation logs other names: what it does not speak of stays as it was
        kept = tuple(name for name in self._nonfinite if name not in logs.values)
        self._nonfinite = (*kept, *logs.nonfinite)
        for name, value in logs.values.items():
            self._curve(name).add(logs.step, value)

    def _on_experts(self, experts: r.Experts) -> None:
        self._experts.add(experts)
        if experts.mode != "train":
            return
        edge = self._edge()
        first = self._header.first_step if self._header else 0
        if not self._experts_latest or experts.step <= first + edge:
            self._experts_first.add(experts)
        self._experts_latest.append(experts)
        while len(self._experts_latest) > 1 and self._experts_latest[0].step <= experts.step - edge:
            self._experts_latest.popleft()
        load = model_load(ExpertTally.of([experts]).layers(), experts.queries)
        if load is not None:
            self._curve("expert_variance").add(experts.step, load.variance_n)

    def _edge(self) -> float:
        total = self._header.train.max_steps if self._header else None
        return max(1.0, (total or 20 * max(1, self._step)) * EDGE)

    def _on_layers(self, layers: r.Layers) -> None:
        self._layers.add(layers)

    def _on_kernels(self, kernels: r.Kernels) -> None:
        self._kernels = kernels

    def _on_gpu(self, gpu: r.Gpu) -> None:
        for sample in gpu.samples:
            self._gpus.setdefault(sample.uuid, _GpuState()).add(gpu.t_s, sample)

    def _on_notice(self, notice: r.Notice) -> None:
        self._notices.setdefault((notice.collector, notice.text), notice)

    def _on_fit(self, fit: r.Fit) -> None:
        self._fit = fit

    def _on_projection(self, projection: r.Projection) -> None:
        self._projection = projection

    def _on_end(self, end: r.End) -> None:
        self._end = end
        self._note_outside(end.before_s)

    def _curve(self, name: str) -> CurveBuilder:
        curve = self._curves.get(name)
        if curve is None:
            curve = self._curves[name] = CurveBuilder()
        return curve

    # the snapshot

    def view(self) -> RunView:
        """Return a snapshot of all that is known now."""
        header = self._header
        elapsed = self._earlier_s + self._clock_s
        total = header.train.max_steps if header else None
        to_go = self._to_go(total)
        price = header.price_usd_per_hour if header else None
        spent = elapsed / 3600 * price if price is not None else None
        at_end = spent + to_go / 3600 * price if spent is not None and price is not None and to_go is not None else None
        last = list(self._last)
        start, latest = self._experts_first, ExpertTally.of(self._experts_latest)
        return RunView(
            header=header,
            end=self._end,
            segments=self._segments,
            step=self._step,
            total_steps=total,
            epoch=self._epoch,
            clock_s=self._clock_s,
            elapsed_s=elapsed,
            to_go_s=to_go,
            usd_so_far=spent,
            usd_at_end=at_end,
            totals=self._sums.totals(),
            rates=_rates(self._warm if self._warm.steps else self._sums),
            recent=_rates(_Sums.of(last[1:] if self._sums.steps == len(last) and len(last) > 1 else last)),
            step_s=median(s.wall_s for s in last),
            phase_clock=self._phase_clock,
            phases=_shares(self._sums.phases, r.STEP_PHASES),
            recent_phases=_shares(_Sums.of(last).phases, r.STEP_PHASES),
            ledger_gap=self._sums.gap(),
            outside=_shares(self._spans, r.OUTSIDE_KINDS, whole=self._clock_s),
            unaccounted_s=self._clock_s - self._sums.wall_s - sum(self._spans.values()),
            curves={name: curve.points() for name, curve in self._curves.items()},
            latest_logs=dict(self._logs),
            nonfinite=self._nonfinite,
            memory=self._memory,
            gpus=tuple(gpu.view() for gpu in self._gpus.values()),
            experts=self._experts.layers(),
            expert_load=model_load(self._experts.layers(), self._experts.queries),
            experts_start=start.layers(),
            experts_end=latest.layers(),
            load_start=model_load(start.layers(), start.queries),
            load_end=model_load(latest.layers(), latest.queries),
            layers=self._layers.layers(),
            layer_steps=self._layers.steps,
            kernels=self._kernels,
            expert_method=self._experts.method,
            expert_padding_counted=self._experts.padding_counted,
            notices=tuple(self._notices.values()),
            micro=self._micro.items(),
            rest_s=self._rest.items(),
            accumulation=self._sums.micro / self._sums.steps if self._sums.steps else None,
            mean_evaluation_s=self._mean_span("evaluation"),
            mean_save_s=self._mean_span("saving"),
            memory_points=tuple(self._memory_points.values()),
            self_share=self._sums.self_share(),
            skipped_steps=self._skipped,
            fit=self._fit,
            projection=self._projection,
        )

    def _mean_span(self, kind: str) -> float | None:
        times = self._span_counts.get(kind)
        return self._spans[kind] / times if times else None

    def _to_go(self, total: int | None) -> float | None:
        """Seconds to the last step, at the pace of the recent steps, what lies between them included."""
        if self._end is not None:
            return 0.0 if self._end.status == "completed" else None
        if total is None or len(self._last) < 2:
            return None
        newest, oldest = self._last[-1], self._last[0]
        pace = (newest.t_s + newest.wall_s - oldest.t_s - oldest.wall_s) / (len(self._last) - 1)
        return max(0, total - self._step) * pace


class _GpuState:
    def __init__(self) -> None:
        self._curves = {name: CurveBuilder() for name in ("gpu_percent", "sm_percent", "memory_used_bytes", "power_w")}

    def add(self, t_s: float, sample: r.GpuSample) -> None:
        self._latest = sample
        for name, curve in self._curves.items():
            curve.add(t_s, getattr(sample, name))

    def view(self) -> GpuView:
        return GpuView(self._latest, **{name: curve.points() for name, curve in self._curves.items()})


_COUNTS = ("queries", "slots", "real_tokens", "loss_tokens")
_Work = tuple[int | None, int | None, int | None, int | None]
"""What ``_COUNTS`` names, in that order."""


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _work(step: r.Step) -> _Work:
    """Sum a step's micro-batches. It runs for every step of a log, so it is written for speed."""
    if not step.micro:
        return None, None, None, None
    first, *rest = step.micro
    work = (first.queries, first.slots, first.real_tokens, first.loss_tokens)
    for m in rest:
        a, b, c, d = work
        work = (_plus(a, m.queries), _plus(b, m.slots), _plus(c, m.real_tokens), _plus(d, m.loss_tokens))
    return work


class _Sums:
    """Sums over steps. A count that one micro-batch lacks is unknown for all."""

    def __init__(self) -> None:
        self.steps = 0
        self.micro = 0
        self.wall_s = 0.0
        self.self_s: float | None = None
        self.phases: dict[str, float] = {}
        self._work: _Work = (0, 0, 0, 0)

    @classmethod
    def of(cls, steps: Iterable[r.Step]) -> _Sums:
        sums = cls()
        for step in steps:
            sums.add(step, _work(step))
        return sums

    def add(self, step: r.Step, work: _Work) -> None:
        self.steps += 1
        self.micro += len(step.micro)
        self.wall_s += step.wall_s
        if step.self_s is not None:
            self.self_s = (self.self_s or 0.0) + step.self_s
        phases = self.phases
        for name, seconds in step.phases_s.items():
            phases[name] = phases.get(name, 0.0) + seconds
        a, b, c, d = self._work
        e, f, g, h = work
        self._work = (_plus(a, e), _plus(b, f), _plus(c, g), _plus(d, h))

    def self_share(self) -> float | None:
        return self.self_s / self.wall_s if self.self_s is not None and self.wall_s else None

    def gap(self) -> float | None:
        return sum(self.phases.values()) / self.wall_s - 1 if self.wall_s else None

    def totals(self) -> Totals:
        return Totals(self.steps, *self._work) if self.steps else Totals()


def _rates(sums: _Sums) -> Rates:
    totals = sums.totals()
    if not sums.wall_s:
        return Rates()

    def per_second(count: int | None) -> float | None:
        return None if count is None else count / sums.wall_s

    return Rates(
        per_second(totals.queries),
        per_second(totals.real_tokens),
        per_second(totals.loss_tokens),
        per_second(totals.slots),
    )


def _shares(parts: dict[str, float], order: tuple[str, ...], whole: float | None = None) -> tuple[Share, ...]:
    whole = sum(parts.values()) if whole is None else whole
    names = [n for n in order if n in parts] + [n for n in parts if n not in order]
    return tuple(Share(n, parts[n], parts[n] / whole if whole else 0.0) for n in names)


def combine(views: list[RunView]) -> RunView:
    """Merge the views of one run's ranks: rank 0 leads, work and expert counts are summed, GPUs stand side by side."""
    lead, *others = views
    missing = _missing_ranks(lead.header, len(views))
    if not others:
        return dataclasses.replace(lead, notices=(*lead.notices, *missing)) if missing else lead
    gpus_of = views
    views = _with_different_data(views)
    return dataclasses.replace(
        lead,
        ranks=len(gpus_of),
        data_ranks=len(views),
        totals=Totals(lead.totals.steps, *(_sum_known([v.totals for v in views], name) for name in _COUNTS)),
        rates=_sum_rates([v.rates for v in views]),
        recent=_sum_rates([v.recent for v in views]),
        gpus=tuple(gpu for v in gpus_of for gpu in v.gpus),
        experts=ExpertTally.merged([v.experts for v in views]),
        experts_start=ExpertTally.merged([v.experts_start for v in views]),
        experts_end=ExpertTally.merged([v.experts_end for v in views]),
        expert_load=_sum_loads([v.expert_load for v in views], [v.experts for v in views]),
        load_start=_sum_loads([v.load_start for v in views], [v.experts_start for v in views]),
        load_end=_sum_loads([v.load_end for v in views], [v.experts_end for v in views]),
        notices=(*{(n.collector, n.text): n for v in gpus_of for n in v.notices}.values(), *missing),
        unknown_lines=sum(v.unknown_lines for v in views),
        malformed_lines=sum(v.malformed_lines for v in views),
        curves={**lead.curves, **_sum_rate_curves(views)},
    )


def _missing_ranks(header: r.Header | None, found: int) -> tuple[r.Notice, ...]:
    if header is None or found >= header.world_size:
        return ()
    text = f"logs of {found} of {header.world_size} ranks were found: rates and totals are of those"
    return (r.Notice(t_s=0.0, collector="ranks", text=text),)


def _with_different_data(views: list[RunView]) -> list[RunView]:
    """Return one view for each share of the data: ranks that share theirs must not count it twice.

    Those are neighbours, for tensor and context parallelism are the innermost dimensions of a device mesh.
    """
    header = views[0].header
    if header is None or not header.data_parallel_size:
        return views
    together = max(1, header.world_size // header.data_parallel_size)
    return [v for v in views if v.header is None or v.header.rank % together == 0] or views[:1]


def _sum_rate_curves(views: list[RunView]) -> dict[str, Points]:
    """Sum the ranks' curves step by step; a rank that lags behind may have thinned its curve less than others."""
    summed: dict[str, Points] = {}
    for name in ("queries_per_s", "real_tokens_per_s"):
        first, *others = [v.curves.get(name, ()) for v in views]
        by_step = [dict(curve) for curve in others]
        summed[name] = tuple(
            (x, y + sum(curve[x] for curve in by_step)) for x, y in first if all(x in curve for curve in by_step)
        )
    return summed


def _sum_known(items: list[Totals], name: str) -> int | None:
    values = [getattr(item, name) for item in items]
    return None if None in values else sum(values)


def _sum_rates(rates: list[Rates]) -> Rates:
    def total(name: str) -> float | None:
        values = [getattr(rate, name) for rate in rates]
        return None if None in values else sum(values)

    return Rates(*(total(f.name) for f in dataclasses.fields(Rates)))


def _sum_loads(loads: list[ModelLoad | None], layers: list[tuple[LayerLoad, ...]]) -> ModelLoad | None:
    queries = [load.queries for load in loads if load is not None]
    return model_load(ExpertTally.merged(layers), sum(queries)) if len(queries) == len(loads) else None
