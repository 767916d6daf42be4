"""What clouds asked for a GPU-hour, from a bundled and dated snapshot, for when the user gives no price.

Between providers the same GPU differs up to tenfold, more than any projection errs, so a price never travels
without its provider, date, source and the range it lies in.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from ft_insight.catalog.gpus import find_gpu

SNAPSHOT_DATE: Final = "2026-11-30"
"""Day the snapshot was bundled; the offers in it are older, each with its own `Price.date`."""

_DATA: Final = Path(__file__).with_name("prices.csv")
_DOUBTFUL: Final = re.compile(
    r"marketplace minimum|up-front reservation|aggregator price|smallest host shape|UNCERTAIN"
    r"|(?:^|; )old(?:$|:)"
)


class Price(msgspec.Struct, frozen=True):
    """One offer of one provider, as its catalogue listed it, with enough beside it to judge and cite it.

    Prices are US dollars per GPU and hour (the instance's price over its `gpu_count`); spot is None where
    no spot price was listed. `gpu` is a name of the GPU catalogue. `date` is free text, because most of the
    stored catalogues bear no date: it says so and gives the period. `flag` holds doubts and remarks, often
    none.
    """

    provider: str
    instance: str
    region: str
    gpu: str
    gpu_count: int
    usd_per_gpu_hour: float
    usd_per_gpu_hour_spot: float | None
    date: str
    source: str
    flag: str

    @property
    def doubtful(self) -> bool:
        """Whether `flag` says that this is no sound on-demand price; see `quote` for the kinds."""
        return _DOUBTFUL.search(self.flag) is not None


class PriceQuote(msgspec.Struct, frozen=True):
    """The on-demand price to assume for one GPU, with the range of the providers' offers behind it.

    All in US dollars per GPU-hour. `usd_per_hour` is that of `offer`, an actual offer; `low` and `high` are
    the cheapest and dearest of the `providers` counted; `as_of` is the date of `offer` in the snapshot's own
    words.
    """

    usd_per_hour: float
    offer: Price
    low: float
    high: float
    providers: int
    as_of: str


@lru_cache(maxsize=1)
def load_prices() -> tuple[Price, ...]:
    """Every offer of the bundled snapshot, doubtful ones included, in file order, read once and kept."""
    with _DATA.open(encoding="utf-8", newline="") as file:
        rows = [{**row, "usd_per_gpu_hour_spot": row["usd_per_gpu_hour_spot"] or None} for row in csv.DictReader(file)]
    return tuple(msgspec.convert(rows, list[Price], strict=False))


def quote(gpu_name: str) -> PriceQuote | None:
    """Give the on-demand price to assume for a GPU, or None when the snapshot has no sound offer of it.

    Each provider has one vote, its cheapest sound offer: a provider that lists many instance sizes of one card
    must not decide the price. The quote is the median of the votes; with an even number of them the lower
    middle one, so that it is always a price somebody asked. Left out, by what their flag says: old catalogues (2024 to
    early 2025), a marketplace's cheapest listing of the day, up-front reservations, an aggregator's resale
    where the provider's own rows are cheaper, hosts too small to train on, and prices that the catalogue's
    own regions contradict (marked UNCERTAIN). An undated price stays in: `as_of` says so. `gpu_name` goes
    through `find_gpu`, so a name it refuses raises `UnknownGpuError`.
    """
    return quote_of(gpu_name, load_prices())


def quote_of(gpu_name: str, offers: Iterable[Price]) -> PriceQuote | None:
    """Give the price to assume from these offers, as `quote` does from the bundled ones."""
    gpu = find_gpu(gpu_name).name
    votes: dict[str, Price] = {}
    for price in offers:
        if price.gpu == gpu and not price.doubtful:
            best = votes.get(price.provider)
            if best is None or price.usd_per_gpu_hour < best.usd_per_gpu_hour:
                votes[price.provider] = price
    sound = sorted(votes.values(), key=lambda price: (price.usd_per_gpu_hour, price.provider))
    if not sound:
        return None
    middle = sound[(len(sound) - 1) // 2]
    return PriceQuote(
        usd_per_hour=middle.usd_per_gpu_hour,
        offer=middle,
        low=sound[0].usd_per_gpu_hour,
        high=sound[-1].usd_per_gpu_hour,
        providers=len(sound),
        as_of=middle.date,
    )
