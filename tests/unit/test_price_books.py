"""Prices of one's own, asked for, and bundled: which is believed, and what a damaged one does."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from datetime import date
from pathlib import Path

import gpuhunt
import pytest
from gpuhunt._internal import catalog as hunt_catalog
from gpuhunt._internal import default as hunt_default
from gpuhunt._internal import storage
from makers import A40, header, log, steps

from ft_insight.catalog import find_gpu
from ft_insight.catalog.price_books import (
    PriceFileError,
    books,
    bundled,
    cache_path,
    from_file,
    quote_from,
    refreshed,
)
from ft_insight.catalog.refresh import offers_of, refresh
from ft_insight.cli import main

NVIDIA = gpuhunt.AcceleratorVendor.NVIDIA


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def item(provider: str, price: float, gpu: str = "H100", memory: float = 80, **said: object) -> gpuhunt.CatalogItem:
    facts: dict[str, object] = {"instance_name": "big", "location": "eu", "gpu_count": 1, "spot": False, **said}
    return gpuhunt.CatalogItem(
        provider=provider, price=price, cpu=8, memory=64, gpu_name=gpu, gpu_memory=memory, gpu_vendor=NVIDIA,
        disk_size=None, **facts,
    )  # type: ignore[arg-type]  # fmt: skip


def own_file(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_ones_own_price_goes_before_the_snapshot_and_leaves_the_rest_to_it(tmp_path: Path) -> None:
    shelf = books(own_file(tmp_path, "gpu,usd_per_gpu_hour\nh100,1.75\n"))
    quote, book = quote_from("H100-80GB-SXM", shelf) or pytest.fail("no price")
    assert (quote.usd_per_hour, quote.offer.provider, book.origin) == (1.75, book.origin, str(tmp_path / "mine.csv"))
    other = quote_from("A40", shelf)
    assert other is not None
    assert other[1] == bundled()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu,dollars\nh100,2\n", "has no column usd_per_gpu_hour"),
        ("", "has no column gpu and no column usd_per_gpu_hour"),
        ("gpu,usd_per_gpu_hour\n", "holds no price"),
        ("gpu,usd_per_gpu_hour\nh100,2\nh10,2\n", "line 3: unknown GPU 'h10'"),
        ("gpu,usd_per_gpu_hour\nh100,-2\n", "line 2: a price is US dollars per GPU and hour, above 0, not '-2'"),
        ("gpu,usd_per_gpu_hour\nh100,two\n", "line 2: a price is US dollars"),
        ("gpu,usd_per_gpu_hour\nh100\n", "line 2: a price is US dollars"),
        ("gpu,usd_per_gpu_hour,gpu_count\nh100,2,many\n", "line 2: gpu_count is a whole number of GPUs, not 'many'"),
        ("gpu,usd_per_gpu_hour,gpu_count\nh100,2,0\n", "line 2: gpu_count is a whole number of GPUs, not '0'"),
        ("gpu,usd_per_gpu_hour\n\n\nh100,2\nh10,2\n", "line 5: unknown GPU 'h10'"),
        ("gpu;usd_per_gpu_hour\nh100;2,5\n", "the first line names the columns, parted by commas"),
    ],
)
def test_a_file_that_is_none_is_refused_in_a_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_file(tmp_path, text)
    assert main(["prices", "--prices", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert str(path) in line


def test_a_file_typed_by_hand_and_one_from_a_spreadsheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = own_file(tmp_path, '\ufeffGPU, USD_per_gpu_hour, provider\n\nh100, 2.5 , "a\x1b[31mb\nc"\n')
    [offer] = from_file(own).offers
    assert (offer.gpu, offer.usd_per_gpu_hour) == ("H100-80GB-SXM", 2.5)
    for words in (["h100"], []):
        assert main(["prices", *words, "--prices", str(own)]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "ab c" in shown


def test_the_source_of_ones_own_price_is_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = log(tmp_path / "run.jsonl", [header(devices=(A40,), dataset={"queries": 10}), *steps(4)])
    own = own_file(tmp_path, "gpu,usd_per_gpu_hour\nh100,2\n")
    assert main(["project", str(run), "--gpu", "h100", "--prices", str(own)]) == 0
    assert f"  H100-80GB-SXM: {own}\n" in capsys.readouterr().out


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PriceFileError, match=r"cannot read the prices in .*none\.csv: No such file"):
        from_file(tmp_path / "none.csv")


def test_offers_by_hand() -> None:
    found = offers_of(
        [
            item("aws", 80.0, instance_name="p5", gpu_count=8, location="us"),
            item("aws", 88.0, instance_name="p5", gpu_count=8, location="eu"),
            item("aws", 24.0, instance_name="p5", gpu_count=8, location="us", spot=True),
            item("aws", 8.0, instance_name="p5", gpu_count=8, location="eu", spot=True),
            item("runpod", 2.5, instance_name="NVIDIA H100 PCIe"),
            item("azure", 7.0, gpu="H100NVL", memory=94),
            item("gcp", 1.0, gpu="RTX2060", memory=6),  # no card that anybody fine-tunes on
            item("gcp", 0.0),
        ],
        "2026-11-30",
    )
    told = {(o.provider, o.gpu, o.usd_per_gpu_hour, o.usd_per_gpu_hour_spot, o.region) for o in found}
    assert told == {
        ("aws", "H100-80GB-SXM", 10.0, 3.0, "us"),  # cheapest on demand, with that region's spot price
        ("runpod", "H100-80GB-PCIe", 2.5, None, "eu"),
        ("azure", "H100-NVL", 7.0, None, "eu"),
    }


def published(folder: Path, providers: dict[str, list[gpuhunt.CatalogItem]]) -> str:
    """Publish catalogues as gpuhunt's own are; return their address."""
    for name, items in providers.items():
        place = folder / name / "1"
        place.mkdir(parents=True)
        (folder / name / "version").write_text("1\n")
        text = io.StringIO()
        writer = csv.DictWriter(text, storage.CATALOG_V2_FIELDS)
        writer.writeheader()
        writer.writerows(storage.item_to_row(each) for each in items)
        with zipfile.ZipFile(place / "catalog.zip", "w") as archive:
            archive.writestr(f"{name}.csv", text.getvalue())
    return folder.as_uri()


