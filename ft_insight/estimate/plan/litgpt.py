"""LitGPT's decoder as of October 2023, for holding its published peaks against a trace of the same operations.

transformers computes the same functions, but keeps other tensors for the backward pass: LitGPT has one matrix for
query, key and value, whose whole product stays alive through the value; its LoRA spreads a product over the width of
that matrix; its GELU is one kernel. Weights and adapters are all in the model's own dtype.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ft_insight.estimate.plan.setup import Setup


class _RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)
        return (self.weight * (wide * scale)).to(x.dtype)


class _LoraQV(nn.Module):
    """A fused query-key-value matrix with LoRA on query and value."""

    places: Tensor

    def __init__(self, size: int, bias: bool, setup: Setup) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 3 * size, bias=bias)
        self.lora_A = nn.Parameter(torch.empty(2 * setup.rank, size))
        self.lora_B = nn.Parameter(torch.empty(2 * size, setup.rank))
        self.register_buffer("places", torch.empty(2 * size, dtype=torch.long), persistent=False)
        self.dropout = nn.Dropout(setup.dropout)

    def forward(self, x: Tensor) -> Tensor:
        plain = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_A)
        high = F.conv1d(low.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        spread = high.new_zeros(plain.shape).view(-1, plain.shape[-1])
        spread = spread.index_copy(1, self.places, high.reshape(-1, high.shape[-1]))
        result: Tensor = plain + spread.view(plain.shape) * 2.0
        return result


class _Block(nn.Module):
    def __init__(self, config: Any, setup: Setup) -> None:
        super().__init__()
        size, wide = config.hidden_size, config.intermediate_size
        llama = config.model_type == "llama"
        self.heads = config.num_attention_heads
        self.rotary = int(size // self.heads * _rotary_share(config))
        self.parallel = not llama
        self.norm_1: nn.Module = _RMSNorm(size) if llama else nn.LayerNorm(size)
        shared = config.model_type == "phi"
        self.norm_2: nn.Module | None = None if shared else _RMSNorm(size) if llama else nn.LayerNorm(size)
        self.qkv = _LoraQV(size, not llama, setup)
        self.proj = nn.Linear(size, size, bias=not llama)
        self.fc_1 = nn.Linear(size, wide, bias=not llama)
        self.fc_2 = nn.Linear(size, wide, bias=False) if llama else None
        self.out = nn.Linear(wide, size, bias=not llama)
        self.gelu = "tanh" if shared else "none"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm_1(x)
        attended = self._attend(first, cos, sin)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            result: Tensor = self._mlp(second) + attended + x
            return result
        assert self.norm_2 is not None  # noqa: S101
        x = attended + x
        return self._mlp(self.norm_2(x)) + x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, size = x.shape
        fused = self.qkv(x).view(batch, length, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        query, key, value = (part.squeeze(2) for part in fused.split(1, dim=2))
        query, key = (
            torch.cat((_rope(t[..., : self.rotary], cos, sin), t[..., self.rotary :]), dim=-1) for t in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, size))
        return result

    def _mlp(self, x: Tensor) -> Tensor:
        hidden = self.fc_1(x)
        hidden = F.gelu(hidden, approximate=self.gelu) if self.fc_2 is None else F.silu(hidden) * self.fc_2(x)
        result: Tensor = self.out(hidden)
        return result


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def _rotary_share(config: Any) -> float:
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    return float(share or getattr(config, "partial_rotary_factor", None) or getattr(config, "rotary_pct", None) or 1.0)


class _Backbone(nn.Module):
    def __init__(self, config: Any, setup: Setup) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config, setup) for _ in range(config.num_hidden_layers))
        norm = _RMSNorm if config.model_type == "llama" else nn.LayerNorm
        self.norm = norm(config.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        rotary = cast("_Block", self.blocks[0]).rotary
        cos, sin = (torch.empty(input_ids.shape[1], rotary) for _ in range(2))
        for block in self.blocks:
            x = block(x, cos, sin)
        result: Tensor = self.norm(x)
        return result


class LitGpt(nn.Module):
    """A decoder with LoRA on query and value, with the face of a model of transformers."""

    families = ("llama", "phi", "gpt_neox")

    def __init__(self, config: Any, setup: Setup) -> None:
        super().__init__()
        self.base_model = _Backbone(config, setup)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.model_type == "phi")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, input_ids: Tensor) -> Any:
        """Return the logits."""
        return SimpleNamespace(logits=self.lm_head(self.base_model(input_ids)))
