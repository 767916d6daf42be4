"""Projection: throughput, hours and dollars of a whole job, where it was measured and on other GPUs."""

from __future__ import annotations

import msgspec

from ft_insight.catalog import Gpu, PriceBook, books, quote_from
from ft_insight.estimate.job_cost import dollars_of, hours_of, marked, replaced
from ft_insight.estimate.measured import Measured, measure
from ft_insight.estimate.memory import ON_CPU, UNKNOWN_LENGTHS, Room, longest_row, room_fields, room_here, room_on
from ft_insight.estimate.micro import Triple, measured_rate, same_rows
from ft_insight.estimate.parallel import Setting, present_setting, refuse_count, setting_for
from ft_insight.estimate.rate import Rate, capacity_bound, rate_on
from ft_insight.estimate.transfer import TransferError
from ft_insight.estimate.workload import Workload
from ft_insight.records import Projection, ProjectionRow
from ft_insight.run_view import RunView

__all__ = ["DEFAULT_GPUS", "Ask", "Measured", "measure", "project"]

DEFAULT_GPUS = ("H100-80GB-SXM", "A100-80GB-SXM", "L40S", "A40", "RTX4090")
OTHER_TOP_K = "the memory of another number of experts per token was not measured"

PADDING_LOSS = 1.1
"""A batch that the card's memory allows is not taken where its padding makes the run's own faster by this factor."""


class Ask(msgspec.Struct, frozen=True):
    """What is asked of a projection: the job, the GPUs, and a price that stands above the catalogue's."""

    workload: Workload
    gpus: tuple[Gpu, ...]
    price: float | None = None
    """US dollars per hour, all GPUs of the run together."""
    price_here: bool = False
    """``price`` is that of the run's own machine, not that of ``gpus``."""
    batch: int | None = None
    """Queries per micro-batch, instead of what fits."""
    top_k: int | None = None
    """Experts per token, instead of the run's."""
    counts: tuple[int, ...] = ()
    """Numbers of GPUs; empty: as many as the run had."""
    prices: tuple[PriceBook, ...] = ()
    """Where prices come from, the first in front; empty: a refresh that is kept, then the bundled snapshot."""
    probe: Measured | None = None
    """A few steps that were measured on one of ``gpus``."""


def project(measured: Measured, ask: Ask, t_s: float = 0.0) -> Projection:
    """Project a job: the run's own machine first, then each GPU and number of GPUs that is asked for."""
    here = measured.here.name if measured.here else None
    own = measured.gpu_count
    ask = msgspec.structs.replace(ask, prices=ask.prices or books())
    measured = _at_top_k(measured, ask.top_k)
    asked = [(gpu, count) for gpu in ask.gpus for count in ask.counts or (own,)]
    others = (_elsewhere(measured, ask, gpu, count) for gpu, count in asked if gpu.name != here or count != own)
    rows = [_here(measured, ask), *others]
    work = ask.workload
    prices = "; then ".join(book.words() for book in ask.prices)
    return Projection(
        t_s=t_s, queries=work.queries, epochs=work.epochs, job=work.basis, prices=prices, rows=marked(rows)
    )


def _at_top_k(measured: Measured, top_k: int | None) -> Measured:
    """Return what is measured, to be told for another number of experts per token where that is asked for."""
    model = measured.view.header.model if measured.view.header else None
    if top_k is None or (model is not None and top_k == model.experts_per_token):
        return measured
    if model is None or not model.experts:
        raise ValueError("the model of this run has no experts, as far as its log says: another top-k means nothing")
    if not 0 < top_k <= model.experts:
        raise ValueError(f"a token can pass through 1 to {model.experts} experts, not {top_k}")
    return msgspec.structs.replace(measured, density=top_k / model.experts)


