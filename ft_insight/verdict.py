"""Findings: what limits this run, the evidence, the next step, and what it is worth."""

from __future__ import annotations

import math

import msgspec

from ft_insight import units
from ft_insight.experts import LayerLoad
from ft_insight.imbalance import cost_of_imbalance
from ft_insight.memory_words import failure_text
from ft_insight.run_view import RunView, Share

PADDING = 0.15
DATA_WAIT = 0.05
THROTTLED = 0.05
"""Share of samples with clocks held down from which on it is worth a word."""
CHANGED = 1.5
"""Ratio of the variance at the end and at the start from which on it is worth a word."""
OVERLOAD = 2.0
"""Busiest expert's load over the mean from which on it is worth a word."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a reader should know first: ``evidence`` is measured, ``step`` is what to do."""

    topic: str
    evidence: str
    step: str | None = None
    worth: str | None = None

    @property
    def text(self) -> str:
        """One line: evidence, step, worth."""
        return " · ".join(part for part in (self.evidence, self.step, self.worth) if part)


def findings(view: RunView) -> tuple[Finding, ...]:
    """Return what stands out in a run, the costliest first."""
    found = [_data(view), _padding(view), _experts(view), _load_change(view), _nonfinite(view), _skipped(view)]
    found.insert(0, _out_of_memory(view))
    return (*_broken_gpus(view), *(f for f in found if f is not None), *_throttled_gpus(view))


def _out_of_memory(view: RunView) -> Finding | None:
    """What memory was too small for, unless the run goes on with a smaller batch by itself."""
    if not view.filling.failures:
        return None
    failure = view.filling.failures[-1]
    now = view.header.train.batch if view.header else None
    if now is not None and failure.queries is not None and now < failure.queries:
        return None
    batch = failure.fits[0] if failure.fits else None
    step = f"per_device_train_batch_size={batch}" if batch else "a smaller batch, or gradient_checkpointing=True"
    return Finding("memory", failure_text(failure), step)


def phase(view: RunView, name: str) -> Share | None:
    """Return one phase of the step ledger."""
    return next((p for p in view.phases if p.name == name), None)


def _data(view: RunView) -> Finding | None:
    wait = phase(view, "data_wait")
    if wait is None or wait.share < DATA_WAIT:
        return None
    return Finding(
        "data",
        f"{units.share(wait.share)} of step time waits for data",
        "dataloader_num_workers=2 or more, or tokenise beforehand",
        f"saves up to {units.share(wait.share)}",
    )


def _padding(view: RunView) -> Finding | None:
    padding = view.totals.padding_share
    if padding is None or padding < PADDING:
        return None
    return Finding(
        "padding",
        f"padding fills {units.share(padding)} of the slots",
        'batch rows of like length (train_sampling_strategy="group_by_length"), or padding_free=True',
        _padding_worth(view, padding),
    )


def _padding_worth(view: RunView, padding: float) -> str | None:
    """What all padding takes, by the fitted step time: an upper bound of what grouping saves."""
    slots = [m.slots for m in view.micro if m.slots]
    fitted = _usable_fit(view)
    if fitted is None or not slots or not view.phases:
        return None
    mean = sum(slots) / len(slots)
    n, fixed_s, per_slot_s = fitted

    def seconds(x: float) -> float:
        return math.pow(math.pow(fixed_s, n) + math.pow(per_slot_s * x, n), 1 / n)

    share = 1 - seconds(mean * (1 - padding)) / seconds(mean)
    computing = sum(p.share for p in view.phases if p.name in ("forward", "loss", "backward"))
    here = next((row for row in view.projection.rows if row.here), None) if view.projection else None
    saved = share * computing
    if here is not None and here.usd is not None:
        return f"saves up to {units.share(saved)}, {units.money(here.usd[0] * saved)} of {units.money(here.usd[0])}"
    return f"saves up to {units.share(saved)} of the time (estimate)"


def _usable_fit(view: RunView) -> tuple[float, float, float] | None:
    """Return exponent, fixed and per-slot seconds of a fit that can be computed with: it comes from a file."""
    fit = view.fit
    if fit is None or not fit.identifiable:
        return None
    n, fixed_s, per_slot_s = fit.exponent or 0.0, fit.fixed_s or 0.0, fit.per_slot_s or 0.0
    sound = 0.5 <= n <= 8 and 0 <= fixed_s < 1e9 and 0 < per_slot_s < 1e9 and per_slot_s > 1e-15
    return (n, fixed_s, per_slot_s) if sound else None


