"""What a report says, section by section: the answer first, the evidence next, what is not known last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.kernel_table import RoleTime, by_role
from ft_insight.layer_times import KIND_WORDS, by_kind
from ft_insight.reader import Status
from ft_insight.report.gpu import gpu_sections
from ft_insight.report.job import projection_sections
from ft_insight.report.layout import Section
from ft_insight.report.load import MOST_EXPERT_COLUMNS, change_sections
from ft_insight.report.memory import memory_parts_section, memory_room_section
from ft_insight.run_view import RunView
from ft_insight.verdict import findings
from ft_insight.words import clean, fit_text, phase_word

MOST_KERNEL_ROWS = 20


def report_sections(view: RunView, status: Status) -> list[Section]:
    """Return all sections of a run's report; empty ones are not shown."""
    return [
        _status(view, status),
        Section("Findings", tuple(clean(f.text, 300) for f in findings(view))),
        _time(view),
        _layers(view),
        _kernels(view),
        _throughput(view),
        _training(view),
        _experts(view),
        *_load_change(view),
        _memory(view),
        memory_parts_section(view),
        memory_room_section(view),
        *gpu_sections(view),
        Section("Step time", (fit_text(view.fit),) if view.fit else ()),
        *(projection_sections(view.projection) if view.projection else ()),
        _not_known(view),
    ]


def _status(view: RunView, status: Status) -> Section:
    lines = [clean(status.text)]
    if view.total_steps and not (view.end and view.end.status == "completed"):
        to_go = "" if view.to_go_s is None else f", {units.duration(view.to_go_s)} to go at this pace"
        lines.append(f"step {view.step:,} of {view.total_steps:,}{to_go}")
    if view.segments > 1:
        lines.append(f"{view.segments} segments: resumed or retried; time and money are of all, the rest of the last")
    return Section("Status", tuple(lines))


def _time(view: RunView) -> Section:
    steps = max(1, view.totals.steps)
    rows = [("phase", "per step", "share of steps")]
    rows += [(phase_word(p.name), units.duration(p.seconds / steps), units.share(p.share)) for p in view.phases]
    after = []
    if view.ledger_gap is not None:
        clock = "CUDA events" if view.phase_clock == "cuda" else "the host's clock"
        after.append(f"by {clock}; the phases add up to {units.share(1 + view.ledger_gap)} of the steps' wall time")
    if view.idle_at_most is not None:
        after.append(f"the device had nothing to do for at most {units.share(view.idle_at_most)} of step time")
    if view.outside:
        parts = ", ".join(
            f"{clean(p.name, 40)} {units.duration(p.seconds)} ({units.share(p.share)})" for p in view.outside
        )
        after.append(f"outside of steps, of the whole run: {parts}")
    if view.self_share is not None:
        after.append(f"ft-insight itself took {units.share(view.self_share)} of step time, as it measured itself")
    return Section("Where the time went", table=tuple(rows) if view.phases else (), after=tuple(after))


def _layers(view: RunView) -> Section:
    if not view.layers:
        return Section("Time per kind of layer")
    rows: list[tuple[str, ...]] = [("kind", "forward", "recompute", "backward", "share")]
    rows += [
        (clean(k.words, 40), *(_part_of(s) for s in (k.forward_s, k.recompute_s, k.backward_s)), units.share(k.share))
        for k in by_kind(view.layers)
    ]
    after = [f"mean of a micro-batch over {view.layer_steps:,} sampled steps; each kind's own time, inner parts apart"]
    slowest = _slowest_layer(view)
    if slowest:
        after.append(slowest)
    return Section("Time per kind of layer", table=tuple(rows), after=tuple(after))


def _kernels(view: RunView) -> Section:
    kernels = view.kernels
    if kernels is None:
        return Section("Kernels by role")
    rows = by_role(kernels.roles)
    shown = rows[:MOST_KERNEL_ROWS]
    columns = _kernel_columns(rows, on_device=kernels.clock == "cuda")
    table = [tuple(columns), *(tuple(show(row) for show in columns.values()) for row in shown)]
    what = "kernels on the device" if kernels.clock == "cuda" else "operators on the host, without what they call"
    covered = units.share(sum(row.share for row in shown))
    after = [
        f"step {kernels.step} under the profiler, {what}; {len(shown)} of {len(rows)} roles, {covered} of the time"
    ]
    if kernels.idle_s is not None and kernels.window_s:
        after.append(f"the device idled {units.share(kernels.idle_s / kernels.window_s)} of the recorded step")
    if kernels.trace:
        after.append(f"chrome trace: {clean(kernels.trace)} beside the log")
    return Section("Kernels by role", table=tuple(table), after=tuple(after))


def _kernel_columns(rows: Sequence[RoleTime], *, on_device: bool) -> dict[str, Callable[[RoleTime], str]]:
    """Return title -> cell; columns that this trace cannot fill are left out."""
    columns: dict[str, Callable[[RoleTime], str]] = {
        "part": lambda row: clean(KIND_WORDS.get(row.kind, row.kind.replace("_", " ")), 40),
        "role": lambda row: clean(row.role.replace("_", " "), 40),
        "forward": lambda row: _part_of(row.forward_s),
        "recompute": lambda row: _part_of(row.recompute_s),
        "backward": lambda row: _part_of(row.backward_s),
        "other": lambda row: _part_of(row.other_s),
        "share": lambda row: units.share(row.share),
        "calls": lambda row: units.count(row.calls),
        "TFLOP/s": lambda row: "-" if row.tflops is None else units.significant(row.tflops),
    }
    if on_device:
        columns["of peak"] = lambda row: units.share(row.flops_share)
        columns["of bandwidth"] = lambda row: units.share(row.bandwidth_share)
        columns["occupancy (theoretical)"] = lambda row: _percent(row.theoretical_occupancy_percent)
    if any(row.sm_percent is not None for row in rows):
        columns["SM (ncu)"] = lambda row: _percent(row.sm_percent)
        columns["memory (ncu)"] = lambda row: _percent(row.memory_percent)
    return columns