def _here(measured: Measured, ask: Ask) -> ProjectionRow:
    header = measured.view.header
    unknown: dict[str, str] = {}
    space = _largest(measured, ask.workload, measured.here, unknown)
    largest = space.batch if space else None
    present = present_setting(measured, measured.gpu_count)
    setting = present
    # the run's own rows did fit; other, longer ones may not
    too_large = largest is not None and present is not None and largest < present.batch
    too_large = too_large and not same_rows(measured, ask.workload)
    changed = measured.density is not None or too_large or (ask.batch is not None and ask.batch != measured.batch)
    if changed:
        setting = setting_for(measured, measured.gpu_count, largest, ask.batch)
    found = _rate_here(measured, ask, setting if changed else None, largest)
    rate = _told(found, unknown)
    if rate is not None and _evaluation_unseen(measured.view):
        unknown["evaluation"] = "none was seen in this run: the time of evaluations is left out"
    counts = ask.counts or (measured.gpu_count,)
    own = ask.price_here or (measured.here in ask.gpus and measured.gpu_count in counts)
    price, source = (ask.price, "as given") if ask.price is not None and own else (None, None)
    if price is None and header is not None and header.price_usd_per_hour is not None:
        price, source = header.price_usd_per_hour, "as given to the callback"
    if price is None and measured.here is not None:
        price, source = _catalogue_price(ask, measured.here, measured.gpu_count)
    if price is None:
        unknown["usd"] = "no price of this machine is known: add --price USD per hour"
    gpu = measured.here
    row = ProjectionRow(
        gpu=gpu.name if gpu else (header.devices[0].name if header and header.devices else "this machine"),
        here=True,
        memory_gb=gpu.memory_gb if gpu else None,
        **room_fields(space),
        price_source=source,
        basis=rate.basis if rate else None,
        unknown=unknown,
    )
    return _filled(row, measured, ask, setting, rate, price, measured.gpu_count)


def _rate_here(measured: Measured, ask: Ask, setting: Setting | None, largest: int | None) -> Rate | TransferError:
    """Return the rate on the run's own machine: as measured, or at another batch as its model of step time says."""
    refused = _refused(ask, largest)
    if refused is not None:
        return refused
    if setting is not None and largest == 0:
        return _no_row_fits(ask)
    if setting is not None and measured.here is not None:
        return rate_on(measured, ask.workload, measured.here, setting)
    if setting is not None:
        return TransferError("other settings are only told for a GPU of the catalogue")
    rate = measured_rate(measured, ask.workload)
    if isinstance(rate, TransferError):
        return rate
    how = "measured" if same_rows(measured, ask.workload) else "by its fitted step time"
    batch = f" at batch {measured.batch}" if measured.batch else ""
    return Rate(rate, f"{how}{batch}", 1.0, _bound_here(measured, ask.workload))


def _bound_here(measured: Measured, workload: Workload) -> str | None:
    """Return the longest bucket of the run as it was measured; None on a CPU, or on a GPU of no catalogue."""
    if measured.here is None:
        return None
    found = rate_on(measured, workload, measured.here, present_setting(measured, measured.gpu_count))
    return None if isinstance(found, TransferError) else found.bound_by


def _elsewhere(measured: Measured, ask: Ask, gpu: Gpu, count: int) -> ProjectionRow:
    unknown: dict[str, str] = {}
    space = _largest(measured, ask.workload, gpu, unknown)
    largest = space.batch if space else None
    found, setting = _best_elsewhere(measured, ask, gpu, count, largest)
    rate = _told(found, unknown)
    given = ask.price is not None and not ask.price_here
    price, source = (ask.price, "as given") if given else _price_there(measured, ask, gpu, count)
    if price is None:
        unknown["usd"] = "no offer is known: add --price USD per hour"
    row = ProjectionRow(
        gpu=gpu.name,
        memory_gb=gpu.memory_gb,
        **room_fields(space),
        price_source=source,
        basis=rate.basis if rate else None,
        unknown=unknown,
    )
    return _filled(row, measured, ask, setting, rate, price, count)


def _best_elsewhere(
    measured: Measured, ask: Ask, gpu: Gpu, count: int, largest: int | None
) -> tuple[Rate | TransferError, Setting | None]:
    """Return the rate at what fits, or at the run's own batch where padding makes that the faster one."""
    setting, present = setting_for(measured, count, largest, ask.batch), present_setting(measured, count)
    found = _rate_elsewhere(measured, ask, gpu, setting, count, largest)
    if setting is None or present is None or setting == present or ask.batch is not None:
        return found, setting
    kept = present.accumulation <= 1 or present.global_batch == setting.global_batch
    if isinstance(found, TransferError) or not kept or (largest is not None and present.batch > largest):
        return found, setting
    other = _rate_elsewhere(measured, ask, gpu, present, count, largest)
    if isinstance(other, TransferError) or other.queries_per_s[0] < PADDING_LOSS * found.queries_per_s[0]:
        return found, setting
    return other, present


def _rate_elsewhere(
    measured: Measured, ask: Ask, gpu: Gpu, setting: Setting | None, count: int, largest: int | None
) -> Rate | TransferError:
    refused = _refused(ask, largest)
    if refused is not None:
        return refused
    if largest == 0:
        return _no_row_fits(ask)
    why = refuse_count(measured, count)
    if why is not None:
        return TransferError(why)
    found = rate_on(measured, ask.workload, gpu, setting, _probe_of(ask, gpu))
    if isinstance(found, TransferError) or setting is None or setting.batch != largest:
        return found
    if capacity_bound(measured, ask.workload, gpu, setting):
        return msgspec.structs.replace(found, bound_by="memory capacity")
    return found


