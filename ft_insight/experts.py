"""Load of experts: from token counts to shares, imbalance and dead experts, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ft_insight.records import Experts


@dataclass(frozen=True, slots=True)
class LayerLoad:
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
    def dead(self) -> tuple[int, ...]:
        """Experts that got no token at all."""
        return tuple(e for e, count in enumerate(self.counts) if count == 0) if self.tokens else ()


class ExpertTally:
    """Sums ``Experts`` records of training, by layer."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self.method: str | None = None
        self.padding_counted = False

    def add(self, record: Experts) -> None:
        """Take in one record; evaluation is left out."""
        if record.mode != "train":
            return
        self.method = record.method
        self.padding_counted |= record.padding_counted
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