def _percent(value: float | None) -> str:
    return units.share(None if value is None else value / 100)


def _part_of(seconds: float) -> str:
    return units.duration(seconds) if seconds else "-"


def _slowest_layer(view: RunView) -> str | None:
    sums: dict[int, float] = {}
    for time in view.layers:
        if time.layer is not None:
            sums[time.layer] = sums.get(time.layer, 0.0) + time.total_s
    if len(sums) < 2:
        return None
    slowest = max(sums, key=sums.__getitem__)
    mean = sum(sums.values()) / len(sums)
    return (
        f"decoder layers take {units.duration(mean)} each on average; the slowest, layer {slowest}, "
        f"{units.duration(sums[slowest])}"
    )


def _throughput(view: RunView) -> Section:
    rates, totals = view.rates, view.totals
    if not totals.steps:
        return Section("Throughput")
    rows = (
        ("", "per second", "in all"),
        ("queries", units.rate(rates.queries_per_s), units.count(totals.queries)),
        ("real tokens", units.rate(rates.real_tokens_per_s), units.count(totals.real_tokens)),
        ("loss tokens", units.rate(rates.loss_tokens_per_s), units.count(totals.loss_tokens)),
        ("slots (with padding)", units.rate(rates.slots_per_s), units.count(totals.slots)),
    )
    after = f"padding {units.share(totals.padding_share)} of slots; rates leave out the first step"
    return Section("Throughput", table=rows, after=(after,))


def _training(view: RunView) -> Section:
    names = ("loss", "eval_loss", "grad_norm", "learning_rate")
    lines = []
    for name in names:
        if name in view.nonfinite:
            lines.append(f"{name}: NaN or infinite")
        elif view.curves.get(name):
            first, last = view.curves[name][0][1], view.curves[name][-1][1]
            lines.append(f"{name}: {first:.4g} -> {last:.4g}")
    return Section("As the trainer logged it", tuple(lines))


def _experts(view: RunView) -> Section:
    if not view.experts:
        return Section("Tokens per expert")
    widest = max(len(load.counts) for load in view.experts)
    if widest <= MOST_EXPERT_COLUMNS:
        head = ("layer", *(str(e) for e in range(widest)), "max/mean", "CV")
        rows = [_all_shares(load, widest) for load in view.experts]
    else:
        head = ("layer", "busiest", "its share", "max/mean", "CV", "dead")
        rows = [_busiest(load) for load in view.experts]
    after = [f"share of token assignments; even would be {units.share(view.experts[0].ideal)}"]
    if view.expert_load is not None:
        n, n1 = view.expert_load.variance_n, view.expert_load.variance_n1
        after.append(
            f"variance over expert means, in tokens per query: {units.significant(n)} (by n), "
            f"{units.NA if n1 is None else units.significant(n1)} (by n-1)"
        )
    change = view.load_change
    if change is not None and change.model_start is not None and change.model_end is not None:
        before, latest = (units.significant(load.variance_n) for load in (change.model_start, change.model_end))
        after.append(f"from start to end of the run ({change.basis}): variance {before} -> {latest}")
    if view.expert_padding_counted:
        after.append("padding is counted in: no mask of the right shape was to be had")
    return Section("Tokens per expert", table=(head, *rows), after=tuple(after))


def _load_change(view: RunView) -> list[Section]:
    """Show before and after in full where they were counted on the same rows."""
    change = view.load_change
    return change_sections(change, change.basis) if change is not None and change.rows is not None else []


def _all_shares(load: LayerLoad, width: int) -> tuple[str, ...]:
    shares = [units.share(s) for s in load.shares]
    shares += [""] * (width - len(shares))
    return (clean(load.layer), *shares, f"{load.max_over_mean:.2f}", f"{load.cv:.2f}")


def _busiest(load: LayerLoad) -> tuple[str, ...]:
    return (
        clean(load.layer),
        str(load.worst),
        units.share(max(load.shares)),
        f"{load.max_over_mean:.2f}",
        f"{load.cv:.2f}",
        str(len(load.dead)),
    )


def _memory(view: RunView) -> Section:
    lines = []
    memory = view.memory
    if memory is not None:
        if memory.peak_allocated_bytes is not None:
            lines.append(
                f"device: peak {units.size(memory.peak_allocated_bytes)} allocated, "
                f"{units.size(memory.peak_reserved_bytes)} reserved; "
                f"{units.size(memory.allocated_bytes)} between steps"
            )
        lines.append(f"host: {units.size(memory.rss_bytes)} resident")
    return Section("Memory", tuple(lines))


def _not_known(view: RunView) -> Section:
    lines = [clean(f"{n.collector}: {n.text}", 300) for n in view.notices]
    if view.unknown_lines:
        lines.append(f"{view.unknown_lines} lines of kinds that this version does not know were skipped")
    if view.malformed_lines:
        lines.append(f"{view.malformed_lines} lines were not whole JSON and were skipped")
    return Section("Notices", tuple(lines))
