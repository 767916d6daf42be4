"""``ft-insight prices``: what GPU-hours cost, by whom and when, as a table or JSON."""

from __future__ import annotations

import msgspec

from ft_insight import units
from ft_insight.catalog import Gpu, find_gpus, load_gpus
from ft_insight.catalog.price_books import PriceBook, books, quote_from
from ft_insight.catalog.prices import Price
from ft_insight.report import to_json
from ft_insight.report.layout import Section, to_text
from ft_insight.words import clean

SAID = "US dollars per GPU and hour on demand, the median of the providers' cheapest offers"


def prices_text(names: list[str], *, file: str | None, refresh: bool, as_json: bool) -> str:
    """Tell the price assumed for each GPU, or with names all offers of those.

    Raises ``ValueError`` with one line for an unknown GPU, a file that cannot be read, or a refresh that failed.
    """
    gpus = find_gpus(names)
    notes: list[str] = []
    if refresh:
        from ft_insight.catalog.refresh import refresh as ask

        _, failed = ask()
        notes = [clean(f"no answer from {reason}") for reason in failed]
    shelf = books(file)
    if as_json:
        return to_json({gpu.name: _json(gpu, shelf, all_offers=bool(gpus)) for gpu in gpus or load_gpus()})
    order = clean("; then ".join(book.words() for book in shelf), 1000)
    sections = [_offers(gpu, shelf) for gpu in gpus] or [_overview(shelf)]
    return to_text(f"{SAID}\nfrom {order}", [*sections, Section("Notes", tuple(notes))])


def _json(gpu: Gpu, shelf: tuple[PriceBook, ...], *, all_offers: bool) -> object:
    found = quote_from(gpu.name, shelf)
    result: dict[str, object] = {
        "quote": msgspec.to_builtins(found[0]) if found else None,
        "origin": found[1].origin if found else None,
        "collected": found[1].day if found else None,
    }
    if all_offers:
        offers = [{"origin": book.origin, **msgspec.to_builtins(o)} for book in shelf for o in _of(gpu, book)]
        result["offers"] = offers
    return result


def _of(gpu: Gpu, book: PriceBook) -> list[Price]:
    return sorted((o for o in book.offers if o.gpu == gpu.name), key=lambda o: (o.usd_per_gpu_hour, o.provider))


def _overview(shelf: tuple[PriceBook, ...]) -> Section:
    rows: list[tuple[str, ...]] = [("GPU", "$/h", "range", "providers", "spot from", "offer", "origin")]
    without = []
    for gpu in load_gpus():
        found = quote_from(gpu.name, shelf)
        if found is None:
            without.append(gpu.name)
            continue
        quote, book = found
        spot = [o.usd_per_gpu_hour_spot for o in _of(gpu, book) if o.usd_per_gpu_hour_spot and not o.doubtful]
        rows.append(
            (
                gpu.name,
                f"{quote.usd_per_hour:.2f}",
                f"{quote.low:.2f}-{quote.high:.2f}",
                str(quote.providers),
                f"{min(spot):.2f}" if spot else units.NA,
                clean(", ".join(part for part in (quote.offer.provider, quote.offer.region) if part), 80),
                clean(book.origin),
            )
        )
    after = (f"no sound offer of: {', '.join(without)}",) if without else ()
    return Section("Prices", table=tuple(rows), after=after)


def _offers(gpu: Gpu, shelf: tuple[PriceBook, ...]) -> Section:
    rows: list[tuple[str, ...]] = [
        ("provider", "instance", "region", "GPUs", "$/GPU-h", "spot", "date", "source", "remarks")
    ]
    for book in shelf:
        for o in _of(gpu, book):
            spot = units.NA if o.usd_per_gpu_hour_spot is None else f"{o.usd_per_gpu_hour_spot:.2f}"
            remarks = f"not counted: {o.flag}" if o.doubtful else o.flag
            figures = (str(o.gpu_count), f"{o.usd_per_gpu_hour:.2f}", spot)
            place, source = (o.provider, o.instance, o.region), (o.date, o.source or book.origin, remarks)
            rows.append((*map(clean, place), *figures, *map(clean, source)))
    if len(rows) == 1:
        return Section(gpu.name, ("no offer is known: give --price to `ft-insight project`",))
    return Section(gpu.name, table=tuple(rows))
