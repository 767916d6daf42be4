"""Tokens per expert, from the indices that each router hands to its experts, never by top-k over logits.

Counting runs on the device, into one small tensor per layer, and is read once per flush. Recomputation is skipped
(a router called from within backward), padding is left out by the attention mask, evaluation is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ft_insight.callbacks.clock import Counts
from ft_insight.callbacks.router_adapters import APPROXIMATE, EXACT, OUTPUT, Heard, UnreadableError
from ft_insight.callbacks.router_rows import RowCount, Rows
from ft_insight.callbacks.router_search import Router, find_routers, plain_name

__all__ = ["Flush", "Router", "RouterCounter", "find_routers", "plain_name"]

BELOW, ABOVE, TOKENS = 0, -2, -1
"""Bins of a layer beside those of its experts: for indices below 0 and beyond the experts, and for tokens."""
TRAIN = "train"


@dataclass(slots=True)
class Flush:
    """Counts of one stretch of training, on their way to the host."""

    mode: str
    layers: tuple[str, ...]
    counts: Counts
    """Stacked (layers, 1 + widest + 2): the bin for what lies below, experts, what lies beyond, the tokens routed. Then
    one more row for each of ``rows``, in their order: the same without regard to padding."""
    experts: tuple[int, ...]
    padding_counted: bool
    method: str = EXACT
    """That of the weakest of its layers."""
    rows: dict[int, RowCount] = field(default_factory=dict)
    """By layer: what its experts were called with, for those that are modules of their own."""


class _Mode:
    """All counts of one mode since the last flush."""

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.unmasked: dict[int, torch.Tensor] = {}
        self.rows: dict[int, Rows] = {}
        self.padding_counted = False


class RouterCounter:
    """Counts for all routers of a model. The session calls ``begin_forward`` before each forward of the root."""

    def __init__(self, routers: list[Router]) -> None:
        self.routers = routers
        self._mode: str | None = None
        self._mask: torch.Tensor | None = None
        self._padded = False
        self._width = max(r.experts for r in routers) + 3
        self._modes: dict[str, _Mode] = {}
        self._weights: dict[tuple[torch.device, int, int, bool], tuple[torch.Tensor, torch.Tensor | int, bool]] = {}
        self._all_ones: dict[torch.device, torch.Tensor] = {}
        self._decided: set[int] = set()
        self.calls = 0
        """Calls of routers in training steps."""
        self._heard: set[int] = set()
        self._unreadable: set[int] = set()

    def begin_forward(self, mode: str | None, mask: torch.Tensor | None) -> None:
        """Set what the routers called next are to be counted for; None counts nothing."""
        self._settle_all()
        self._mode = mode
        flat = isinstance(mask, torch.Tensor) and mask.dim() == 2
        self._mask = mask.ne(0).to(torch.int64) if mask is not None and flat and mode is not None else None
        self._padded = mask is not None
        self._weights.clear()

    def count(self, index: int, heard: Heard) -> None:
        """Add what was heard of router ``index``: its choice, or a part of what tells it."""
        mode = self._mode
        # -1 outside of backward: a router called within is being recomputed for a checkpoint
        if mode is None or index in self._unreadable or torch._C._current_graph_task_id() != -1:
            return
        self._heard.add(index)
        try:
            self._count(mode, index, heard)
        except UnreadableError:
            self._unreadable.add(index)  # it is left alone, and the others are counted

    def _count(self, mode: str, index: int, heard: Heard) -> None:
        router = self.routers[index]
        if isinstance(heard.source, int):
            self._rows(mode, index).expert_called(heard)
            return
        chosen = router.choice.read(heard)
        if chosen is None:
            if heard.source == OUTPUT and router.tap.experts:
                self._decided.add(index)
                self.calls += mode == TRAIN
                self._settle(mode, index)
                self._rows(mode, index).router_called(heard.value)
            return
        if index not in self._decided:
            self._decided.add(index)
            router.tap.keep(heard.source)
        self.calls += mode == TRAIN
        modes = self._of(mode)
        if not self._add(modes.buffers, index, chosen, masked=True):
            modes.padding_counted = True

    def _of(self, mode: str) -> _Mode:
        return self._modes.setdefault(mode, _Mode())

    def _rows(self, mode: str, index: int) -> Rows:
        rows = self._of(mode).rows
        if index not in rows:
            rows[index] = Rows(self.routers[index].experts)
        return rows[index]

    def _add(self, buffers: dict[int, torch.Tensor], index: int, chosen: torch.Tensor, *, masked: bool) -> bool:
        """Add a choice to a layer's bins; return False if padding could not be told, though there may be some."""
        chosen = chosen.reshape(-1, chosen.shape[-1])
        tokens, k = chosen.shape
        router = self.routers[index]
        weights, total, told = self._spread(router.masked and masked, tokens, k, chosen.device)
        if index not in buffers:
            buffers[index] = torch.zeros(self._width, dtype=torch.int64, device=chosen.device)
        buffer = buffers[index]
        # clamped, for an index out of range would end a CUDA process
        bins = chosen.reshape(-1).to(torch.int64).clamp(-1, router.experts).add_(1)
        buffer.scatter_add_(0, bins, weights)
        buffer[TOKENS].add_(total)
        return told

    def _spread(
        self, masked: bool, tokens: int, k: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, bool]:
        """Return a weight for each choice, 0 for padding, and their sum over tokens; once per forward and shape."""
        key = (device, tokens, k, masked and self._mask is not None)
        if key not in self._weights:
            weights = _fitting(self._mask, tokens) if self._mask is not None and masked else None
            if weights is None:
                self._weights[key] = self._ones(tokens * k, device), tokens, not self._padded
            else:
                weights = weights.to(device)
                self._weights[key] = weights.unsqueeze(1).expand(-1, k).reshape(-1), weights.sum(), True
        return self._weights[key]

    def _ones(self, size: int, device: torch.device) -> torch.Tensor:
        """Return so many ones, a part of the most that have been asked for."""
        known = self._all_ones.get(device)
        if known is None or known.numel() < size:
            self._all_ones[device] = known = torch.ones(size, dtype=torch.int64, device=device)
        return known[:size]

    def _settle_all(self) -> None:
        if self._mode is not None and self._mode in self._modes:
            for index in self._modes[self._mode].rows:
                self._settle(self._mode, index)

    def _settle(self, mode: str, index: int) -> None:
        """Take in the last call of a router whose experts are counted by their rows."""
        modes = self._of(mode)
        chosen = self._rows(mode, index).settle(self._mask is not None)
        if chosen is None:
            return
        told = self._add(modes.buffers, index, chosen, masked=True)
        self._add(modes.unmasked, index, chosen, masked=False)
        if not told:
            modes.rows[index].count.confirmable = False

    def silent(self) -> list[Router]:
        """Return the routers that were called and handed over nothing that tells their choice."""
        return [self.routers[index] for index in sorted(self._heard - self._decided | self._unreadable)]

    def listen_where_told(self) -> None:
        """Leave each router that has told its choice with the one hook that heard it.

        A model whose state is put back to what it was before a pass has the hooks of before that pass too.
        """
        for router in self.routers:
            if (source := router.choice.source) is not None:
                router.tap.keep(source)

    def flush(self) -> list[Flush]:
        """Take all counts since the last flush, one stacked copy per mode, and begin anew."""
        flushed = [self.take(mode) for mode in list(self._modes)]
        return [f for f in flushed if f is not None]

    def take(self, mode: str) -> Flush | None:
        """Take the counts of one mode alone and begin it anew; None if there are none."""
        self._settle_all()
        counts = self._modes.pop(mode, None)
        return self._flush(mode, counts) if counts is not None else None

    def _flush(self, mode: str, counts: _Mode) -> Flush | None:
        order = sorted({*counts.buffers, *counts.rows})
        if not order:
            return None
        home = next((b.device for b in counts.buffers.values()), torch.device("cpu"))
        none = torch.zeros(self._width, dtype=torch.int64, device=home)
        listed = [i for i in order if i in counts.rows]
        stack = [counts.buffers.get(i, none) for i in order] + [counts.unmasked.get(i, none) for i in listed]
        routers = [self.routers[i] for i in order]
        approximate = any(r.method == APPROXIMATE for r in routers)
        return Flush(
            mode,
            tuple(r.name for r in routers),
            Counts(torch.stack([row.to(home, non_blocking=True) for row in stack])),
            tuple(r.experts for r in routers),
            counts.padding_counted,
            APPROXIMATE if approximate else EXACT,
            {order.index(i): counts.rows[i].take() for i in listed},
        )


def _fitting(mask: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Return the mask of so many tokens: all of it, or its last column where all but one of each row are in a cache."""
    if mask.numel() == tokens:
        return mask.reshape(-1)
    return mask[:, -1] if mask.shape[0] == tokens and mask.shape[1] else None
