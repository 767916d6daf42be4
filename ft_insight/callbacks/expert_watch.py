"""Tokens per expert over a run: counting on, counts on their way, and the records they become."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ft_insight.callbacks.routers import TOKENS, Flush, RouterCounter, find_routers
from ft_insight.records import Experts

FLUSH_S = 2.0
"""Counts are read from the device at most this often."""


class ExpertWatch:
    """Counts for all routers of a model. All its methods run behind the guard, as ``experts``."""

    def __init__(self, model: nn.Module) -> None:
        self.counter: RouterCounter | None = None
        self._flushed_at_s = 0.0
        self._held: list[Flush] = []
        routers = find_routers(model)
        if routers:
            self.counter = RouterCounter(routers)

    def forward_begins(self, mode: str | None, mask: torch.Tensor | None) -> None:
        """The model is called, in ``train`` or ``evaluation`` mode, or in one that is not counted."""
        if self.counter is not None:
            self.counter.begin_forward(mode, mask)

    def take(self, now_s: float) -> list[Flush]:
        """Send the counts on their way to the host, if it is time."""
        if self.counter is None or now_s - self._flushed_at_s < FLUSH_S:
            return []
        self._flushed_at_s = now_s
        return self.counter.flush()

    def tell(
        self, flushes: list[Flush], put: Callable[[Experts], None], step: int, t_s: float, *, arrived: bool
    ) -> None:
        """Put the counts that have arrived; hold those that may not have."""
        self._held += flushes
        if not arrived:
            return
        ready, self._held = self._held, []
        for flush in ready:
            put(_record(flush, step, t_s))

    def take_pass(self, mode: str, step: int, t_s: float) -> Experts | None:
        """Return what was counted in a mode of its own; None if no router was heard. The device must have done it."""
        flush = self.counter.take(mode) if self.counter is not None else None
        return None if flush is None else _record(flush, step, t_s)

    def forget(self, mode: str) -> None:
        """Drop what was counted in this mode and count nothing until the model is called again."""
        if self.counter is not None:
            self.counter.take(mode)
            self.counter.begin_forward(None, None)
            self.counter.listen_where_told()

    def finish(self, put: Callable[[Experts], None], step: int, t_s: float) -> None:
        """Put all that is left. The device must have done all its work."""
        rest = self.counter.flush() if self.counter is not None else []
        self.tell(rest, put, step, t_s, arrived=True)


def _record(flush: Flush, step: int, t_s: float) -> Experts:
    table = flush.counts.table()
    counts = [tuple(row[1 : 1 + experts]) for row, experts in zip(table, flush.experts, strict=False)]
    tokens = [row[TOKENS] for row in table[: len(counts)]]
    padding_counted = flush.padding_counted
    for unmasked, (layer, seen) in zip(table[len(counts) :], flush.rows.items(), strict=True):
        plain = unmasked[1 : 1 + flush.experts[layer]]
        if not (seen.confirmable and plain == seen.masked_rows):
            counts[layer], tokens[layer] = tuple(seen.rows), seen.tokens
            padding_counted = True
            continue
        # what came with a mask is counted by it, the rest as it came
        rest = [rows - masked for rows, masked in zip(seen.rows, seen.masked_rows, strict=True)]
        counts[layer] = tuple(a + b for a, b in zip(counts[layer], rest, strict=True))
        tokens[layer] += seen.tokens - seen.masked_tokens
    return Experts(
        step=step,
        t_s=t_s,
        mode=flush.mode,
        layers=flush.layers,
        counts=tuple(counts),
        tokens=tuple(tokens),
        method=flush.method,
        padding_counted=padding_counted,
    )
