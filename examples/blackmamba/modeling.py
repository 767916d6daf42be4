"""BlackMamba (Anthony et al., 2024) for training, on transformers' Mamba mixer.

Written from the description of the architecture and of its checkpoints. There is no generation: no state is kept
from one call to the next.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .configuration import MAMBA, BlackMambaConfig
from .scan import LinearMambaMixer


class BlackMambaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Normalise the float32 residual stream; the result has the weight's type."""
        stream = stream.float()
        scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.eps)
        return (stream * scale * self.weight.float()).to(self.weight.dtype)


class BlackMambaLayerNorm(nn.LayerNorm):
    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Normalise the float32 residual stream; the result has the weight's type."""
        weight, bias = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(stream.float(), self.normalized_shape, weight, bias, self.eps).to(
            self.weight.dtype
        )


class BlackMambaRouter(nn.Linear):
    """Sends each token to the experts that it scores highest.

    Like the routers of transformers' own models it returns scores, weights and the experts chosen, in this order,
    so that what is told of those can be told of this one.
    """

    def __init__(self, config: BlackMambaConfig) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, bias=True)
        self.top_k = config.num_experts_per_tok

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = super().forward(tokens)
        # each weight is a sigmoid of its own: they are not made to sum to one
        weights, chosen = logits.float().sigmoid().topk(self.top_k, dim=-1)
        return logits, weights.to(tokens.dtype), chosen


class BlackMambaExpert(nn.Module):
    def __init__(self, config: BlackMambaConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, 2 * config.moe_intermediate_size, bias=False)
        self.linear_fc2 = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(tokens).chunk(2, dim=-1)
        return self.linear_fc2(nn.functional.gelu(gate) * up)


class BlackMambaExperts(nn.Module):
    """A router and its experts, each of which runs once, on all tokens that it was chosen for."""

    def __init__(self, config: BlackMambaConfig) -> None:
        super().__init__()
        self.router = BlackMambaRouter(config)
        self.local_experts = nn.ModuleList(BlackMambaExpert(config) for _ in range(config.num_local_experts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, chosen = self.router(tokens)
        # all choices, sorted by expert; the sizes are the one thing that the host has to wait for
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=len(self.local_experts)).tolist()
        rows = order // chosen.shape[1]
        scales = weights.flatten().index_select(0, order)[:, None]
        result = torch.zeros_like(tokens)
        # an expert that nobody chose runs on no tokens, so that its gradient is zero and not missing
        for expert, its_rows, its_scales in zip(
            self.local_experts, rows.split(sizes), scales.split(sizes), strict=True
        ):
            outputs = expert(tokens.index_select(0, its_rows)) * its_scales
            result = result.index_add(0, its_rows, outputs.to(result.dtype))
        return result.view_as(hidden_states)


class BlackMambaBlock(GradientCheckpointingLayer):
    """Norm and mixer, whose result is added to the residual stream, kept in float32."""

    def __init__(self, config: BlackMambaConfig, index: int) -> None:
        super().__init__()
        self.kind = config.block_kinds[index]
        self.norm = BlackMambaRMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = LinearMambaMixer(config, index) if self.kind == MAMBA else BlackMambaExperts(config)

    def forward(self, stream: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden_states = self.norm(stream)
        if self.kind == MAMBA:
            mixed = self.mixer(hidden_states, attention_mask=attention_mask)
        else:
            mixed = self.mixer(hidden_states)
        return stream + mixed.float()


class BlackMambaPreTrainedModel(PreTrainedModel):
    config_class = BlackMambaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["BlackMambaBlock"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {"router_logits": BlackMambaRouter}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LinearMambaMixer):
            module.init_mamba_weights()


class BlackMambaModel(BlackMambaPreTrainedModel):
    def __init__(self, config: BlackMambaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BlackMambaBlock(config, i) for i in range(config.num_hidden_layers))
        self.final_layernorm = BlackMambaLayerNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        _refuse_packed(attention_mask, kwargs)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        stream = inputs_embeds.float()
        for block in self.layers:
            stream = block(stream, attention_mask=attention_mask)
        return BaseModelOutput(last_hidden_state=self.final_layernorm(stream))


class BlackMambaForCausalLM(BlackMambaPreTrainedModel):
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BlackMambaConfig) -> None:
        super().__init__(config)
        self.model = BlackMambaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generation_config = GenerationConfig.from_model_config(config)  # TRL writes the tokenizer's ids into it
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        hidden_states = self.model(input_ids, attention_mask, inputs_embeds, **kwargs).last_hidden_state
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


def active_parameters(model: BlackMambaForCausalLM) -> int:
    """Count the parameters that one token meets: all but those of the experts that it is not sent to."""
    idle = 0
    for module in model.modules():
        if isinstance(module, BlackMambaExperts):
            sizes = [sum(p.numel() for p in expert.parameters()) for expert in module.local_experts]
            idle += sum(sizes) - module.router.top_k * sizes[0]
    return sum(p.numel() for p in model.parameters()) - idle


def _refuse_packed(attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    borders = ["cu_seq_lens_q", "seq_idx", *(["position_ids"] if attention_mask is None else [])]
    if any(others.get(name) is not None for name in borders):
        raise ValueError("BlackMamba's state does not stop at the borders of packed sequences: train on padded batches")


AutoConfig.register(BlackMambaConfig.model_type, BlackMambaConfig, exist_ok=True)
AutoModel.register(BlackMambaConfig, BlackMambaModel, exist_ok=True)
AutoModelForCausalLM.register(BlackMambaConfig, BlackMambaForCausalLM, exist_ok=True)
