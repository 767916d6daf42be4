"""Planned peaks against published ones; the whole table is what ``ft-insight validate`` prints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ft_insight.validate import peaks
from ft_insight.validate.peaks import CannotPlanError, check, recipe_of
from ft_insight.validate.table import COLUMNS

PUBLISHED = Path(__file__).resolve().parents[2].parent / "shared" / "field" / "validation.csv"

published = pytest.mark.skipif(not PUBLISHED.is_file(), reason="needs the shared field folder beside the repository")


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


@published
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


@published
def test_what_cannot_be_planned_says_why() -> None:
    checked, refused = check(rows("MetaMathQA", "Llama", "vera", "4") + rows("torchtune", "Llama", "LoRA", "2"))
    assert not checked
    assert any("plans are for full fine-tuning, LoRA and QLoRA" in line for line in refused)
    assert any("length of the rows is not told" in line for line in refused)


@published
def test_litgpt_prints_decimal_gigabytes() -> None:
    """Its 13.48 GB of Llama 2 7B are 6.74 B parameters of 2 bytes: not GiB."""
    (row,) = rows("litgpt", "Llama 2 7", "LoRA", "1")
    assert recipe_of(row).unit_bytes == 1e9


def row(**said: str) -> dict[str, str]:
    usual = {"source": "a blog", "model": "Llama-2-7B", "method": "LoRA", "grad_ckpt": "yes", "gpu": "A40"}
    shape = {"batch_per_gpu": "2", "seq_len": "1,024", "peak_mem_gib": "20"}
    return {**dict.fromkeys(COLUMNS, ""), **usual, **shape, **said}


def test_a_row_of_another_source_is_a_trainer() -> None:
    recipe = recipe_of(row())
    assert (recipe.model, recipe.length, recipe.unit_bytes, recipe.reserved) == ("llama-2-7b", 1024, 1024**3, True)
    assert (recipe.setup.method, recipe.setup.checkpointing) == ("lora", True)
    assert (recipe.setup.dtype, recipe.setup.autocast) == ("bfloat16", False)
    mixed = recipe_of(row(precision="16-mixed", grad_ckpt="no", method="Full fine-tuning")).setup
    assert (mixed.method, mixed.dtype, mixed.autocast, mixed.checkpointing) == ("full", "float32", True, False)
    whole = recipe_of(row(precision="fp32")).setup
    assert (whole.dtype, whole.autocast) == ("float32", False)


def test_litgpt_cuts_its_rows_where_the_table_says_so() -> None:
    litgpt = {"source": "Lightning-AI/litgpt config_hub", "method": "QLoRA(bnb.nf4)"}
    cut = recipe_of(row(**litgpt, seq_len="512", notes="rank 32 on q, v"))
    assert (cut.length, cut.setup.rank, cut.setup.method, cut.unit_bytes) == (512, 32, "qlora", 1e9)
    assert recipe_of(row(**litgpt, seq_len="alpaca")).length == 1304
    full = recipe_of(row(source="Lightning-AI/litgpt config_hub", method="full", seq_len="512"))
    assert (full.setup.method, full.setup.model_code) == ("full", "transformers")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Llama2 7B Chat", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("LLaMA 3.2 1B", "llama-3.2-1b"),
        ("phi-1.5 1.3 B", "phi-1.5"),
        ("Phi3-mini (3.8B)", "phi-3-mini"),
        ("Phi-2 2.7B", "phi-2"),
        ("gemma2-9b", "gemma-2-9b"),
        ("Qwen-2.5-7B-Instruct", "qwen2.5-7b"),
        ("Mistral 7B v0.1", "mistral-7b"),
    ],
)
def test_models_by_the_names_that_tables_use(said: str, name: str) -> None:
    assert recipe_of(row(model=said)).model == name


@pytest.mark.parametrize("name", ["", "Qwen-7B", "/etc/passwd", "~nobody/x", "..", "\x1b[2J"])
def test_names_that_are_no_model(name: str) -> None:
    with pytest.raises(CannotPlanError, match="not in the catalogue"):
        recipe_of(row(model=name))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"peak_mem_gib": "0"}, "its peak of memory is no number above 0: 0"),
        ({"peak_mem_gib": "nan"}, "its peak of memory is no number above 0: nan"),
        ({"batch_per_gpu": "2.5"}, "the batch is not told"),
        ({"seq_len": "long"}, "the length of the rows is not told"),
        ({"method": "LoRA (emb)"}, "LoRA (emb): plans are for full fine-tuning, LoRA and QLoRA"),
        ({"method": "QLoRA (gptq)"}, "QLoRA (gptq): plans are for full fine-tuning, LoRA and QLoRA"),
        ({"n_gpus": "8"}, "several GPUs: sharding is not planned"),
    ],
)
def test_a_row_that_cannot_be_planned_is_named_once(said: dict[str, str], why: str) -> None:
    line = f"a Llama-2-7B {said.get('method', 'LoRA')}, A40: {why}"
    assert check([row(**said)]) == ([], [line])
    assert check([row(**said)] * 3) == ([], [f"{line} (3 rows)"])


def test_what_torch_makes_of_an_odd_row_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: object) -> None:
        raise RuntimeError("Storage size calculation\noverflowed")

    monkeypatch.setattr(peaks, "_traced", overflow)
    why = "its step cannot be traced: Storage size calculation overflowed"
    assert check([row()]) == ([], [f"a Llama-2-7B LoRA, A40: {why}"])