def _experts(view: RunView) -> Finding | None:
    if not view.experts:
        return None
    dead = [load for load in view.experts if load.dead]
    worst = max(view.experts, key=lambda load: load.max_over_mean)
    if worst.max_over_mean < OVERLOAD and not dead:
        return None
    most, even = units.share(max(worst.shares)), units.share(worst.ideal)
    evidence = f"{worst.layer}: expert {worst.worst} takes {most} of tokens (even: {even})"
    if dead:
        evidence += f"; {sum(len(load.dead) for load in dead)} experts got no token"
    return Finding("experts", evidence, worth=_imbalance_cost(view, worst))


def _imbalance_cost(view: RunView, worst: LayerLoad) -> str | None:
    """What uneven load takes of a step by the times of this run's layers, or why they do not tell."""
    if not view.layers:
        return None
    cost = cost_of_imbalance(view.experts, view.layers)
    if isinstance(cost, str):
        return f"cost in time not measurable in this run: {cost}"
    step_s = sum(p.seconds for p in view.phases) / view.totals.steps if view.totals.steps else 0.0
    if not step_s or not view.accumulation:
        return None
    middle, low, high = (units.share(s * view.accumulation / step_s) for s in cost.total_s)
    text = f"uneven load costs {middle} of a step [{low}-{high}] (90%, by the times of {len(cost.layer_s)} layers)"
    layer = cost.layer_s.get(worst.layer)
    return text if layer is None else f"{text}, this layer {units.share(layer[0] * view.accumulation / step_s)}"


def _load_change(view: RunView) -> Finding | None:
    """What fine-tuning did to the load of the experts, as the paper's Fig. 11 tells it."""
    change = view.load_change
    before, after = (change.model_start, change.model_end) if change is not None else (None, None)
    moved = change.moved if change is not None else None
    if before is None or after is None or moved is None or change is None or not before.variance_n:
        return None
    if 1 / CHANGED < after.variance_n / before.variance_n < CHANGED:
        return None
    return Finding(
        "experts",
        f"fine-tuning changed the experts' load ({change.basis}): variance {units.significant(before.variance_n)} -> "
        f"{units.significant(after.variance_n)} (tokens per query, over expert means), expert {moved} took "
        f"{units.share(before.shares[moved])} -> {units.share(after.shares[moved])}",
    )


def _nonfinite(view: RunView) -> Finding | None:
    if not view.nonfinite:
        return None
    return Finding(
        "loss",
        f"{', '.join(view.nonfinite)} is NaN or infinite",
        "lower the learning rate, or look at the data",
    )


def _skipped(view: RunView) -> Finding | None:
    if not view.skipped_steps:
        return None
    return Finding(
        "scaler",
        f"the gradient scaler skipped the optimizer in {view.skipped_steps} of {view.totals.steps} steps",
    )


def _broken_gpus(view: RunView) -> list[Finding]:
    """Tell of GPUs that were lost or had critical errors: what else is found may come from that."""
    found = []
    for number, gpu in enumerate(view.gpus):
        if gpu.lost_at_s is not None:
            evidence = f"GPU {number} was lost by its driver {units.duration(gpu.lost_at_s)} into the run"
            found.append(Finding("gpu", evidence, "look at the kernel's log (dmesg) and have the card checked"))
        if gpu.xids:
            times = {xid: sum(x == xid for _, x in gpu.xids) for _, xid in gpu.xids}
            which = ", ".join(f"{xid}{f' ({n} times)' if n > 1 else ''}" for xid, n in times.items())
            found.append(Finding("gpu", f"GPU {number} reported Xid {which}", "look it up in NVIDIA's list of Xids"))
        if gpu.ecc_uncorrected:
            evidence = f"GPU {number} had {units.count(gpu.ecc_uncorrected)} memory errors that ECC could not correct"
            found.append(Finding("gpu", evidence, "have the card checked"))
    return found


def _throttled_gpus(view: RunView) -> list[Finding]:
    """Tell how often power or heat held the clocks down, by the GPU where it was most."""
    found = []
    causes = (
        ("thermal_throttled", "heat", "look at airflow and at what else heats the machine"),
        ("power_throttled", "the power limit", "a higher limit would help, where the card has one (nvidia-smi -pl)"),
    )
    for name, cause, step in causes:
        shares = {n: s for n, gpu in enumerate(view.gpus) if (s := getattr(gpu, name)) is not None}
        held = {n: s for n, s in shares.items() if s >= THROTTLED}
        if held:
            worst = max(held, key=held.__getitem__)
            others = f", and of {len(held) - 1} more" if len(held) > 1 else ""
            evidence = f"{cause} held the clocks of GPU {worst} down in {units.share(held[worst])} of samples{others}"
            found.append(Finding("gpu", evidence, step))
    return found
