"""Queries per second of a run's job on any GPU and at any batch, with its interval and with what bounds it."""

from __future__ import annotations

import math

import msgspec

from ft_insight.catalog import Gpu
from ft_insight.estimate.buckets import READ_SHARE, Buckets
from ft_insight.estimate.measured import Measured
from ft_insight.estimate.micro import (
    NO_QUERIES,
    NO_STEPS,
    Triple,
    as_measured,
    buckets_of,
    lengthening,
    micro_here,
    same_rows,
    slots_of,
)
from ft_insight.estimate.parallel import Setting, exposed_s, present_setting
from ft_insight.estimate.probe import rescaled
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.transfer import TransferError, from_work, precision_of, refusal
from ft_insight.estimate.work import ADAM_BYTES, flops_per_slot
from ft_insight.estimate.workload import Workload

CAPACITY_GAIN = 1.15
"""Memory is what bounds a job that a card of twice the room would do faster by this factor."""
SCALING_SPREAD = 0.05
"""80% half-width, in logarithms, of what else more GPUs cost each other: stragglers, a shared host."""
STARVED = 0.05
"""Of the time of computing: what a step waits for its data beyond that is not the first micro-batch's start alone."""
LINK_SPREAD = 0.4
"""80% half-width, in logarithms, of the time that gradients take on the way."""


class Rate(msgspec.Struct, frozen=True):
    """Queries per second of all GPUs together."""

    queries_per_s: Triple
    basis: str
    scale: float
    """Factor on the time of a query against the run as measured, for what else computes: evaluations."""
    bound_by: str | None = None


def rate_on(
    measured: Measured, workload: Workload, gpu: Gpu, setting: Setting | None, probe: Measured | None = None
) -> Rate | TransferError:
    """Return the rate on ``gpu`` as set; without a setting (the batch is not known) as the run was measured."""
    header = measured.view.header
    if header is None or measured.view.totals.steps < 2:
        return TransferError(NO_STEPS)
    if not measured.on_gpu and probe is None:
        return _rate_from_work(measured, workload, gpu, setting)
    if measured.here is None and probe is None:
        return TransferError("the run's own GPU is not in the catalogue")
    why = refusal(measured.here, gpu, precision_of(header)) if measured.here and probe is None else None
    if why is not None:
        return why
    return _scaled(measured, workload, gpu, setting, probe)


def _scaled(
    measured: Measured, workload: Workload, gpu: Gpu, setting: Setting | None, probe: Measured | None
) -> Rate | TransferError:
    """Return the rate from the measured time of a micro-batch, moved to ``gpu``."""
    micro_s = micro_here(measured, workload, setting)
    if isinstance(micro_s, TransferError):
        return micro_s
    per_step = _per_step(measured, workload, setting)
    if not per_step[1] > 0:
        return TransferError(NO_QUERIES)
    slots = slots_of(measured, workload, setting)
    if probe is not None:
        scale = rescaled(measured, probe)
        if isinstance(scale, TransferError):
            return scale
        moved, spread, there = None, scale.spread, micro_s[0] * scale.factor
        rest, data = probe.rest_s or 0.0, (probe.rest_s or 0.0) * probe.phase_share("data_wait")
        basis = scale.basis
    else:
        here = measured.here or gpu
        moved = buckets_of(measured, here, micro_s[0], slots).on(here, gpu)
        spread = 0.0 if here.name == gpu.name else moved.spread
        there = moved.total_s
        rest, wait = _rest_on(measured, here, gpu)
        data = _data_wait(measured, workload, setting, wait, there)
        rest += data - wait + measured.rest_per_micro_s * (per_step[0] - measured.accumulation)
        own = "measured" if measured.density is None and as_measured(measured, setting) else "by its fitted step time"
        own = own if same_rows(measured, workload) else "by its fitted step time"
        basis = own if here.name == gpu.name else f"scaled from {here.name} ({_BASIS[moved.basis]})"
    if setting is not None and setting.ranks != measured.ranks:
        there *= _longest_of_ranks(measured, workload, setting)
        spread = math.hypot(spread, SCALING_SPREAD)
    return _assembled(measured, gpu, setting, per_step, micro_s, moved, there, spread, rest, data, basis)


