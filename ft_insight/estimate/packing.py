"""Rows packed into rows of a fixed size, as TRL's best fit decreasing does it: how many of them fill one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec

MOST_ROWS = 1000
"""Rows that are packed together: what ``datasets`` maps at once. Of a larger data set as many, in proportion."""


class Packing(msgspec.Struct, frozen=True):
    """Rows of a batch that each hold several rows of the data set."""

    rows: float
    """Rows of the data set in one of them, on average."""
    size: int
    """Tokens that one of them holds at most."""


def is_packed(strategy: str | None) -> bool:
    """Whether rows stay whole in a packed one; ``wrapped`` packing chops the text, and a query is a chunk of it."""
    return bool(strategy) and strategy != "wrapped"


def packed(values: Sequence[int], counts: Sequence[int], size: int) -> Packing:
    """Pack a histogram of lengths into rows of ``size`` tokens: longest first, each where it leaves the least room."""
    share = min(1.0, MOST_ROWS / max(1, sum(counts)))
    spaces: list[int] = []
    rows = bins = 0
    carried = 0.0
    for value, count in sorted(zip(values, counts, strict=True), reverse=True):
        carried += count * share
        whole = round(carried)
        carried -= whole
        length = min(value, size)
        for _ in range(whole):
            at = bisect_left(spaces, length)
            space = spaces.pop(at) if at < len(spaces) else size
            bins += space == size
            if space > length:
                insort(spaces, space - length)
        rows += whole
    return Packing(rows / bins if bins else 1.0, size)
