"""The longest rows of a training set: what the largest batch is found on, not to fail in mid-epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import Subset

from ft_insight.callbacks.facts import arrow_lengths, attempt

SCANNED_ROWS = 20_000
"""Rows of a data set without Arrow's offsets whose lengths are looked at, one by one."""
STREAMED_ROWS = 2_000
"""Rows of a stream that are looked at: it has no length, and cannot be asked for its longest."""


@dataclass(frozen=True)
class LongestRows:
    """A training set's rows in descending order of length."""

    dataset: Any
    order: Sequence[int]
    longest: int | None
    """Tokens of the longest row; None where rows do not tell."""
    basis: str
    """Which rows these are, in words."""
    streamed: bool = False

    @property
    def count(self) -> int | None:
        """How many rows a batch can have at most; None for a stream."""
        return None if self.streamed else len(self.order)

    def batch(self, size: int) -> Any:
        """Return a data set of the ``size`` longest rows; a stream's are taken again where it takes more."""
        chosen = [self.order[i % len(self.order)] for i in range(size)]
        select = getattr(self.dataset, "select", None)
        return select(chosen) if callable(select) else Subset(self.dataset, chosen)


def longest_rows(dataset: Any) -> LongestRows:
    """Sort the rows of a training set by their tokens, padding and packing as they are in it.

    All rows of an Arrow data set; of others up to ``SCANNED_ROWS``, evenly spread; the first rows of a stream. Rows
    that are not tokenised yet tell no length: then they are taken in their own order.
    """
    size = attempt(lambda: len(dataset))
    if size is None:
        rows = list(islice(iter(dataset), STREAMED_ROWS))
        basis = f"the first {len(rows):,} rows of the stream"
        return _sorted(rows, list(range(len(rows))), attempt(lambda: [len(r["input_ids"]) for r in rows]), basis, True)
    indices = range(size)
    lengths = attempt(lambda: arrow_lengths(dataset))
    basis = "the data set"
    if lengths is None or len(lengths) != size:
        indices = range(0, size, -(-size // SCANNED_ROWS) or 1)
        lengths = attempt(lambda: [len(dataset[i]["input_ids"]) for i in indices])
        basis = basis if len(indices) == size else f"a sample of {len(indices):,} rows"
    if lengths is None:
        return _sorted(dataset, list(range(size)), None, "the data set, whose rows do not tell their length", False)
    return _sorted(dataset, list(indices), lengths, basis, False)


def _sorted(dataset: Any, indices: list[int], lengths: list[int] | None, basis: str, streamed: bool) -> LongestRows:
    if not lengths:
        return LongestRows(dataset, indices, None, basis, streamed)
    order = sorted(range(len(indices)), key=lambda i: -lengths[i])
    return LongestRows(dataset, [indices[i] for i in order], lengths[order[0]], basis, streamed)
