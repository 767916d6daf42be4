"""The sizes of a BlackMamba model: Mamba blocks that alternate with mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

MAMBA, MOE = "mamba", "moe"

PRESETS: dict[str, dict[str, int]] = {
    "2.8b": {"hidden_size": 1472, "num_hidden_layers": 36, "moe_intermediate_size": 3872},
    "1.5b": {"hidden_size": 1152, "num_hidden_layers": 30, "moe_intermediate_size": 3072},
}
"""What sets the released models apart; all else is the default below."""


class BlackMambaConfig(PreTrainedConfig):
    """Holds, besides its own, the settings that transformers' Mamba mixer asks for.

    ``block_kinds`` names the mixer of each block; by default Mamba at even places and experts at odd ones.
    """

    model_type = "blackmamba"

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 1472,
        num_hidden_layers: int = 36,
        block_kinds: Sequence[str] | None = None,
        moe_intermediate_size: int = 3872,
        num_local_experts: int = 8,
        num_experts_per_tok: int = 1,
        state_size: int = 16,
        conv_kernel: int = 4,
        expand: int = 2,
        time_step_rank: int | None = None,
        norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        if block_kinds is None:
            block_kinds = [MOE if i % 2 else MAMBA for i in range(num_hidden_layers)]
        if len(block_kinds) != num_hidden_layers or not {MAMBA, MOE}.issuperset(block_kinds):
            raise ValueError(f"block_kinds must be {num_hidden_layers} of {MAMBA!r} or {MOE!r}, not {block_kinds}")
        if not 1 <= num_experts_per_tok <= num_local_experts:
            raise ValueError(f"each token goes to 1 to {num_local_experts} experts, not {num_experts_per_tok}")
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.block_kinds = list(block_kinds)
        self.moe_intermediate_size = moe_intermediate_size
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_eps = norm_eps
        self.initializer_range = initializer_range

        # read by transformers' MambaMixer
        self.state_size = state_size
        self.conv_kernel = conv_kernel
        self.expand = expand
        self.intermediate_size = expand * hidden_size
        self.time_step_rank = time_step_rank or math.ceil(hidden_size / 16)
        self.time_step_scale = 1.0
        self.time_step_min = 0.001
        self.time_step_max = 0.1
        self.time_step_floor = 1e-4
        self.time_step_init_scheme = "random"
        self.use_bias = False
        self.use_conv_bias = True
        self.hidden_act = "silu"
        self.use_mambapy = False
        self.use_associative_scan = False
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    @property
    def layer_types(self) -> list[str]:
        """What transformers' mixer looks its own place up in."""
        return ["linear_attention"] * self.num_hidden_layers

    @classmethod
    def preset(cls, name: str, **options: Any) -> BlackMambaConfig:
        return cls(**{**PRESETS[name], **options})
