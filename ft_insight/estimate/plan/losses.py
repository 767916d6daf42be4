"""From a batch to its loss, as different trainers go: what they keep of the logits decides the peak of small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ft_insight.estimate.plan.setup import TILE_ROWS

Loss = Callable[[Any, Tensor], tuple[Tensor, Any]]
"""From (model, token ids) to (loss, what the training loop holds on to beside it)."""


def trainer_loss(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Compute the loss as transformers' Trainer does: the model's own, on logits copied to fp32."""
    outputs = model(input_ids=ids, labels=ids)
    return outputs.loss, outputs


def own_dtype_loss(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Compute a cross entropy on a shifted copy of the logits, in their own dtype."""
    outputs = model(input_ids=ids)
    logits = outputs.logits
    loss = F.cross_entropy(logits[:, :-1, :].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
    return loss, outputs


def sft_loss(model: Any, ids: Tensor) -> tuple[Tensor, Any]:
    """Compute the loss as TRL's SFTTrainer does, through its fused LM head."""
    outputs = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True)
    loss = -outputs.log_probs.sum() / outputs.label_mask.sum().clamp(min=1)
    return loss, None


LOSS: dict[str, Loss] = {
    "sft": sft_loss,
    "trainer": trainer_loss,
    "own-dtype": own_dtype_loss,
}


@contextmanager
def fused_head(model: Any) -> Iterator[Loss]:
    """Give the model TRL's fused LM head, whose kernels are Triton on a GPU: here a twin with the same tensors.

    Yields the loss to use: where this TRL has no fused head, the Trainer's own.
    """
    try:
        from trl.trainer import utils
    except ImportError:
        yield trainer_loss
        return
    if not hasattr(utils, "add_fused_lm_head") or not hasattr(utils, "_ChunkedLogProbFunction"):
        yield trainer_loss
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    with mock.patch.object(utils, "_ChunkedLogProbFunction", _Tiles):
        yield sft_loss


class _Tiles(torch.autograd.Function):
    """What ``ChunkedLogProbFunction`` of TRL holds on a GPU: one tile of logits at a time, sums in fp32.

    The kernels rewrite the tile in place, so that one round over one tile holds as much as the loop over all.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        rows, columns = hidden.shape[0], rest[1]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        sums = [hidden.new_empty(rows, dtype=torch.float32) for _ in range(7)]
        tile = hidden.new_empty(min(rows, TILE_ROWS), columns, dtype=dtype)
        part = weight[:columns].to(dtype)
        del tile, part
        log_z, logprobs, entropy = (torch.empty_like(sums[0]) for _ in range(3))
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.dtype, ctx.columns, ctx.bias = dtype, columns, bias
        top = torch.empty_like(targets, dtype=torch.bool)
        ctx.mark_non_differentiable(top)
        return logprobs, entropy, None, None, top  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = hidden.new_empty(hidden.shape, dtype=torch.float32) if needs_hidden else None
        d_weight = weight.new_empty(weight.shape, dtype=torch.float32) if needs_weight else None
        tile = hidden.new_empty(min(hidden.shape[0], TILE_ROWS), ctx.columns, dtype=ctx.dtype)
        part = weight[: ctx.columns].to(ctx.dtype)
        del tile, part
        return (
            d_hidden.to(hidden.dtype) if d_hidden is not None else None,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            torch.empty_like(ctx.bias) if needs_bias else None,
            *(None,) * 6,
        )
