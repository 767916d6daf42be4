"""Projection: throughput, hours and dollars of a whole job, where it was measured and on other GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ft_insight.catalog import Gpu, gpu_for_device, quote
from ft_insight.estimate.memory import PeakMemory, fit_peak
from ft_insight.estimate.step_time import NotIdentifiable, StepTime, fit_step_time
from ft_insight.estimate.transfer import TransferError, between_gpus, flops_per_slot, from_work
from ft_insight.estimate.workload import Workload
from ft_insight.records import Projection, ProjectionRow
from ft_insight.run_view import RunView
from ft_insight.stats import median

Triple = tuple[float, float, float]
DEFAULT_GPUS = ("H100-80GB-SXM", "A100-80GB-SXM", "L40S", "A40", "RTX4090")
NO_STEPS = "the run finished fewer than two steps"
NO_QUERIES = "the batches do not tell how many queries they hold"


@dataclass(frozen=True)
class Measured:
    """What a run says of itself that projections rest on."""

    view: RunView
    step_time: StepTime | NotIdentifiable
    peak: PeakMemory | str
    rest_s: float | None
    """Median of what a step takes besides its micro-batches."""
    here: Gpu | None
    """The GPU that it ran on, where the catalogue has it."""

    @property
    def gpu_count(self) -> int:
        """Devices of all ranks."""
        header = self.view.header
        return max(1, len(header.devices)) * header.world_size if header else 1

    @property
    def on_gpu(self) -> bool:
        """The run computed on a GPU."""
        header = self.view.header
        return bool(header and header.devices and header.devices[0].kind == "cuda")


def measure(view: RunView) -> Measured:
    """Fit all that the run has measured."""
    known = [m for m in view.micro if m.slots and m.compute_s]
    header = view.header
    device = header.devices[0] if header and header.devices else None
    return Measured(
        view=view,
        step_time=fit_step_time([float(m.slots or 0) for m in known], [float(m.compute_s or 0) for m in known]),
        peak=fit_peak(view.memory_points),
        rest_s=_rest(view),
        here=gpu_for_device(device.name, device.memory_bytes) if device and device.kind == "cuda" else None,
    )


def _rest(view: RunView) -> float | None:
    """Never below 0: a device that is ahead of the host's clock does not give time back."""
    rest = median(view.rest_s)
    return None if rest is None else max(0.0, rest)


@dataclass(frozen=True)
class Ask:
    """What is asked of a projection: the job, the GPUs, and a price that stands above the catalogue's."""

    workload: Workload
    gpus: tuple[Gpu, ...]
    price: float | None = None
    """US dollars per hour, all GPUs of the run together."""
    price_here: bool = False
    """``price`` is that of the run's own machine, not that of ``gpus``."""


def project(measured: Measured, ask: Ask, t_s: float = 0.0) -> Projection:
    """Project a job: the run's own machine first, then each GPU that is asked for."""
    here = measured.here.name if measured.here else None
    rows = [_here(measured, ask), *(_elsewhere(measured, ask, gpu) for gpu in ask.gpus if gpu.name != here)]
    work = ask.workload
    return Projection(t_s=t_s, queries=work.queries, epochs=work.epochs, job=work.basis, rows=tuple(rows))


def _here(measured: Measured, ask: Ask) -> ProjectionRow:
    view = measured.view
    header = view.header
    unknown: dict[str, str] = {}
    found = _measured_rate(measured, ask.workload)
    rate = None if isinstance(found, TransferError) else found
    if isinstance(found, TransferError):
        unknown["queries_per_s"] = found.reason
    elif _evaluation_unseen(view):
        unknown["evaluation"] = "none was seen in this run: the time of evaluations is left out"
    largest = _largest(measured, ask.workload, measured.here, unknown)
    own = ask.price_here or (measured.here is not None and measured.here in ask.gpus)
    price, source = (ask.price, "as given") if ask.price is not None and own else (None, None)
    if price is None and header is not None and header.price_usd_per_hour is not None:
        price, source = header.price_usd_per_hour, "as given to the callback"
    if price is None and measured.here is not None:
        price, source = _catalogue_price(measured.here, measured.gpu_count)
    if price is None:
        unknown["usd"] = "no price of this machine is known: add --price USD per hour"
    hours = _hours(rate, ask.workload, measured, 1.0)
    batch = header.train.batch if header else None
    gpu = measured.here
    return ProjectionRow(
        gpu=gpu.name if gpu else (header.devices[0].name if header and header.devices else "this machine"),
        here=True,
        memory_gb=gpu.memory_gb if gpu else None,
        largest_batch=largest,
        queries_per_s=rate,
        hours=hours,
        usd=_dollars(hours, price),
        usd_per_hour=price,
        price_source=source,
        basis=f"measured at batch {batch}" if batch else "measured",
        unknown=unknown,
    )


