"""Experts that are modules of their own, in a list: how many rows each of them is really called with.

Which rows are padding cannot be seen there. But where the best scores of the router give the same count for every
expert, they are taken for the choice, whose rows the mask tells apart. Otherwise padding is counted, and said so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ft_insight.callbacks.router_adapters import Heard, UnreadableError


@dataclass(slots=True)
class RowCount:
    """Rows of one router's experts since the last flush; all of it is known on the host, from shapes."""

    rows: list[int]
    tokens: int = 0
    masked_rows: list[int] = field(default_factory=list)
    """Those of ``rows`` that came with a mask, to be replaced by what the mask leaves of them."""
    masked_tokens: int = 0
    confirmable: bool = True


class Rows:
    """Collects one call of a router and the calls of its experts that follow it."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._scores: torch.Tensor | None = None
        self._tokens = 0
        self._rows = [0] * experts
        self.count = self._zero()

    def _zero(self) -> RowCount:
        return RowCount([0] * self._experts, masked_rows=[0] * self._experts)

    def router_called(self, output: Any) -> None:
        """The router gave its scores."""
        parts = output if isinstance(output, tuple | list) else (output,)
        for part in parts:
            if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == self._experts:
                self._scores = part.detach().reshape(-1, self._experts)
                self._tokens = self._scores.shape[0]
                return
        raise UnreadableError("a router hands over neither expert indices nor scores")

    def expert_called(self, heard: Heard) -> None:
        """An expert was called with some rows."""
        args, named = heard.value
        tensors = [t for t in (*args, *named.values()) if isinstance(t, torch.Tensor)]
        self._rows[int(heard.source)] += tensors[0].shape[:-1].numel()

    def settle(self, masked: bool) -> torch.Tensor | None:
        """Take in the last call; return the choice to be confirmed, where there is a mask to apply to it."""
        scores, rows, tokens = self._scores, self._rows, self._tokens
        self._scores, self._rows, self._tokens = None, [0] * self._experts, 0
        if scores is None:
            return None
        self._add(rows, tokens, masked)
        k, rest = divmod(sum(rows), max(tokens, 1))
        if not masked:
            return None
        if rest or not 0 < k <= self._experts:
            self.count.confirmable = False
            return None
        return scores.topk(k, dim=-1).indices

    def _add(self, rows: list[int], tokens: int, masked: bool) -> None:
        count = self.count
        count.rows = [a + b for a, b in zip(count.rows, rows, strict=True)]
        count.tokens += tokens
        if masked:
            count.masked_rows = [a + b for a, b in zip(count.masked_rows, rows, strict=True)]
            count.masked_tokens += tokens

    def take(self) -> RowCount:
        """Return the count and begin anew."""
        count, self.count = self.count, self._zero()
        return count
