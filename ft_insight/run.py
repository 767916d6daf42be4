"""One run as its log tells it: ``RunState.apply(record)`` returns a ``RunView`` with every figure a reader shows.

A state folds the records of one rank's log, in constant memory; a view is a frozen snapshot of it. Reports,
dashboard and projections draw views and compute nothing of their own, so that they can never disagree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from ft_insight import records as r
from ft_insight.experts import EDGE, ExpertTally, model_load
from ft_insight.gpu_phases import GpuPhases
from ft_insight.gpu_tally import GpuTally
from ft_insight.layer_times import LayerTally
from ft_insight.memory_points import MemoryTally
from ft_insight.part_points import PartTally
from ft_insight.run_view import HostView, RunView
from ft_insight.stats import CurveBuilder, EvenSample, RowCurves, median
from ft_insight.step_sums import StepSums, rates_of, shares_of, work_of

RECENT_STEPS = 20
LATEST_FLUSHES = 64
MEMORY_CURVES = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "rss_bytes")
OTHER_BATCHES = "other batches"
"""What a sweep spent on batch sizes that are not the job's."""


class RunState:
    """Folds the records of one log. ``apply`` returns a view; ``fold`` is for when only the last one matters."""

    def __init__(self) -> None:
        self._notices: dict[tuple[str, str], r.Notice] = {}
        self._earlier_s = 0.0
        self._clock_s = 0.0
        self._segments = 0
        self._curves: defaultdict[str, CurveBuilder] = defaultdict(CurveBuilder)
        self._memory_curves = RowCurves(MEMORY_CURVES)
        self._filling = MemoryTally()
        self._before = ExpertTally("before")
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
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, record)

    # one handler per record

    def _on_header(self, header: r.Header) -> None:
        self._earlier_s += self._clock_s
        self._segments += 1
        if header.first_step == 0:
            self._curves.clear()  # a fresh start, or a retry: the steps before it count for nothing
            self._memory_curves = RowCurves(MEMORY_CURVES)
            self._before = ExpertTally("before")
        else:
            for curve in self._curves.values():
                curve.cut_after(header.first_step)
            self._memory_curves.cut_after(header.first_step)
        self._start_segment(header)

    def _start_segment(self, header: r.Header | None) -> None:
        self._header = header
        self._end: r.End | None = None
        self._fit: r.Fit | None = None
        self._projection: r.Projection | None = None
        self._clock_s = 0.0
        self._step = header.first_step if header else 0
        self._epoch: float | None = None
        self._sums = StepSums()
        self._warm = StepSums()
        self._last: deque[r.Step] = deque(maxlen=RECENT_STEPS)
        self._spans: dict[str, float] = {}
        self._span_counts: dict[str, int] = {}
        self._logs: dict[str, float | None] = {}
        self._nonfinite: tuple[str, ...] = ()
        self._memory: r.Memory | None = None
        self._filling.start_segment()
        self._gpus: defaultdict[str, GpuTally] = defaultdict(GpuTally)
        self._gpu_phases = GpuPhases()
        self._gpu_dropped = 0
        self._host: r.HostSample | None = None
        self._host_curves = RowCurves(("cpu_percent", "rss_bytes"))
        self._experts = ExpertTally()
        self._after = ExpertTally("after")
        self._experts_first = ExpertTally()
        self._experts_latest: deque[r.Experts] = deque(maxlen=LATEST_FLUSHES)
        self._layers = LayerTally()
        self._parts = PartTally()
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
        self._gpu_phases.add_step(step)
        if step.other_batch is not None:
            self._on_other_batch(step)
            return
        first = self._sums.steps == 0
        work = work_of(step)
        self._sums.add(step, work)
        self._note_memory(step)
        if step.profiled:
            return
        self._last.append(step)
        if first:
            return
        self._warm.add_work(step, work)
        self._parts.add_step(step, work[1])
        self._micro.add_all(step.micro)
        compute = [m.compute_s for m in step.micro if m.compute_s is not None]
        if len(compute) == len(step.micro) and compute:
            self._rest.add(step.wall_s - sum(compute))
        if step.wall_s > 0:
            for name, count in (("queries_per_s", work[0]), ("real_tokens_per_s", work[2])):
                if count is not None:
                    self._curves[name].add(step.step, count / step.wall_s)
        self._curves["step_s"].add(step.step, step.wall_s)

    def _on_other_batch(self, step: r.Step) -> None:
        """Take in a sweep's step at another batch than the job's: all rates and shares are of the job's own."""
        self._note_outside({OTHER_BATCHES: step.wall_s})
        self._note_memory(step)
        if not step.profiled:
            self._micro.add_all(step.micro)

    def _on_tried(self, tried: r.Tried) -> None:
        self._filling.add_trial(tried)

    def _note_memory(self, step: r.Step) -> None:
        self._filling.add_step(step)
        if step.memory is None:
            return
        self._memory = step.memory
        self._memory_curves.add(step.step, step.memory)

    def _note_outside(self, parts: Mapping[str, float]) -> None:
        for kind, seconds in parts.items():
            self._spans[kind] = self._spans.get(kind, 0.0) + seconds

    def _on_span(self, span: r.Span) -> None:
        self._note_outside({span.kind: span.wall_s})
        self._gpu_phases.add_span(span)
        self._span_counts[span.kind] = self._span_counts.get(span.kind, 0) + 1

    def _on_logs(self, logs: r.Logs) -> None:
        self._logs.update(logs.values)
        # an evaluation logs other names: what it does not speak of stays as it was
        kept = tuple(name for name in self._nonfinite if name not in logs.values)
        self._nonfinite = (*kept, *logs.nonfinite)
        for name, value in logs.values.items():
            self._curves[name].add(logs.step, value)

    def _on_experts(self, experts: r.Experts) -> None:
        for tally in (self._experts, self._before, self._after):
            tally.add(experts)
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
            self._curves["expert_variance"].add(experts.step, load.variance_n)

    def _edge(self) -> float:
        total = _planned(self._header)
        return max(1.0, (total or 20 * max(1, self._step)) * EDGE)

    def _on_layers(self, layers: r.Layers) -> None:
        self._layers.add(layers)
        self._parts.add_layers(layers)

    def _on_kernels(self, kernels: r.Kernels) -> None:
        self._kernels = kernels

    def _on_memoryparts(self, parts: r.MemoryParts) -> None:
        self._filling.add_parts(parts)

    def _on_outofmemory(self, failure: r.OutOfMemory) -> None:
        self._filling.add_failure(failure)

    def _on_gpu(self, gpu: r.Gpu) -> None:
        self._gpu_dropped += gpu.dropped
        for sample in gpu.samples:
            self._gpus[sample.uuid].add(gpu.t_s, sample)
            self._gpu_phases.add_sample(gpu.t_s, sample)
        if gpu.host is not None:
            self._host = gpu.host
            self._host_curves.add(gpu.t_s, gpu.host)

    def _on_notice(self, notice: r.Notice) -> None:
        self._notices.setdefault((notice.collector, notice.text), notice)

    def _on_fit(self, fit: r.Fit) -> None:
        self._fit = fit

    def _on_projection(self, projection: r.Projection) -> None:
        self._projection = projection

    def _on_end(self, end: r.End) -> None:
        self._end = end
        self._note_outside(end.before_s)

    # the snapshot

    def view(self) -> RunView:
        """Return a snapshot of all that is known now."""
        header = self._header
        elapsed = self._earlier_s + self._clock_s
        total = _planned(header)
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
            rates=rates_of(self._warm if self._warm.steps else self._sums),
            recent=rates_of(StepSums.of(last[1:] if self._sums.steps == len(last) and len(last) > 1 else last)),
            step_s=median(s.wall_s for s in last),
            phase_clock=self._phase_clock,
            idle_at_most=self._sums.idle_share(),
            phases=shares_of(self._sums.phases, r.STEP_PHASES),
            recent_phases=shares_of(StepSums.of(last).phases, r.STEP_PHASES),
            ledger_gap=self._sums.gap(),
            outside=shares_of(self._spans, r.OUTSIDE_KINDS, whole=self._clock_s),
            unaccounted_s=self._clock_s - self._sums.wall_s - sum(self._spans.values()),
            curves={name: curve.points() for name, curve in self._curves.items()} | self._memory_curves.curves(),
            latest_logs=dict(self._logs),
            nonfinite=self._nonfinite,
            memory=self._memory,
            gpus=tuple(
                gpu.view(*self._gpu_phases.uses(uuid, final=self._end is not None)) for uuid, gpu in self._gpus.items()
            ),
            gpu_dropped=self._gpu_dropped,
            host=HostView(self._host, **self._host_curves.curves()) if self._host else None,
            experts=self._experts.layers(),
            expert_load=model_load(self._experts.layers(), self._experts.queries),
            experts_start=start.layers(),
            experts_end=latest.layers(),
            experts_before=self._before.layers(),
            experts_after=self._after.layers(),
            load_before=model_load(self._before.layers(), self._before.queries),
            load_after=model_load(self._after.layers(), self._after.queries),
            rows_before=self._before.queries or None,
            rows_after=self._after.queries or None,
            load_start=model_load(start.layers(), start.queries),
            load_end=model_load(latest.layers(), latest.queries),
            layers=self._layers.layers(),
            layer_steps=self._layers.steps,
            parts=self._parts.view(),
            kernels=self._kernels,
            expert_method=self._experts.method,
            expert_padding_counted=self._experts.padding_counted,
            notices=tuple(self._notices.values()),
            micro=self._micro.items(),
            rest_s=self._rest.items(),
            accumulation=self._sums.micro / self._sums.steps if self._sums.steps else None,
            mean_evaluation_s=self._mean_span("evaluation"),
            mean_save_s=self._mean_span("saving"),
            filling=self._filling.view(),
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


_HANDLERS: dict[type, Callable[[RunState, Any], None]] = {
    kind: getattr(RunState, f"_on_{kind.__name__.lower()}")
    for kind in get_args(r.Record)
    if hasattr(RunState, f"_on_{kind.__name__.lower()}")
}


def _planned(header: r.Header | None) -> int | None:
    """Return the step at which a run ends; a sweep or a probe ends long before its job would."""
    return None if header is None or header.purpose else header.train.max_steps