def _elsewhere(measured: Measured, ask: Ask, gpu: Gpu) -> ProjectionRow:
    unknown: dict[str, str] = {}
    largest = _largest(measured, ask.workload, gpu, unknown)
    rate, basis, scale = None, "", 1.0
    if largest == 0:
        unknown["queries_per_s"] = f"one row of {ask.workload.longest:,} tokens does not fit into its memory"
    else:
        found = _rate_on(measured, ask.workload, gpu, largest)
        if isinstance(found, TransferError):
            unknown["queries_per_s"] = found.reason
        else:
            rate, basis, scale = found
    given = ask.price is not None and not ask.price_here
    price, source = (ask.price, "as given") if given else _catalogue_price(gpu, measured.gpu_count)
    if price is None:
        unknown["usd"] = "no offer in the bundled prices: add --price USD per hour"
    hours = _hours(rate, ask.workload, measured, scale)
    return ProjectionRow(
        gpu=gpu.name,
        memory_gb=gpu.memory_gb,
        largest_batch=largest,
        queries_per_s=rate,
        hours=hours,
        usd=_dollars(hours, price),
        usd_per_hour=price,
        price_source=source,
        basis=basis or None,
        unknown=unknown,
    )


def _largest(measured: Measured, workload: Workload, gpu: Gpu | None, unknown: dict[str, str]) -> int | None:
    """Return the largest batch on a GPU; where it cannot be told, None, and why in ``unknown``."""
    largest, reason = None, None
    if not measured.on_gpu:
        reason = "the run computed on a CPU: no GPU memory was measured"
    elif isinstance(measured.peak, str):
        reason = measured.peak
    elif gpu is None:
        reason = "this GPU is not in the catalogue"
    else:
        largest, reason = measured.peak.largest_batch(gpu, workload.longest)
    if reason:
        unknown["largest_batch"] = reason
    return largest


def _catalogue_price(gpu: Gpu, count: int) -> tuple[float | None, str | None]:
    offer = quote(gpu.name)
    if offer is None:
        return None, None
    spread = f"median of {offer.providers} providers ${offer.low:.2f}-{offer.high:.2f}"
    return offer.usd_per_hour * count, f"{offer.offer.provider}, {spread}, {offer.as_of}"


def _evaluation_unseen(view: RunView) -> bool:
    return bool(view.header and view.header.train.eval_every_steps and not view.mean_evaluation_s)


def _measured_rate(measured: Measured, workload: Workload) -> Triple | TransferError:
    """Queries per second as measured, with the sampling error of the mean over the steps seen."""
    view = measured.view
    rate = view.rates.queries_per_s
    if view.totals.steps < 2:
        return TransferError(NO_STEPS)
    if rate is None or not 0 < rate < math.inf:
        return TransferError(NO_QUERIES)
    expected = _expected_step(measured, workload)
    if expected is not None:
        return expected
    steps = [y for _, y in view.curves.get("step_s", ())]
    return _with_factor(rate, _sampling_factor(steps))


def _expected_step(measured: Measured, workload: Workload) -> Triple | TransferError | None:
    """Rate at the measured batch when the job's rows are longer or shorter than those that were seen.

    None where the run's own rows, or as long ones, are what is to be trained: then the measured rate itself is the
    better figure.
    """
    view = measured.view
    if view.header is None or workload.length_values == (view.header.dataset.length_values or ()):
        return None
    batch = view.header.train.batch
    slots = workload.slots(batch) if batch else None
    if slots is None or not batch:
        return TransferError("the batch size of this run is not known, so rows of other lengths cannot be told")
    seen = [m.slots for m in view.micro if m.slots]
    if seen and max(seen) == min(seen) and 0.95 < slots / seen[0] < 1.05:
        return None
    if isinstance(measured.step_time, NotIdentifiable):
        return TransferError(f"rows of other lengths: {measured.step_time.reason}")
    return _rate_from(measured, measured.step_time.predict(slots), batch)


def _rate_from(measured: Measured, micro_s: Triple, batch: int) -> Triple:
    """Queries per second of all ranks from the time of a micro-batch."""
    accumulation = measured.view.accumulation or 1.0
    header = measured.view.header
    ranks = (header.data_parallel_size or header.world_size) if header else 1
    work = batch * accumulation * ranks
    middle, low, high = (work / (accumulation * s + (measured.rest_s or 0.0)) for s in micro_s)
    return middle, high, low


