"""Planned peaks against published ones; the whole table is what ``ft-insight validate`` prints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ft_insight.validate.peaks import check, recipe_of

PUBLISHED = Path(__file__).resolve().parents[2].parent / "shared" / "field" / "validation.csv"

pytestmark = pytest.mark.skipif(not PUBLISHED.is_file(), reason="needs the shared field folder beside the repository")


def rows(source: str, model: str, method: str, batch: str) -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if source in row["source"]
            and row["model"].startswith(model)
            and row["method"].startswith(method)
            and row["batch_per_gpu"] == batch
        ]


@pytest.mark.parametrize(
    ("source", "model", "method", "batch"),
    [
        ("MetaMathQA", "Llama-3.2-3B", "full-finetuning", "4"),
        ("litgpt", "StableLM", "LoRA", "1"),
    ],
)
def test_published_peaks_are_met(source: str, model: str, method: str, batch: str) -> None:
    checked, refused = check(rows(source, model, method, batch))
    assert not refused
    assert len(checked) == 1
    assert abs(checked[0].error) < 0.12


def test_what_cannot_be_planned_says_why() -> None:
    checked, refused = check(rows("MetaMathQA", "Llama", "vera", "4") + rows("torchtune", "Llama", "LoRA", "2"))
    assert not checked
    assert any("plans are for full fine-tuning, LoRA and QLoRA" in line for line in refused)
    assert any("length of the rows is not told" in line for line in refused)


def test_litgpt_prints_decimal_gigabytes() -> None:
    """Its 13.48 GB of Llama 2 7B are 6.74 B parameters of 2 bytes: not GiB."""
    (row,) = rows("litgpt", "Llama 2 7", "LoRA", "1")
    assert recipe_of(row).unit_bytes == 1e9