_BASIS = {
    "kernels": "by its kernels",
    "fit": "by fixed and per-slot time",
    "layers": "by its layers",
    "total": "by its total time",
}


def _assembled(
    measured: Measured,
    gpu: Gpu,
    setting: Setting | None,
    per_step: tuple[float, float],
    micro_s: Triple,
    moved: Buckets | None,
    there: float,
    spread: float,
    rest: float,
    data: float,
    basis: str,
) -> Rate:
    """Put the parts of a step together, each with its own uncertainty, and say which of them is the longest."""
    accumulation, work = per_step
    slower = math.hypot(math.log(micro_s[2] / micro_s[0]), spread)
    faster = math.hypot(math.log(micro_s[0] / micro_s[1]), spread)
    waiting = _waiting(measured, gpu, setting, there)
    steps = (
        accumulation * there + rest + waiting,
        accumulation * there * math.exp(-faster) + rest + waiting * math.exp(-LINK_SPREAD),
        accumulation * there * math.exp(slower) + rest + waiting * math.exp(LINK_SPREAD),
    )
    bound = _bound(moved, accumulation, rest, data, waiting) if moved else None
    middle, high, low = (work / s for s in steps)
    if setting is not None:
        times = f" x {accumulation:g}" if accumulation > 1 else ""
        basis += f", batch {setting.batch}{times}"
    return Rate((middle, low, high), basis, there / micro_s[0], bound)


def _longest_of_ranks(measured: Measured, workload: Workload, setting: Setting) -> float:
    """Return how much longer the slowest of all ranks takes than one: padded, all wait for the longest row of a step.

    With accumulation the differences of a step's micro-batches even out, and are left out.
    """
    if isinstance(measured.step_time, NotIdentifiable) or setting.accumulation > 1 or not workload.padded:
        return 1.0
    alone, longest = (workload.slots(setting.batch * ranks) for ranks in (measured.ranks, setting.ranks))
    if not alone or not longest:
        return 1.0
    slots = [alone / measured.ranks, longest / setting.ranks]
    before, after = (measured.step_time.predict(each)[0] for each in slots)
    return after / before if before > 0 else 1.0


def _per_step(measured: Measured, workload: Workload, setting: Setting | None) -> tuple[float, float]:
    """Return micro-batches and queries of a step."""
    others = workload.packing is not None and not same_rows(measured, workload)
    if setting is not None and (others or not as_measured(measured, setting)):
        return setting.accumulation, setting.global_batch * workload.queries_per_row
    return measured.accumulation, (measured.queries_per_step or 0.0) * _other_ranks(measured, setting)


def _other_ranks(measured: Measured, setting: Setting | None) -> float:
    return 1.0 if setting is None else setting.ranks / measured.ranks


def _waiting(measured: Measured, gpu: Gpu, setting: Setting | None, micro_s: float) -> float:
    """Return what a step waits for gradients beyond what the measured one already did."""
    header = measured.view.header
    if header is None or setting is None:
        return 0.0
    if setting.ranks == measured.ranks:
        return 0.0
    return exposed_s(header, gpu, setting.ranks, micro_s)


def _bound(moved: Buckets, accumulation: float, rest: float, data: float, waiting: float) -> str:
    parts = {
        "matmul": accumulation * moved.matmul_s,
        "memory bandwidth": accumulation * (moved.memory_s + moved.dequantise_s),
        "host": accumulation * moved.host_s + rest - data,
        "data": data,
        "communication": waiting,
    }
    return max(parts, key=parts.__getitem__)


