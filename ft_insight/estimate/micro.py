"""A micro-batch on the run's own device: its seconds at any batch, its slots, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ft_insight.catalog import Gpu
from ft_insight.estimate.buckets import Buckets, kernel_shares, memory_share_of, split
from ft_insight.estimate.density import predict_density
from ft_insight.estimate.measured import Measured
from ft_insight.estimate.parallel import Setting
from ft_insight.estimate.step_time import NotIdentifiable
from ft_insight.estimate.transfer import TransferError
from ft_insight.estimate.work import Work, attention_share, header_work
from ft_insight.estimate.workload import Workload

Triple = tuple[float, float, float]
NO_STEPS = "the run finished fewer than two steps"
NO_QUERIES = "the batches do not tell how many queries they hold"
ATTENTION_WEIGHTS = (0.5, 0.75, 1.5)
"""Of attention's FLOPs: kernels that skip what is masked do half of them, and all reach less of a peak than matmuls."""
NEAR = 1.15
"""A batch of less than so many times the slots, or more than one over it, is of the size that a run knows."""
NO_WORK = Work(None, 0.0, 0.0, 0.0, None)


def measured_rate(measured: Measured, workload: Workload) -> Triple | TransferError:
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
    factor = _sampling_factor(steps)
    return rate, rate / factor, rate * factor


def _expected_step(measured: Measured, workload: Workload) -> Triple | TransferError | None:
    """Rate at the measured batch when the job's rows are longer or shorter than those that were seen.

    None where the run's own rows are what is to be trained: then the measured rate itself is the better figure.
    """
    if same_rows(measured, workload):
        return None
    batch = measured.batch
    if not batch:
        return TransferError("the batch size of this run is not known, so rows of other lengths cannot be told")
    micro_s = _fitted(measured, workload, batch)
    if isinstance(micro_s, TransferError):
        return micro_s
    work = batch * workload.queries_per_row * measured.accumulation * measured.ranks
    middle, low, high = (work / (measured.accumulation * s + (measured.rest_s or 0.0)) for s in micro_s)
    return middle, high, low


def same_rows(measured: Measured, workload: Workload) -> bool:
    """Whether the job's rows are as long as those that the run has seen."""
    header = measured.view.header
    return header is None or workload.length_values == (header.dataset.length_values or ())


def _sampling_factor(steps: Sequence[float]) -> float:
    """80% interval of a mean, as a factor, from the spread of what it is the mean of."""
    count = len(steps)
    mean = sum(steps) / max(1, count)
    if count < 3 or mean <= 0:
        return 1.5
    variance = sum((s - mean) ** 2 for s in steps) / (count - 1)
    return math.exp(min(2.0, 1.2816 * math.sqrt(variance / count) / mean))


def as_measured(measured: Measured, setting: Setting | None) -> bool:
    """Whether the micro-batches are those of the run."""
    return setting is None or (setting.batch == measured.batch and setting.accumulation == measured.accumulation)


def micro_here(measured: Measured, workload: Workload, setting: Setting | None) -> Triple | TransferError:
    """Return the seconds of a micro-batch of this setting on the run's own device."""
    if measured.density is not None:
        return _micro_at_density(measured, workload, setting, measured.density)
    if setting is not None and setting.batch != measured.batch:
        slots = workload.slots(setting.batch)
        fitted = _fitted(measured, workload, setting.batch)
        if not isinstance(fitted, TransferError):
            return _positive(fitted)
        if measured.batch and setting.batch < measured.batch:
            return TransferError(
                f"batch {measured.batch} does not fit, and what smaller ones take cannot be told"
                if slots is not None
                else "the lengths of the rows are not known; add --seq-len L"
            )
        return TransferError(f"what a batch of {setting.batch} takes cannot be told from this run")
    rate = measured_rate(measured, workload)
    if isinstance(rate, TransferError):
        return rate
    work = (measured.queries_per_step or 0.0) if same_rows(measured, workload) else 0.0
    work = work or (measured.batch or 0) * workload.queries_per_row * measured.accumulation * measured.ranks
    if not work:
        return TransferError(NO_QUERIES)

    def seconds(per_s: float) -> float:
        whole = work / per_s
        return max(whole - (measured.rest_s or 0.0), 1e-3 * whole) / measured.accumulation

    return _positive((seconds(rate[0]), seconds(rate[2]), seconds(rate[1])))


