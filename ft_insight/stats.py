"""Bounded collections for streams of any length: a curve that thins itself, a sample that stays even."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")

CURVE_POINTS = 512
SAMPLE_ITEMS = 4096


class _Thinned(Generic[T]):
    """Points of at most ``limit``, however many are added.

    When it is full, neighbours are averaged in pairs and from then on each point stands for twice as many; so a
    spike is damped, never dropped, and no part of the run is preferred.
    """

    def __init__(self, limit: int, mean: Callable[[Sequence[tuple[float, T]]], tuple[float, T]]) -> None:
        self._limit = limit + limit % 2  # pairs need an even number
        self._mean = mean
        self._stride = 1
        self._points: list[tuple[float, T]] = []
        self._pending: list[tuple[float, T]] = []

    def _put(self, x: float, y: T) -> None:
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self._points.append(self._mean(self._pending) if self._stride > 1 else (x, y))
        self._pending.clear()
        if len(self._points) >= self._limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [self._mean(pair) for pair in pairs]
            self._stride *= 2

    def _all(self) -> list[tuple[float, T]]:
        """Return the points, oldest first, the latest unfinished one included."""
        return [*self._points, self._mean(self._pending)] if self._pending else self._points

    def cut_after(self, x: float) -> None:
        """Forget all points beyond ``x``: a resumed run repeats the steps after its checkpoint."""
        self._points = [p for p in self._points if p[0] <= x]
        self._pending = [p for p in self._pending if p[0] <= x]


class CurveBuilder(_Thinned[float]):
    """A curve of at most ``CURVE_POINTS`` points that thins itself."""

    def __init__(self, limit: int = CURVE_POINTS) -> None:
        super().__init__(limit, _mean_point)

    def add(self, x: float, y: float | None) -> None:
        """Add a point; None (unmeasured) leaves a gap that is not drawn."""
        if y is not None and math.isfinite(y):
            self._put(x, y)

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return the points, oldest first."""
        return tuple(self._all())


class RowCurves(_Thinned[Sequence[float | None]]):
    """Several curves over one x, each of an attribute of the rows that are added (two or more); thinned together.

    What a row does not know (None) is left out of its mean. For many attributes this is far cheaper than a
    :class:`CurveBuilder` for each.
    """

    def __init__(self, names: Sequence[str], limit: int = CURVE_POINTS) -> None:
        super().__init__(limit, _mean_row)
        self._names = names
        self._values = attrgetter(*names)

    def add(self, x: float, row: object) -> None:
        """Add a point to every curve."""
        self._put(x, self._values(row))

    def curves(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Return the points by name, oldest first; what was never known is left out."""
        points = self._all()
        columns = {
            name: tuple((x, y) for x, ys in points if (y := ys[i]) is not None and math.isfinite(y))
            for i, name in enumerate(self._names)
        }
        return {name: column for name, column in columns.items() if column}


class EvenSample(Generic[T]):
    """At most ``SAMPLE_ITEMS`` items, each of all that was added with the same chance (reservoir sampling).

    Not every n-th: that would always take the same micro-batch of a step. The same stream gives the same sample. How
    many items are passed over until the next one is taken is drawn at once (Li's algorithm L), for logs are long.
    """

    def __init__(self, limit: int = SAMPLE_ITEMS) -> None:
        self._limit = limit
        self._seen = 0
        self._next = 0
        self._weight = 1.0
        self._items: list[T] = []
        self._random = random.Random(0)

    def add(self, item: T) -> None:
        """Offer one item."""
        if self.wants():
            self.take(item)

    def add_all(self, items: Sequence[T]) -> None:
        """Offer several items."""
        if self.passes(len(items)):
            return
        for item in items:
            self.add(item)

    def passes(self, count: int) -> bool:
        """Offer ``count`` items and tell whether none of them is to be taken; else they are yet to be offered."""
        if self._seen + count >= self._next:
            return False
        self._seen += count
        return True

    def wants(self) -> bool:
        """Offer one item that is yet to be made: True if it is to be taken."""
        self._seen += 1
        return self._seen >= self._next

    def take(self, item: T) -> None:
        """Take the item that was wanted."""
        if len(self._items) < self._limit:
            self._items.append(item)
            if len(self._items) < self._limit:
                return
        else:
            self._items[int(self._random.random() * self._limit)] = item
        self._weight = max(self._weight * (1 - self._random.random()) ** (1 / self._limit), 1e-300)
        passed = math.log(1 - self._random.random()) / math.log1p(-self._weight) if self._weight < 1 else 0.0
        self._next = self._seen + int(passed) + 1

    def items(self) -> tuple[T, ...]:
        """Return the sample."""
        return tuple(self._items)


def _mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    # The last x keeps curves ending at the latest step; the mean y keeps their area.
    return points[-1][0], sum([y for _, y in points]) / len(points)


def _mean_row(rows: Sequence[tuple[float, Sequence[float | None]]]) -> tuple[float, Sequence[float | None]]:
    """Return the last x, and the mean of each column over the rows that know it."""
    return rows[-1][0], [_mean(column) for column in zip(*[row for _, row in rows], strict=True)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [y for y in values if y is not None and math.isfinite(y)]
    return sum(known) / len(known) if known else None


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None of nothing (``statistics.median`` is slow to import and raises)."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
