"""What a run's log says, brought into the paper's terms. None is unmeasured, and ``reason`` or a notice says why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from study.largest import Largest
from study.runs import Run

from ft_insight import records as r
from ft_insight.layer_times import MOE_KINDS, by_kind
from ft_insight.reader import read_run
from ft_insight.run_view import RunView
from ft_insight.runlog import read_records

PHASES = {
    "forward": ("forward", "loss"),
    "backward": ("recompute", "backward"),
    "optimizer": ("optimizer",),
}
"""The paper's three phases, and the ledger's that they are made of; the rest of a step is told apart."""
LAYERS = {
    "MoE": MOE_KINDS,
    "attention": {"attention"},
    "Mamba": {"mamba"},
    "norms": {"input_norm", "post_attention_norm", "norm"},
}
"""The paper's kinds of layers, and ours."""
ROLES = {
    "w1 and w3": {"matmul_w1", "matmul_w3", "matmul_w1_w3"},
    "w2": {"matmul_w2"},
    "dequantise": {"dequantise"},
    "router": {"matmul_router"},
    "softmax and top-k": {"softmax_topk"},
    "activation": {"activation"},
    "LoRA": {"lora"},
}
"""Kernels of the MoE layer; all others are "other"."""
OTHER = "other"


@dataclass(frozen=True)
class Use:
    """How busy the device was: percent of SMs and of DRAM bandwidth, and how that was measured or why not."""

    sm_percent: float | None = None
    dram_percent: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class Measured:
    """One run. Shares are of 1; ``layers`` and ``roles`` are empty where they were not recorded."""

    run: Run
    largest: Largest | None
    """Of the runs at the largest batch: what makes it that."""
    reason: str | None = None
    """Why there are no figures."""
    view: RunView = field(default_factory=RunView)
    steps: int = 0
    """Steps that count: not the first, which warms up, and not the one under the profiler."""
    step_s: float | None = None
    """Median wall time of these."""
    phases: Mapping[str, float] = field(default_factory=dict)
    rest_of_step: float | None = None
    """Share of the step's wall time that is none of the three phases: data, clipping, callbacks."""
    layers: Mapping[str, float] = field(default_factory=dict)
    rest_of_model: float | None = None
    """Share of the model's time that is in none of these layers: embedding, head and loss, glue."""
    roles: Mapping[str, float] = field(default_factory=dict)
    """Of the MoE layer's kernels, all passes."""
    expert_forward: Mapping[str, float] = field(default_factory=dict)
    """Of the experts' kernels that the paper lists, forward alone."""
    use: Use = Use()
    accuracy: tuple[tuple[float, float], ...] = ()
    """(epoch, share of held-out rows answered right)."""


def measure(run: Run, largest: Largest | None) -> Measured:
    """Read a run's log; a run that did not complete has a reason instead of figures."""
    if largest is not None and largest.batch == 0:
        return Measured(run, largest, reason=largest.basis)
    if not run.done:
        ended_well = run.outcome in (None, "completed")
        return Measured(run, largest, reason="it left no finished log" if ended_well else run.outcome)
    view, _ = read_run(run.log)
    records = list(read_records(run.log)[1])
    steps = [s for s in [x for x in records if isinstance(x, r.Step)][1:] if not s.profiled]
    phases, rest_of_step = _phases(steps)
    kinds = {kind.kind: kind.share for kind in by_kind(view.layers)}
    layers, rest_of_model = _grouped(kinds, LAYERS)
    return Measured(
        run,
        largest,
        view=view,
        steps=len(steps),
        step_s=median(s.wall_s for s in steps) if steps else None,
        phases=phases,
        rest_of_step=rest_of_step,
        layers=layers,
        rest_of_model=rest_of_model if layers else None,
        roles=_roles(view.kernels),
        expert_forward=_expert_forward(view.kernels),
        use=_use(view, records, steps),
        accuracy=tuple(
            (x.epoch or 0.0, value)
            for x in records
            if isinstance(x, r.Logs) and (value := x.values.get("eval_accuracy")) is not None
        ),
    )


def _phases(steps: Sequence[r.Step]) -> tuple[dict[str, float], float | None]:
    seconds = {n: sum(s.phases_s.get(part, 0.0) for s in steps for part in parts) for n, parts in PHASES.items()}
    whole, wall = sum(seconds.values()), sum(s.wall_s for s in steps)
    if not whole or not wall:
        return {}, None
    return {name: value / whole for name, value in seconds.items()}, 1 - whole / wall


def _grouped(parts: Mapping[str, float], groups: Mapping[str, Iterable[str]]) -> tuple[dict[str, float], float]:
    """Return each group's share of what all groups take together, and the share of the whole that is in none."""
    sums = {name: sum(parts.get(member, 0.0) for member in members) for name, members in groups.items()}
    taken, whole = sum(sums.values()), sum(parts.values())
    if not taken:
        return {}, 1.0
    return {name: value / taken for name, value in sums.items() if value}, 1 - taken / whole


def _roles(kernels: r.Kernels | None) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for role in kernels.roles if kernels else ():
        if role.kind in MOE_KINDS:
            name = next((n for n, members in ROLES.items() if role.role in members), OTHER)
            seconds[name] = seconds.get(name, 0.0) + role.seconds
    whole = sum(seconds.values())
    return {name: seconds[name] / whole for name in (*ROLES, OTHER) if seconds.get(name)}


def _expert_forward(kernels: r.Kernels | None) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for role in kernels.roles if kernels else ():
        if role.kind == "experts" and role.pass_name == "forward":  # noqa: S105 - no password
            seconds[role.role] = seconds.get(role.role, 0.0) + role.seconds
    listed = {name: ROLES[name] for name in ("w1 and w3", "w2", "dequantise")}
    return _grouped(seconds, listed)[0]


def _use(view: RunView, records: Sequence[r.Record], steps: Sequence[r.Step]) -> Use:
    """Return what Nsight Compute says of the MoE kernels, else what the card's own counters say of the whole card."""
    roles = [role for role in (view.kernels.roles if view.kernels else ()) if role.kind in MOE_KINDS]
    sm = _mean([(role.seconds, role.sm_percent) for role in roles])
    if sm is not None:
        dram = _mean([(role.seconds, role.dram_percent) for role in roles])
        return Use(sm, dram, "MoE kernels alone, by Nsight Compute, weighted by time")
    samples = [
        sample
        for x in records
        if isinstance(x, r.Gpu) and any(s.t_s <= x.t_s <= s.t_s + s.wall_s for s in steps)
        for sample in x.samples
    ]
    sm = _mean([(1.0, sample.sm_percent) for sample in samples])
    dram = _mean([(1.0, sample.dram_percent) for sample in samples])
    if sm is not None or dram is not None:
        return Use(sm, dram, "the whole card during steps, by its GPM counters, idle time included")
    said = "; ".join(notice.text for notice in view.notices if notice.collector == "gpu")
    return Use(basis=said or "this card has no such counters (GPM: Hopper and newer), and no ncu export was attached")


def _mean(weighted: Iterable[tuple[float, float | None]]) -> float | None:
    known = [(weight, value) for weight, value in weighted if value is not None]
    whole = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / whole if whole else None