def _sampling_factor(steps: Sequence[float]) -> float:
    """80% interval of a mean, as a factor, from the spread of what it is the mean of."""
    count = len(steps)
    mean = sum(steps) / max(1, count)
    if count < 3 or mean <= 0:
        return 1.5
    variance = sum((s - mean) ** 2 for s in steps) / (count - 1)
    return math.exp(min(2.0, 1.2816 * math.sqrt(variance / count) / mean))


def _with_factor(value: float, factor: float) -> Triple:
    return value, value / factor, value * factor


def _rate_on(
    measured: Measured, workload: Workload, gpu: Gpu, largest: int | None
) -> tuple[Triple, str, float] | TransferError:
    """Return queries per second on another GPU, what that rests on, and the factor on all other times."""
    view = measured.view
    header = view.header
    if header is None or view.totals.steps < 2:
        return TransferError(NO_STEPS)
    if measured.on_gpu:
        if measured.here is None:
            return TransferError("the run's own GPU is not in the catalogue")
        scale = between_gpus(measured.here, gpu)
        if isinstance(scale, TransferError):
            return scale
        source, batch = _rate_at(measured, workload, largest)
        if isinstance(source, TransferError):
            return source
        return (
            _divided(source, (scale.factor, scale.low, scale.high)),
            f"{scale.basis}, batch {batch}",
            scale.factor,
        )
    return _rate_from_work(measured, workload, gpu)


def _rate_at(measured: Measured, workload: Workload, largest: int | None) -> tuple[Triple | TransferError, int | None]:
    """Return the rate on the run's own device at the largest batch if that can be told, else as measured."""
    header = measured.view.header
    batch = header.train.batch if header else None
    if largest and batch and largest != batch:
        slots = workload.slots(largest)
        if slots is not None and isinstance(measured.step_time, StepTime):
            return _rate_from(measured, measured.step_time.predict(slots), largest), largest
        if largest < batch:
            return TransferError(f"batch {batch} does not fit, and what smaller ones take cannot be told"), batch
    return _measured_rate(measured, workload), batch


def _rate_from_work(measured: Measured, workload: Workload, gpu: Gpu) -> tuple[Triple, str, float] | TransferError:
    view = measured.view
    header = view.header
    if header is None or not view.totals.queries or not view.totals.slots:
        return TransferError(NO_QUERIES)
    accumulation = view.accumulation or 1.0
    micro_batches = accumulation * view.totals.steps * view.data_ranks
    batch = view.totals.queries / micro_batches
    slots = workload.slots(max(1, round(batch))) or view.totals.slots / micro_batches
    if workload.length_values == (header.dataset.length_values or ()):
        slots = view.totals.slots / micro_batches
    seconds = from_work(header, gpu, slots, accumulation)
    if isinstance(seconds, TransferError):
        return seconds
    work = batch * accumulation * view.data_ranks
    rate = work / seconds[0], work / seconds[2], work / seconds[1]
    here = view.rates.queries_per_s
    scale = here / rate[0] if here else 1.0
    return rate, f"from {flops_per_slot(header):.2g} FLOPs per slot, not from this machine's speed", scale


def _divided(rate: Triple, factor: Triple) -> Triple:
    """Divide a rate by a factor on time; the intervals, both in logarithms, combine in quadrature."""
    middle = rate[0] / factor[0]
    slower = math.hypot(math.log(rate[0] / rate[1]), math.log(factor[2] / factor[0]))
    faster = math.hypot(math.log(rate[2] / rate[0]), math.log(factor[0] / factor[1]))
    return middle, middle * math.exp(-slower), middle * math.exp(faster)


def _hours(rate: Triple | None, workload: Workload, measured: Measured, scale: float) -> Triple | None:
    """Return the hours of the job. Evaluations and saves are added as measured; evaluation scales like a step."""
    if rate is None:
        return None
    extra_s = _extra_seconds(measured, workload, scale)
    middle, low, high = ((workload.total / r + extra_s) / 3600 for r in (rate[0], rate[2], rate[1]))
    return middle, low, high


def _dollars(hours: Triple | None, price: float | None) -> Triple | None:
    return None if hours is None or price is None else (hours[0] * price, hours[1] * price, hours[2] * price)


def _extra_seconds(measured: Measured, workload: Workload, scale: float) -> float:
    view = measured.view
    header = view.header
    if header is None or not view.totals.queries or not view.totals.steps:
        return 0.0
    steps = workload.total / (view.totals.queries / view.totals.steps)
    extra = 0.0
    if header.train.eval_every_steps and view.mean_evaluation_s:
        extra += steps // header.train.eval_every_steps * view.mean_evaluation_s * scale
    if header.train.save_every_steps and view.mean_save_s:
        extra += steps // header.train.save_every_steps * view.mean_save_s
    return extra
