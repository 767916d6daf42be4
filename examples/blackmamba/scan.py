"""The selective scan of Mamba in plain torch, with a backward whose cost grows linearly with the length.

Where CUDA kernels for it are at hand, they are used instead: ``choose_scan`` finds out, and says what it chose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.utils import import_utils


class LinearRecurrence(torch.autograd.Function):
    """``state[t] = decay[t] * state[t - 1] + drive[t]`` along the first dimension, from a state of zero.

    Slices taken inside a loop each hand autograd a gradient as big as the whole sequence, which is what makes the
    usual loop quadratic. Here backward is the same recurrence run from the end.
    """

    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, drive: torch.Tensor) -> torch.Tensor:
        states = _recur(decay[1:], drive)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        # what reaches a state: from its own output, and from all that come after it
        reached = _recur(decay[1:], gradient, backwards=True)
        of_decay = torch.zeros_like(decay)
        torch.mul(reached[1:], states[:-1], out=of_decay[1:])
        return of_decay, reached


def _recur(factors: torch.Tensor, terms: torch.Tensor, backwards: bool = False) -> torch.Tensor:
    """Run the recurrence over ``terms``; ``factors`` lie between neighbours, so there is one less of them."""
    result = torch.empty_like(terms, memory_format=torch.contiguous_format)
    steps = list(zip(terms.unbind(0), result.unbind(0), strict=True))
    between = list(factors.unbind(0))
    if backwards:
        steps.reverse()
        between.reverse()
    before = steps[0][1].copy_(steps[0][0])
    for factor, (term, out) in zip(between, steps[1:], strict=True):
        before = torch.addcmul(term, factor, before, out=out)
    return result


def selective_scan(
    inputs: torch.Tensor,
    time_step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
) -> torch.Tensor:
    """Scan over ``inputs`` in float32.

    ``inputs`` and ``time_step`` (positive already) are (batch, length, channels), ``a`` is (channels, states), ``b``
    and ``c`` are (batch, length, states), ``d`` is (channels,). Returns the shape of ``inputs``.
    """
    with torch.autocast(inputs.device.type, enabled=False):
        inputs, time_step, a, b, c, d = (x.float() for x in (inputs, time_step, a, b, c, d))
        # time goes first, so that each step of the loop reads and writes memory in one piece
        steps, values = time_step.transpose(0, 1), inputs.transpose(0, 1)
        decay = torch.exp(steps[..., None] * a)
        drive = (steps * values)[..., None] * b.transpose(0, 1)[..., None, :]
        states = LinearRecurrence.apply(decay, drive)
        outputs = (states @ c.transpose(0, 1)[..., None]).squeeze(-1)
        return (outputs + values * d).transpose(0, 1)


class LinearMambaMixer(MambaMixer):
    """transformers' mixer, but for the scan where it would loop over tokens in Python."""

    fast = False
    """Whether to leave all to transformers, which then runs CUDA kernels."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.fast and hidden_states.is_cuda:
            return super().forward(hidden_states, attention_mask=attention_mask)
        keep = None if attention_mask is None else attention_mask[..., None].to(hidden_states.dtype)
        inner, gate = self.in_proj(_masked(hidden_states, keep)).chunk(2, dim=-1)
        length = inner.shape[1]
        inner = self.act(self.conv1d(inner.transpose(1, 2))[..., :length]).transpose(1, 2)
        inner = _masked(inner, keep)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        step, b, c = self.x_proj(inner).split(sizes, dim=-1)
        step = nn.functional.softplus(
            nn.functional.linear(step, self.dt_proj.weight).float() + self.dt_proj.bias.float()
        )
        outputs = selective_scan(inner, step, -torch.exp(self.A_log.float()), b, c, self.D)
        return self.out_proj((outputs * self.act(gate)).to(hidden_states.dtype))


def _masked(states: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return states if keep is None else states * keep


def choose_scan(model: PreTrainedModel) -> str:
    """Give a model, on the device it is to run on, the fastest scan there is; return which, in words."""
    fast, words = _find(model)
    for module in model.modules():
        if isinstance(module, LinearMambaMixer):
            module.fast = fast
    return words


def _find(model: PreTrainedModel) -> tuple[bool, str]:
    if model.device.type != "cuda":
        return False, "plain torch with a linear backward (CUDA kernels need a GPU)"
    if import_utils.is_mamba_ssm_available() and import_utils.is_causal_conv1d_available():
        return True, "CUDA kernels of mamba-ssm and causal-conv1d"
    if not import_utils.is_kernels_available():
        return False, (
            "plain torch with a linear backward, slow on a GPU (install mamba-ssm and causal-conv1d, or kernels)"
        )
    try:
        model.set_use_kernels(True)
    except Exception as error:  # noqa: BLE001 - of many kinds: no network, no build for this GPU, an old package
        return False, f"plain torch with a linear backward, slow on a GPU (kernels: {type(error).__name__}: {error})"
    return True, "CUDA kernels fetched by the kernels package"
