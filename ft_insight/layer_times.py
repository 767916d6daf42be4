"""Time per layer and kind of layer: the mean over all timed micro-batches, and shares of the model's time."""

from __future__ import annotations

import msgspec

from ft_insight.records import Layers

KIND_WORDS = {
    "head_and_loss": "head and loss",
    "input_norm": "input norm",
    "post_attention_norm": "post-attention norm",
    "final_norm": "final norm",
    "shared_expert": "shared expert",
    "moe": "MoE glue",
    "layer": "layer glue",
    "mlp": "MLP",
    "mamba": "Mamba mixer",
    "around": "around the layers",
}
MOE_KINDS = frozenset({"moe", "router", "experts", "shared_expert"})


class LayerTime(msgspec.Struct, frozen=True):
    """Mean seconds of one kind in one decoder layer (None: outside of them), per micro-batch, its own work only."""

    layer: int | None
    kind: str
    forward_s: float
    recompute_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward, recomputation and backward together."""
        return self.forward_s + self.recompute_s + self.backward_s


class KindTime(msgspec.Struct, frozen=True):
    """Mean seconds of one kind over all layers, per micro-batch, and its fraction of the model's time."""

    kind: str
    forward_s: float
    recompute_s: float
    backward_s: float
    share: float

    @property
    def words(self) -> str:
        """Its name for people."""
        return KIND_WORDS.get(self.kind, self.kind.replace("_", " "))


class LayerTally:
    """Sums ``Layers`` records."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int | None, str], list[float]] = {}
        self.micro_batches = 0
        self.steps = 0

    def add(self, record: Layers) -> None:
        """Take in one sampled step."""
        self.micro_batches += record.micro_batches
        self.steps += 1
        columns = zip(
            record.layers, record.kinds, record.forward_s, record.recompute_s, record.backward_s, strict=False
        )
        for layer, kind, *seconds in columns:
            sums = self._sums.setdefault((layer, kind), [0.0, 0.0, 0.0])
            for column, value in enumerate(seconds):
                sums[column] += value

    def layers(self) -> tuple[LayerTime, ...]:
        """Return the means, outside of the layers first, then layer by layer."""
        count = max(1, self.micro_batches)
        order = sorted(self._sums, key=lambda key: -1 if key[0] is None else key[0])
        means = {key: [value / count for value in sums] for key, sums in self._sums.items()}
        return tuple(LayerTime(layer, kind, *means[layer, kind]) for layer, kind in order)


def by_kind(layers: tuple[LayerTime, ...]) -> tuple[KindTime, ...]:
    """Sum over layers, the most expensive kind first."""
    sums: dict[str, list[float]] = {}
    for time in layers:
        row = sums.setdefault(time.kind, [0.0, 0.0, 0.0])
        for column, value in enumerate((time.forward_s, time.recompute_s, time.backward_s)):
            row[column] += value
    whole = sum(map(sum, sums.values()))
    kinds = [KindTime(k, row[0], row[1], row[2], sum(row) / whole if whole else 0.0) for k, row in sums.items()]
    return tuple(sorted(kinds, key=lambda k: -k.share))
