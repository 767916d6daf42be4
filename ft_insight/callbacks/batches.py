"""What a micro-batch holds: queries, slots, real tokens, and tokens that carry loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ft_insight.callbacks.clock import Counts

IGNORED = -100


@dataclass(slots=True)
class Shape:
    """A micro-batch's counts, some of them still on their way from the device."""

    slots: int | None = None
    rows: int | None = None
    counts: Counts | None = None
    names: tuple[str, ...] = ()

    def resolved(self, *, arrived: bool = True) -> dict[str, int | None]:
        """Return queries, slots, real_tokens and loss_tokens; None is what the batch does not tell.

        What is counted on the device is unknown too unless it has ``arrived``.
        """
        known: dict[str, int | None] = {
            "queries": self.rows,
            "slots": self.slots,
            "real_tokens": None,
            "loss_tokens": None,
        }
        if self.counts is not None and not arrived:
            known.update(dict.fromkeys(self.names))
        elif self.counts is not None:
            known.update(zip(self.names, self.counts.values(), strict=True))
        return known


def measure(inputs: Mapping[str, Any], pad_token_id: int | None) -> Shape:
    """Count one micro-batch as the model gets it; ``input_ids`` is (rows, positions).

    A query is a row, or in a flattened batch (padding-free, packed) each stretch of ``position_ids`` from 0. Real
    tokens are those that the attention mask keeps; without a mask all are, but for the padding that a flattened
    batch has at its end. Loss tokens are labels other than -100 after the shift by one.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return Shape()
    shape = Shape(slots=ids.numel(), rows=ids.shape[0])
    counts = {**_tokens(inputs, ids, pad_token_id), **_loss_tokens(inputs)}
    if "real_tokens" in counts and counts["real_tokens"] is None:
        counts["real_tokens"] = torch.tensor(ids.numel(), device=ids.device)
    if counts:
        shape.names = tuple(counts)
        shape.counts = Counts(torch.stack([c for c in counts.values() if c is not None]))
    return shape


def _tokens(inputs: Mapping[str, Any], ids: torch.Tensor, pad: int | None) -> dict[str, torch.Tensor | None]:
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        # a 4-D mask says who sees whom, not what is padding: then it is not known
        return {"real_tokens": mask.ne(0).sum()} if mask.shape == ids.shape else {}
    positions = inputs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.shape != ids.shape:
        return {"real_tokens": None}
    starts = positions.eq(0)
    if pad is None:
        return {"queries": starts.sum(), "real_tokens": None}
    padding = starts & ids.eq(pad)
    return {"queries": (starts & ~padding).sum(), "real_tokens": padding.logical_not().sum()}


def _loss_tokens(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    shifted = inputs.get("shift_labels")
    if isinstance(shifted, torch.Tensor):
        return {"loss_tokens": shifted.ne(IGNORED).sum()}
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return {}
    return {"loss_tokens": labels[:, 1:].ne(IGNORED).sum()}