def _fitted(measured: Measured, workload: Workload, batch: int) -> Triple | TransferError:
    """Return the seconds of a micro-batch of ``batch`` of the job's rows, by the model of several runs or of this one.

    Where one run's model is asked for rows of other lengths, attention's share comes from its FLOPs.
    """
    slots = workload.slots(batch)
    if slots is None:
        return TransferError("the lengths of the rows are not known; add --seq-len L")
    if measured.joint is not None and "length_s" in measured.joint.best.names:
        return measured.joint.predict(slots, length=slots / batch)
    if isinstance(measured.step_time, NotIdentifiable):
        return _near(measured, measured.step_time, slots)
    if same_rows(measured, workload):
        return measured.step_time.predict(slots)
    every = [measured.step_time.predict(slots * more) for more in lengthening(measured, slots / batch)]
    return every[1][0], min(low for _, low, _ in every), max(high for _, _, high in every)


def _near(measured: Measured, unfitted: NotIdentifiable, slots: float) -> Triple | TransferError:
    """Return the seconds of nearly the one size that a run knows: between all fixed and all per slot."""
    if unfitted.known is None or not 1 / NEAR < slots / unfitted.known[0] < NEAR:
        return TransferError(f"rows of other lengths: {unfitted.reason}")
    seconds, ratio = unfitted.known[1], slots / unfitted.known[0]
    scatter = _sampling_factor([m.compute_s for m in measured.view.micro if m.compute_s])
    return seconds * (1 + ratio) / 2, seconds * min(1.0, ratio) / scatter, seconds * max(1.0, ratio) * scatter


def lengthening(measured: Measured, length: float) -> Triple:
    """Return how many times the work of the run's slots a slot of a row of ``length`` is, by ``ATTENTION_WEIGHTS``.

    1 where rows are packed: a row is then not what attention sees.
    """
    view, seen = measured.view, measured.length
    header = view.header
    if header is None or header.train.packing or header.train.padding_free or seen is None:
        return 1.0, 1.0, 1.0
    attending = {part.layer for part in view.layers if part.kind == "attention"}
    layers = len(attending) if view.layers else None
    there, here = (attention_share(header, each, layers) for each in (length, seen))
    less, same, more = ((1 + weight * there) / (1 + weight * here) for weight in ATTENTION_WEIGHTS)
    return less, same, more


def _micro_at_density(
    measured: Measured, workload: Workload, setting: Setting | None, density: float
) -> Triple | TransferError:
    """Return the seconds of a micro-batch where a token passes through another share of the experts."""
    joint = measured.joint
    if joint is not None and "experts_s" in joint.best.design.terms:
        slots = _counted_slots(measured, workload, setting)
        batch = setting.batch if setting else measured.batch
        if slots and batch:
            return _positive(joint.predict(slots, density, slots / batch if "length_s" in joint.best.names else None))
    found = predict_density(measured.view, density, slots_of(measured, workload, setting), measured.step_time)
    return TransferError(found.reason) if isinstance(found, NotIdentifiable) else _positive(found.micro_s)


def _positive(triple: Triple) -> Triple:
    middle = max(triple[0], 1e-9)
    return middle, min(max(triple[1], 1e-9), middle), max(triple[2], middle)


def slots_of(measured: Measured, workload: Workload, setting: Setting | None) -> float | None:
    """Return the slots of a micro-batch, those of longer rows than the run's as the more slots that they work like."""
    slots = _counted_slots(measured, workload, setting)
    if setting is None or slots is None or same_rows(measured, workload):
        return slots
    return slots * lengthening(measured, slots / setting.batch)[1]


def _counted_slots(measured: Measured, workload: Workload, setting: Setting | None) -> float | None:
    """Return the slots of a micro-batch: as counted where it is the run's own, else as expected of its rows."""
    view = measured.view
    if as_measured(measured, setting) and same_rows(measured, workload) and view.totals.slots:
        return view.totals.slots / view.micro_batches
    return workload.slots(setting.batch) if setting else None


def buckets_of(measured: Measured, gpu: Gpu, micro_s: float, slots: float | None) -> Buckets:
    """Return the buckets of a micro-batch of ``slots`` that took ``micro_s`` on ``gpu``, the run's own."""
    header = measured.view.header
    work = header_work(header, slots, measured.density) if header else None
    fixed = None
    if not isinstance(measured.step_time, NotIdentifiable) and slots:
        share = measured.step_time.predict(1.0)[0] / max(measured.step_time.predict(slots)[0], 1e-12)
        # more experts per token make the slots longer, not what is fixed
        whole = micro_s if measured.density is None else measured.step_time.predict(slots)[0]
        fixed = min(micro_s, whole * min(1.0, share))
    return split(
        micro_s,
        work or NO_WORK,
        gpu,
        fixed_s=fixed,
        seen=kernel_shares(measured.view.kernels, gpu),
        memory_share=memory_share_of(measured.view.layers),
    )
