"""What packing makes of rows: told from a histogram of lengths, against TRL's own packing and a real packed run."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset
from trl.data_utils import pack_dataset

from ft_insight import FtInsightCallback
from ft_insight.estimate import Ask, measure, project
from ft_insight.estimate.packing import packed
from ft_insight.estimate.workload import Lengths, workload_of
from ft_insight.reader import read_run
from tests.train.conftest import MakeTrainer, dense_model, token_rows


def lengths(count: int, low: int, high: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def histogram(sizes: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = sorted(Counter(sizes).items())
    return tuple(value for value, _ in pairs), tuple(count for _, count in pairs)


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        (lengths(300, 5, 60), 64),
        (lengths(1000, 1, 200), 128),  # some longer than a packed row, and cut off
        ([64] * 10, 64),
        ([33] * 10, 64),
        ([7], 64),
    ],
)
def test_rows_in_a_packed_row_are_as_many_as_trl_packs(sizes: list[int], size: int) -> None:
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in sizes]})
    theirs = pack_dataset(rows, size, "bfd", {"keep_in_memory": True})
    assert packed(*histogram(sizes), size).rows == pytest.approx(len(sizes) / len(theirs))


def test_a_large_data_set_is_packed_in_proportion() -> None:
    sizes = lengths(20_000, 5, 60)
    theirs = pack_dataset(Dataset.from_dict({"input_ids": [[1] * n for n in sizes]}), 64, "bfd")
    assert packed(*histogram(sizes), 64).rows == pytest.approx(len(sizes) / len(theirs), rel=0.02)


def test_a_packed_run_is_priced_in_rows_of_the_data_set(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    sizes = lengths(200, 4, 16)
    rows = token_rows(sizes)
    options = {"packing": True, "packing_strategy": "bfd", "max_length": 32, "per_device_train_batch_size": 2}
    path = tmp_path / "run.jsonl"
    make_trainer(model=dense_model(), rows=rows, callbacks=[FtInsightCallback(path)], max_steps=12, **options).train()
    view, _ = read_run(path)
    bins = len(pack_dataset(rows, 32, "bfd"))

    own = workload_of(view)
    assert (own.queries, own.longest, own.padded) == (200, 32, False)
    assert own.queries_per_row == pytest.approx(200 / bins, rel=0.15)  # 24 of the packed rows were seen
    assert own.slots(2) == pytest.approx(2 * sum(sizes) / bins, rel=0.15)

    # rows half as long: twice as many of them in a packed row, and so about twice as many a second
    halves = [size // 2 for size in sizes]
    job = workload_of(view, lengths=Lengths(200, *histogram(halves)))
    bins_of_halves = len(pack_dataset(token_rows(halves), 32, "bfd"))
    assert job.queries_per_row == pytest.approx(200 / bins_of_halves)
    [row] = project(measure(view), Ask(job, ())).rows
    measured = view.rates.queries_per_s
    assert measured is not None
    assert row.queries_per_s is not None, row.unknown
    assert row.queries_per_s[0] == pytest.approx(measured * bins / bins_of_halves, rel=0.25)