@pytest.fixture
def hunt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real gpuhunt, asked for catalogues in a folder, with no provider that is asked over the network."""
    monkeypatch.setattr(hunt_default, "ONLINE_PROVIDER_MODULES", [])
    hunt_default.default_catalog.cache_clear()
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", (tmp_path / "published").as_uri())
    return tmp_path / "published"


def test_a_refresh_is_kept_and_goes_before_the_snapshot(hunt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = {"aws": [item("aws", 4.0)], "runpod": [item("runpod", 2.0)], "gcp": [item("gcp", 3.0)]}
    published(hunt, {name: prices.get(name, []) for name in hunt_catalog.OFFLINE_PROVIDERS})
    book, failed = refresh()
    assert failed == []
    assert (book.day, len(book.offers)) == (date.today().isoformat(), 3)
    quote, origin = quote_from("h100", books()) or pytest.fail("no price")
    assert (quote.usd_per_hour, quote.low, quote.high, origin) == (3.0, 2.0, 4.0, book)
    assert main(["prices", "h100"]) == 0
    assert "gpuhunt" in capsys.readouterr().out


def test_a_provider_that_fails_is_named_and_the_others_count(hunt: Path) -> None:
    published(hunt, {"aws": [item("aws", 4.0)]})
    book, _ = refresh()
    assert [o.provider for o in book.offers] == ["aws"]


def test_a_refresh_without_an_answer_is_a_line_and_loses_nothing(
    hunt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_path().parent.mkdir(parents=True)
    cache_path().write_text("gpu,usd_per_gpu_hour,date\nh100,2,2026-11-01\n")
    assert main(["prices", "--refresh"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no catalogue of prices answered" in line
    assert refreshed() is not None


@pytest.mark.parametrize("text", ["", "gpu,usd", "gpu,usd_per_gpu_hour,date\nh100,2,undated\n", "\x00"])
def test_a_damaged_cache_is_as_none(text: str) -> None:
    cache_path().parent.mkdir(parents=True)
    cache_path().write_text(text)
    assert refreshed() is None
    assert books() == (bundled(),)


def test_old_prices_say_so() -> None:
    book = bundled()
    assert book.words(date(2026, 12, 1)) == "bundled snapshot of 2026-11-30"
    assert book.words(date(2027, 2, 28)) == (
        "bundled snapshot of 2026-11-30, 90 days old (`ft-insight prices --refresh` asks anew)"
    )


def test_each_gpu_of_the_snapshot_is_priced_as_by_its_quote(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prices"]) == 0
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if line.strip().startswith("A10G ")]
    assert row.split()[:4] == ["A10G", "1.01", "1.01-1.01", "1"]
    assert main(["prices", "a10g", "--json"]) == 0
    assert find_gpu("a10g").name in capsys.readouterr().out


def test_project_takes_ones_own_prices_and_names_where_all_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = log(tmp_path / "run.jsonl", [header(devices=(A40,), dataset={"queries": 3600}), *steps(5)])
    mine = own_file(tmp_path, "gpu,usd_per_gpu_hour\nh100,1.75\n")
    assert main(["project", str(run), "--gpu", "h100", "a40", "--prices", str(mine), "--json"]) == 0
    rows = {row["gpu"]: row for row in json.loads(capsys.readouterr().out)["projection"]["rows"]}
    assert rows["H100-80GB-SXM"]["usd_per_hour"] == 1.75
    assert rows["A40"]["usd_per_hour"] == pytest.approx(0.43, abs=0.01)  # the snapshot's
    assert main(["project", str(run), "--gpu", "h100", "--prices", str(mine)]) == 0
    out = capsys.readouterr().out
    assert f"{mine} of " in out
    assert "bundled snapshot of 2026-11-30" in out
