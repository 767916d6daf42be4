"""Load of experts: from token counts to shares, imbalance and dead experts, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from ft_insight.records import Experts


class LayerLoad(msgspec.Struct, frozen=True):
    """Tokens per expert of one MoE layer since the start of the segment."""

    layer: str
    counts: tuple[int, ...]
    tokens: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Each expert's fraction of the layer's assignments; all 0 where nothing was routed."""
        total = sum(self.counts)
        return tuple(c / total if total else 0.0 for c in self.counts)

    @property
    def ideal(self) -> float:
        """The fraction that every expert has when the load is even."""
        return 1 / len(self.counts)

    @property
    def worst(self) -> int:
        """The busiest expert."""
        return max(range(len(self.counts)), key=self.counts.__getitem__)

    @property
    def max_over_mean(self) -> float:
        """Busiest expert's load over the mean load: 1 is even, the number of experts is collapse; 0 of nothing."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 0.0

    @property
    def cv(self) -> float:
        """Coefficient of variation of the load over experts, standard deviation (n) over mean; 0 of nothing."""
        if not sum(self.counts):
            return 0.0
        spread = sum((share - self.ideal) ** 2 for share in self.shares) / len(self.counts)
        return math.sqrt(spread) / self.ideal

    @property
    def entropy(self) -> float:
        """Entropy of the load over its maximum: 1 is even, 0 is one expert alone."""
        if len(self.counts) < 2:
            return 1.0
        return -sum(p * math.log(p) for p in self.shares if p > 0) / math.log(len(self.counts))

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that got no token at all."""
        return tuple(e for e, count in enumerate(self.counts) if count == 0) if self.tokens else ()


class ModelLoad(msgspec.Struct, frozen=True):
    """Load of all MoE layers together, as the paper looks at it.

    ``means[e]`` is tokens per query that expert ``e`` got, mean over layers. The paper's variance is taken over these
    means; some of its published values divide by n, others by n - 1, so that both are here under their names.
    """

    means: tuple[float, ...]
    queries: int

    @property
    def variance_n(self) -> float:
        """Variance over the experts' means, divided by the number of experts."""
        return _squares(self.means) / len(self.means)

    @property
    def variance_n1(self) -> float | None:
        """The same divided by one less, the estimator of a sample; None of a single expert."""
        return _squares(self.means) / (len(self.means) - 1) if len(self.means) > 1 else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Each expert's fraction of all assignments."""
        total = sum(self.means)
        return tuple(mean / total if total else 0.0 for mean in self.means)


def _squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def model_load(layers: Sequence[LayerLoad], queries: int | None) -> ModelLoad | None:
    """Bring the layers together; None where they have different numbers of experts, or queries were not counted."""
    widths = {len(load.counts) for load in layers}
    if len(widths) != 1 or not queries:
        return None
    experts = widths.pop()
    means = tuple(sum(load.counts[e] for load in layers) / len(layers) / queries for e in range(experts))
    return ModelLoad(means, queries)


EDGE = 0.05
"""Share of a run's steps that its start, or its end, is taken to be where experts' load is compared."""


class LoadChange(msgspec.Struct, frozen=True):
    """Load at the start and at the end of a run, layer by layer and all layers together, and what it was counted on."""

    start: tuple[LayerLoad, ...]
    end: tuple[LayerLoad, ...]
    model_start: ModelLoad | None
    model_end: ModelLoad | None
    rows: int | None = None
    """Rows of one pass before and one after the run; None where the start and end of training are compared."""

    @property
    def basis(self) -> str:
        """What was counted at both times, in words."""
        if self.rows is None:
            return f"first and latest {EDGE:.0%} of the steps"
        return f"the same {self.rows:,} row{'s' if self.rows != 1 else ''} before and after the run"

    @property
    def moved(self) -> int | None:
        """The expert whose share, over all layers, changed most; None where there is no such share."""
        if self.model_start is None or self.model_end is None:
            return None
        before, after = self.model_start.shares, self.model_end.shares
        return max(range(len(before)), key=lambda e: abs(after[e] - before[e])) if len(before) == len(after) else None


class ExpertTally:
    """Sums ``Experts`` records of one mode, by layer."""

    def __init__(self, mode: str = "train") -> None:
        self._mode = mode
        self._counts: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self.queries: int | None = 0
        """Queries behind the counts; None once a record does not tell."""
        self.method: str | None = None
        self.padding_counted = False

    @classmethod
    def of(cls, records: Iterable[Experts]) -> ExpertTally:
        """Sum some records."""
        tally = cls()
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: Experts) -> None:
        """Take in one record; those of other modes are left out."""
        if record.mode != self._mode:
            return
        self.method = record.method
        self.padding_counted |= record.padding_counted
        if self.queries is not None:
            self.queries = None if record.queries is None else self.queries + record.queries
        for layer, counts, tokens in zip(record.layers, record.counts, record.tokens, strict=False):
            self._add(layer, counts, tokens)

    def _add(self, layer: str, counts: Sequence[int], tokens: int) -> None:
        known = self._counts.setdefault(layer, [0] * len(counts))
        for expert, count in enumerate(counts[: len(known)]):
            known[expert] += count
        self._tokens[layer] = self._tokens.get(layer, 0) + tokens

    def layers(self) -> tuple[LayerLoad, ...]:
        """Return the load of every layer, in the order of the model."""
        return tuple(LayerLoad(n, tuple(c), self._tokens[n]) for n, c in self._counts.items() if c)

    @classmethod
    def merged(cls, ranks: Sequence[tuple[LayerLoad, ...]]) -> tuple[LayerLoad, ...]:
        """Sum the layers of several ranks by name."""
        tally = cls()
        for layers in ranks:
            for load in layers:
                tally._add(load.layer, load.counts, load.tokens)
        return tally.layers()
