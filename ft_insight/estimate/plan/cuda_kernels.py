"""What CUDA kernels allocate where the operations of a CPU, on which the fake tensors live, allocate otherwise.

A CPU build of torch has no CUDA kernels to trace (its autograd refuses fake CUDA tensors), so the step is traced on
fake CPU tensors, and the few operations whose memory differs are replaced while it is traced:

- attention: the flash kernel saves its inputs, its output and one fp32 number per row (logsumexp), never the matrix
  of scores; its backward takes an fp32 copy of dQ and, for grouped queries, dK and dV of all heads. With a mask the
  memory-efficient kernel runs, on key and value heads repeated, and saves the mask in the dtype of the query.
- dropout saves a mask of one byte an element;
- under autocast, layer_norm runs and returns in fp32;
- a 4-bit matrix product decompresses its weight first, but for a few rows;
- cuBLAS takes a workspace on first use.

Sources: aten/src/ATen/native/transformers/cuda/{attention,attention_backward}.cu and flash_attn/flash_api.cpp,
aten/src/ATen/cuda/CUDABlas.cpp, aten/src/ATen/autocast_mode.h, bitsandbytes/backends/cuda/ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ft_insight.estimate.plan.trace import LIBRARIES, StorageTrace

ATTENTION = "ft_insight_plan"
"""Name under which `attention` is known to transformers."""
CUBLAS_WORKSPACE_BYTES = 8_519_680
"""cuBLAS, :4096:2:16:8 KiB, the default of torch before Hopper; 32 MiB there."""
FLASH_MAX_HEAD = 256


class _Fused(torch.autograd.Function):
    """Scaled dot-product attention as the flash or the memory-efficient kernel allocates it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        rows = length if bias is None else -(-length // 32) * 32
        logsumexp = query.new_empty(batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, *(() if bias is None else (bias,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, logsumexp, *_ = ctx.saved_tensors
        batch, heads, length, size = query.shape
        alive = [grads[0].contiguous(), torch.empty_like(logsumexp)]  # dO and rowsum(dO * O)
        d_query = query.new_empty(batch, length, heads, size).transpose(1, 2)
        alive.append(query.new_empty(batch, heads, -(-length // 128) * 128, -(-size // 32) * 32, dtype=torch.float32))
        if key.shape[1] == heads:
            return d_query, _like(key), _like(value), None
        alive += [_like(key, heads), _like(value, heads)]
        return d_query, _like(key), _like(value), None


def _like(tensor: Tensor, heads: int | None = None) -> Tensor:
    batch, own, length, size = tensor.shape
    return tensor.new_empty(batch, length, heads or own, size).transpose(1, 2)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Do what transformers' SDPA attention does on a GPU; (batch, heads, length, size) in, heads last out.

    ``module.plan_mask`` (batch, 1, length, length), where a model has one, stands for a batch with padding.
    """
    if sliding_window is not None and query.shape[2] >= sliding_window and attention_mask is None:
        attention_mask = _window_mask(query)
    mask = attention_mask if attention_mask is not None else getattr(module, "plan_mask", None)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or key.shape[-1] > FLASH_MAX_HEAD):
        key, value = (
            t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) for t in (key, value)
        )
    out = sdpa(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _window_mask(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[2], query.shape[2], dtype=torch.bool)


_count: Callable[[float], None] = lambda flops: None  # noqa: E731


class _Counted(torch.autograd.Function):
    """Notes the FLOPs of what torch has no formula for, forward and (``back`` times as many) backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, flops: float, count: Callable[[float], None], back: float) -> Tensor:
        ctx.flops, ctx.count = flops * back, count
        count(flops)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.count(ctx.flops)
        return grads[0], None, None, None


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for ``torch.nn.functional.scaled_dot_product_attention`` on a GPU that has the fused kernels."""
    batch, heads, length, size = query.shape
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.empty_like(bias, dtype=query.dtype)
        if bias.shape[-1] % 16:
            bias = F.pad(bias, (0, 16 - bias.shape[-1] % 16))
    out: Tensor = _Fused.apply(query, key, value, bias)  # type: ignore[no-untyped-call]
    flops = 2.0 * batch * heads * length * key.shape[2] * (size + value.shape[-1])
    return _Counted.apply(out, flops, _count, 2.5)  # type: ignore[no-any-return,no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _layer_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def layer_norm(
        input: Tensor,  # noqa: A002
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            input, weight, bias = (None if t is None else t.float() for t in (input, weight, bias))  # type: ignore[assignment] # noqa: A001
        return plain(input, normalized_shape, weight, bias, eps)

    return layer_norm


class _Kept(torch.autograd.Function):
    """Saves its input for the backward pass, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _matmul_4bit(plain: Callable[..., Tensor], trace: StorageTrace, old: bool) -> Callable[..., Tensor]:
    def matmul_4bit(a: Tensor, b: Tensor, quant_state: Any, out: Any = None, bias: Any = None) -> Tensor:
        rows, columns = quant_state.shape
        weights = [a.new_empty(rows, columns) for _ in range(2 if old else 1)]
        scales = a.new_empty(quant_state.absmax.shape, dtype=torch.float32) if quant_state.nested else None
        result = plain(a, b, quant_state, out, bias)
        del weights, scales
        result = _Counted.apply(result, 2.0 * a.numel() * rows, trace.count, 0.0)  # type: ignore[no-untyped-call]
        kept: Tensor = _Kept.apply(result, a.detach()) if old else result  # type: ignore[no-untyped-call]
        return kept

    return matmul_4bit


@contextmanager
def cuda_kernels(trace: StorageTrace, old_bitsandbytes: bool = False) -> Iterator[None]:
    """Replace, while inside, the operations that a GPU runs with other memory than a CPU does."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", sdpa))
        stack.enter_context(mock.patch.object(F, "dropout", _dropout))
        stack.enter_context(mock.patch.object(F, "layer_norm", _layer_norm(F.layer_norm)))
        stack.enter_context(mock.patch.dict(globals(), {"_count": trace.count}))
        with suppress(ImportError):
            import bitsandbytes

            replaced = _matmul_4bit(bitsandbytes.matmul_4bit, trace, old_bitsandbytes)
            stack.enter_context(mock.patch.object(bitsandbytes, "matmul_4bit", replaced))
        trace.log.allocate(CUBLAS_WORKSPACE_BYTES, LIBRARIES)
        yield
