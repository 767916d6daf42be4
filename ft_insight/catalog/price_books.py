"""Where prices come from, in the order in which they are believed: a file of the user's, a refresh, the snapshot."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import msgspec

from ft_insight.catalog.gpus import find_gpu
from ft_insight.catalog.prices import SNAPSHOT_DATE, Price, PriceQuote, load_prices, quote_of

REQUIRED: Final = ("gpu", "usd_per_gpu_hour")
"""Columns that a file of prices must have; the others of ``Price`` are optional."""
OLD_DAYS: Final = 30
"""Prices of GPUs move by tens of per cent within some months."""


class PriceFileError(ValueError):
    """A file of prices that cannot be used; the message is one line: what, where, what to do."""


class PriceBook(msgspec.Struct, frozen=True):
    """Offers of one origin; ``day`` is when they were collected, ISO 8601."""

    origin: str
    day: str
    offers: tuple[Price, ...]

    def words(self, today: date | None = None) -> str:
        """Say which prices these are, and that they are old where they are."""
        age = ((today or date.today()) - date.fromisoformat(self.day)).days
        old = f", {age} days old (`ft-insight prices --refresh` asks anew)" if age > OLD_DAYS else ""
        return f"{self.origin} of {self.day}{old}"


def bundled() -> PriceBook:
    """Return the snapshot that comes with the package."""
    return PriceBook("bundled snapshot", SNAPSHOT_DATE, load_prices())


def cache_path() -> Path:
    """Return where a refresh is kept: ``ft-insight/prices.csv`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ft-insight" / "prices.csv"


def refreshed() -> PriceBook | None:
    """Return what the last ``ft-insight prices --refresh`` has kept, if it did and can be read."""
    path = cache_path()
    try:
        offers = read_offers(path)
        day = max(offer.date for offer in offers)
        date.fromisoformat(day)
    except (OSError, ValueError):
        return None  # a damaged cache is no reason to fail: the snapshot is there
    return PriceBook("prices asked for with gpuhunt", day, offers)


def from_file(path: str | os.PathLike[str]) -> PriceBook:
    """Read a user's own file, CSV with the columns of ``Price``.

    Needed are ``gpu`` and ``usd_per_gpu_hour``. Raises ``PriceFileError`` for a file that cannot be read so.
    """
    own = Path(path).expanduser()
    try:
        offers = read_offers(own)
        modified = own.stat().st_mtime
    except OSError as error:
        raise PriceFileError(f"cannot read the prices in {path}: {error.strerror or error}") from None
    return PriceBook(os.fspath(own), date.fromtimestamp(modified).isoformat(), offers)


def books(path: str | os.PathLike[str] | None = None) -> tuple[PriceBook, ...]:
    """Return all books there are, the one that is believed first in front."""
    own = (from_file(path),) if path is not None else ()
    kept = refreshed()
    return (*own, *((kept,) if kept is not None else ()), bundled())


def quote_from(gpu_name: str, shelf: Sequence[PriceBook]) -> tuple[PriceQuote, PriceBook] | None:
    """Return the quote of the first book that has a sound offer of this GPU, and that book."""
    for book in shelf:
        found = quote_of(gpu_name, book.offers)
        if found is not None:
            return found, book
    return None


def read_offers(path: Path) -> tuple[Price, ...]:
    """Read offers; GPU names are resolved as people type them. Raises ``PriceFileError`` with file and line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, skipinitialspace=True)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            missing = [name for name in REQUIRED if name not in reader.fieldnames]
            if missing:
                wanted = "the first line names the columns, parted by commas"
                raise PriceFileError(f"{path} has no column {' and no column '.join(missing)}: {wanted}")
            # lines are counted by the reader: it passes over blank ones, and a quoted cell may hold several
            offers = tuple(_offer(path, reader.line_num, row) for row in reader)
        except (UnicodeDecodeError, csv.Error) as error:
            raise PriceFileError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not offers:
        raise PriceFileError(f"{path} holds no price")
    return offers


def _offer(path: Path, number: int, row: dict[str, str]) -> Price:
    known = {name: row.get(name) or "" for name in ("provider", "instance", "region", "date", "source", "flag")}
    try:
        return Price(
            **{**known, "provider": known["provider"] or os.fspath(path), "date": known["date"] or "undated"},
            gpu=find_gpu(row["gpu"] or "").name,
            gpu_count=_count(row.get("gpu_count") or "1"),
            usd_per_gpu_hour=_dollars(row["usd_per_gpu_hour"]),
            usd_per_gpu_hour_spot=_dollars(row["usd_per_gpu_hour_spot"]) if row.get("usd_per_gpu_hour_spot") else None,
        )
    except ValueError as error:
        raise PriceFileError(f"{path}, line {number}: {error}") from None


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not int(text):
        raise ValueError(f"gpu_count is a whole number of GPUs, not {text!r}")
    return int(text)


def _dollars(text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise ValueError(f"a price is US dollars per GPU and hour, above 0, not {text!r}")
    return value


def write_offers(path: Path, offers: Sequence[Price]) -> None:
    """Write offers as :func:`read_offers` reads them; the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Price.__struct_fields__)
        writer.writeheader()
        writer.writerows(msgspec.structs.asdict(offer) for offer in offers)
    part.replace(path)