def _rest_on(measured: Measured, here: Gpu, gpu: Gpu) -> tuple[float, float]:
    """Return (seconds of a step besides its micro-batches, those of them that wait for data) on ``gpu``.

    Of the optimizer's time, what moving its bytes takes scales with the bandwidth; all else is the host's.
    """
    rest = measured.rest_s or 0.0
    header = measured.view.header
    trained = (header.model.trainable_parameters if header else None) or 0
    moving = ADAM_BYTES * trained / (here.bandwidth_gbs * 1e9 * READ_SHARE)
    moving = min(moving, rest * measured.phase_share("optimizer", "clip"))
    return rest + moving * (here.bandwidth_gbs / gpu.bandwidth_gbs - 1), rest * measured.phase_share("data_wait")


def _data_wait(measured: Measured, workload: Workload, setting: Setting | None, wait: float, there: float) -> float:
    """Return the seconds that a step of micro-batches of ``there`` seconds waits for its data, ``wait`` in the run.

    Loading goes with the queries. In the training's own process it is what is waited for; in workers it goes on
    while the device computes, so that where it was waited for it takes that time as well, and more of a faster device.
    """
    header = measured.view.header
    now = present_setting(measured, measured.gpu_count)
    grown = 1.0
    if setting is not None and now is not None:
        grown = setting.global_batch / setting.ranks / (now.global_batch / now.ranks)
    micro_s = micro_here(measured, workload, None)
    if header is None or not header.train.loader_workers or isinstance(micro_s, TransferError):
        return wait * grown
    computing = measured.accumulation * micro_s[0]
    if wait < STARVED * computing:
        return wait
    accumulation = setting.accumulation if setting is not None else measured.accumulation
    return max(0.0, (computing + wait) * grown - accumulation * there)


def capacity_bound(measured: Measured, workload: Workload, gpu: Gpu, setting: Setting) -> bool:
    """Whether twice the batch, were there memory for it, would do the job faster by ``CAPACITY_GAIN``."""
    if isinstance(measured.step_time, NotIdentifiable):
        return False
    doubled = msgspec.structs.replace(setting, batch=2 * setting.batch)
    now, then = (rate_on(measured, workload, gpu, each) for each in (setting, doubled))
    if isinstance(now, TransferError) or isinstance(then, TransferError):
        return False
    return then.queries_per_s[0] > CAPACITY_GAIN * now.queries_per_s[0]


def _rate_from_work(measured: Measured, workload: Workload, gpu: Gpu, setting: Setting | None) -> Rate | TransferError:
    """Return the rate of a run whose own device says nothing of a GPU: from the work of its micro-batches."""
    view = measured.view
    header = view.header
    if header is None or not view.totals.queries or not view.totals.slots:
        return TransferError(NO_QUERIES)
    if as_measured(measured, setting):
        accumulation = view.accumulation or 1.0
        batch = view.totals.queries / view.micro_batches
        ranks = float(view.data_ranks if setting is None or setting.ranks == measured.ranks else setting.ranks)
        rows = max(1, round(batch)) if workload.packing is None else measured.batch or 1
        slots = workload.slots(rows) or view.totals.slots / view.micro_batches
        if same_rows(measured, workload):
            slots = view.totals.slots / view.micro_batches
        elif workload.packing is not None:
            batch = rows * workload.queries_per_row
    else:
        assert setting is not None  # noqa: S101 - no setting is as measured
        accumulation, ranks = setting.accumulation, float(setting.ranks)
        batch = setting.batch * workload.queries_per_row
        slots = workload.slots(setting.batch) or 0.0
        if not slots:
            return TransferError("the lengths of the rows are not known; add --seq-len L")
    if not same_rows(measured, workload):
        slots *= lengthening(measured, slots / batch)[1]
    seconds = from_work(header, gpu, slots, accumulation)
    if isinstance(seconds, TransferError):
        return seconds
    waiting = _waiting(measured, gpu, setting, seconds[0] / accumulation)
    work = batch * accumulation * ranks
    middle, high, low = (work / (s + waiting) for s in seconds)
    here = view.rates.queries_per_s
    scale = here / middle if here else 1.0
    per_slot = flops_per_slot(header)
    basis = f"from {(per_slot or 0.0) / 1e9:.2g} GFLOPs per slot, not from this machine's speed"
    return Rate((middle, low, high), basis, scale)