def _probe_of(ask: Ask, gpu: Gpu) -> Measured | None:
    """Return the probe, if this is the GPU that it ran on."""
    return ask.probe if ask.probe and ask.probe.here and ask.probe.here.name == gpu.name else None


def _refused(ask: Ask, largest: int | None) -> TransferError | None:
    """Return why what is asked cannot be answered whatever the GPU takes."""
    if ask.batch is not None and largest is not None and ask.batch > largest:
        return TransferError(f"a batch of {ask.batch} does not fit: {largest} at most")
    return None


def _no_row_fits(ask: Ask) -> TransferError:
    return TransferError(f"one row of {ask.workload.longest:,} tokens does not fit into its memory")


def _told(found: Rate | TransferError, unknown: dict[str, str]) -> Rate | None:
    if isinstance(found, TransferError):
        unknown["queries_per_s"] = found.reason
        return None
    return found


def _filled(
    row: ProjectionRow,
    measured: Measured,
    ask: Ask,
    setting: Setting | None,
    rate: Rate | None,
    price: float | None,
    count: int,
) -> ProjectionRow:
    """Put in what follows from the rate and the price."""
    figures: dict[str, object] = {"gpus": count, "usd_per_hour": price}
    if rate is not None:
        hours = hours_of(rate, ask.workload, measured, setting)
        figures |= {
            "queries_per_s": rate.queries_per_s,
            "present_queries_per_s": _present(row, measured, ask, setting, rate, count),
            "hours": hours,
            "usd": dollars_of(hours, price),
            "bound_by": rate.bound_by,
        }
        if setting is not None:
            figures |= {
                "batch": setting.batch,
                "accumulation": setting.accumulation,
                "global_batch": setting.global_batch,
            }
    return replaced(row, figures)


def _present(
    row: ProjectionRow, measured: Measured, ask: Ask, setting: Setting | None, rate: Rate, count: int
) -> Triple | None:
    """Return the rate at the run's own batch on the same GPUs; None where that does not fit or cannot be told."""
    present = present_setting(measured, count)
    if present is None or setting is None or setting == present:
        return rate.queries_per_s
    if row.largest_batch is not None and present.batch > row.largest_batch:
        return None
    if row.here:
        found = measured_rate(measured, ask.workload)
        return None if isinstance(found, TransferError) else found
    gpu = next((g for g in ask.gpus if g.name == row.gpu), None)
    if gpu is None:
        return None
    other = rate_on(measured, ask.workload, gpu, present, _probe_of(ask, gpu))
    return None if isinstance(other, TransferError) else other.queries_per_s


def _largest(measured: Measured, workload: Workload, gpu: Gpu | None, unknown: dict[str, str]) -> Room | None:
    """Return the largest batch on a GPU; where it cannot be told, None, and why in ``unknown``."""
    longest = longest_row(measured.view, workload)
    found: Room | str
    if measured.density is not None:
        found = OTHER_TOP_K
    elif not measured.on_gpu:
        found = ON_CPU
    elif isinstance(measured.peak, str):
        found = measured.peak
    elif gpu is not None and gpu != measured.here:
        found = UNKNOWN_LENGTHS if longest is None else room_on(measured.peak, workload, gpu, longest, measured.view)
    else:
        found = room_here(measured.view, workload)
    if isinstance(found, str):
        unknown["largest_batch"] = found
        return None
    return found


def _price_there(measured: Measured, ask: Ask, gpu: Gpu, count: int) -> tuple[float | None, str | None]:
    """Return dollars per hour: where the run's own kind of GPU has a price as given, that, for each of them."""
    header = measured.view.header
    own = ask.price if ask.price_here else None
    own = header.price_usd_per_hour if own is None and header is not None else own
    if measured.here is not None and gpu.name == measured.here.name and own is not None:
        return own * count / measured.gpu_count, f"as given for {measured.gpu_count}"
    return _catalogue_price(ask, gpu, count)


def _catalogue_price(ask: Ask, gpu: Gpu, count: int) -> tuple[float | None, str | None]:
    found = quote_from(gpu.name, ask.prices)
    if found is None:
        return None, None
    offer, book = found
    if offer.offer.provider == book.origin:
        return offer.usd_per_hour * count, book.origin
    spread = f", median of {offer.providers} providers ${offer.low:.2f}-{offer.high:.2f}" if offer.providers > 1 else ""
    return offer.usd_per_hour * count, f"{offer.offer.provider}{spread}, {offer.as_of}"


def _evaluation_unseen(view: RunView) -> bool:
    return bool(view.header and view.header.train.eval_every_steps and not view.mean_evaluation_s)
