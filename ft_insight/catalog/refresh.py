"""Today's prices through gpuhunt: the one place here that asks the network, and only when told to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any

import msgspec

from ft_insight.catalog.gpus import Gpu, UnknownGpuError, find_gpu
from ft_insight.catalog.price_books import PriceBook, PriceFileError, cache_path, refreshed, write_offers
from ft_insight.catalog.prices import Price

TIMEOUT_S = 30.0
FORMS = ("pcie", "nvl")
"""What the names of instances say of a card's form; gpuhunt's own names of cards say nothing."""


def refresh() -> tuple[PriceBook, list[str]]:
    """Ask all providers that gpuhunt can ask and keep the answer; return it, and who did not answer and why.

    Raises ``PriceFileError`` with one line where gpuhunt is missing or nobody answered.
    """
    try:
        import gpuhunt
    except ImportError:
        raise PriceFileError("--refresh needs gpuhunt: pip install 'ft-insight[prices]'") from None
    with _patience():
        try:
            catalogue = gpuhunt.default_catalog()
        except Exception as error:  # noqa: BLE001 - told in one line, whatever it was
            raise PriceFileError(f"no catalogue of prices answered ({_cause(error)}); those at hand stay") from None
        items, failed = _ask(catalogue)
    offers = offers_of(items, date.today().isoformat())
    if not offers:
        raise PriceFileError(
            f"no price of a known GPU came ({'; '.join(failed) or 'empty answers'}); those at hand stay"
        )
    write_offers(cache_path(), offers)
    book = refreshed()
    assert book is not None  # noqa: S101 - just written
    return book, failed


@contextmanager
def _patience() -> Iterator[None]:
    """Bound each wait, and keep gpuhunt's own tracebacks off the terminal: what failed is said in a line."""
    before = socket.getdefaulttimeout()
    logger = logging.getLogger("gpuhunt")
    level = logger.level
    socket.setdefaulttimeout(TIMEOUT_S)
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
        logger.setLevel(level)


def _ask(catalogue: Any) -> tuple[list[Any], list[str]]:
    items: list[Any] = []
    failed: list[str] = []
    for name in [*catalogue.catalog, *(p.NAME for p in catalogue.providers)]:
        try:
            items += catalogue.query(provider=name, min_gpu_count=1)
        except Exception as error:  # noqa: BLE001 - whatever one provider does, the others count
            failed.append(f"{name}: {_cause(error)}")
    return items, failed


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def offers_of(items: Iterable[Any], day: str) -> list[Price]:
    """Turn gpuhunt's items into offers: one per provider, instance and card, in its cheapest region on demand."""
    spot: dict[tuple[str, str, str], float] = {}
    cheapest: dict[tuple[str, str, str], Price] = {}
    for item in items:
        gpu = _card(item)
        if gpu is None or not 0 < item.price < 1e6:
            continue
        each = item.price / item.gpu_count
        if item.spot:
            place = (item.provider, item.instance_name, item.location)
            spot[place] = min(each, spot.get(place, each))
            continue
        key = (item.provider, item.instance_name, gpu.name)
        if key not in cheapest or each < cheapest[key].usd_per_gpu_hour:
            cheapest[key] = Price(
                provider=item.provider,
                instance=item.instance_name,
                region=item.location,
                gpu=gpu.name,
                gpu_count=item.gpu_count,
                usd_per_gpu_hour=round(each, 6),
                usd_per_gpu_hour_spot=None,
                date=day,
                source="gpuhunt",
                flag="marketplace minimum" if item.provider in ("vastai", "lium") else "",
            )
    return [_with_spot(offer, spot) for offer in cheapest.values()]


def _with_spot(offer: Price, spot: dict[tuple[str, str, str], float]) -> Price:
    found = spot.get((offer.provider, offer.instance, offer.region))
    return msgspec.structs.replace(offer, usd_per_gpu_hour_spot=None if found is None else round(found, 6))


def _card(item: Any) -> Gpu | None:
    """Return the catalogue's entry of an item's card: by name, by the form that the instance names, by memory."""
    if not item.gpu_count or not item.gpu_name:
        return None
    form = next((word for word in FORMS if word in item.instance_name.lower()), "")
    memory = f"{item.gpu_memory:g}GB" if item.gpu_memory else ""
    for name in (
        f"{item.gpu_name} {form} {memory}",
        f"{item.gpu_name} {form}",
        f"{item.gpu_name} {memory}",
        item.gpu_name,
    ):
        try:
            gpu = find_gpu(name)
        except UnknownGpuError:
            continue
        if item.gpu_memory is None or abs(item.gpu_memory / gpu.memory_gb - 1) < 0.07:
            return gpu
    return None
