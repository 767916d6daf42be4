"""What a planned fine-tune is to do; everything that changes its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METHODS = ("full", "lora", "qlora")
OPTIMIZERS = (
    "adamw",
    "adamw_torch",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "sgd",
)
TILE_ROWS = 4096
"""Rows of the tile of logits in TRL's fused LM head (trl/kernels/chunked_logprob.py): its buffers grow no further."""


class PlanError(ValueError):
    """A fine-tune that cannot be planned; the message is one line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How the model is trained. Defaults are those of TRL's SFTTrainer and PEFT's LoraConfig.

    ``adapter`` is any PEFT config and replaces ``rank``, ``targets``, ``dropout`` and ``dora``. ``loss`` is the path
    from the last hidden state to the loss: ``sft`` SFTTrainer's fused LM head, ``trainer`` transformers' own loss on
    fp32 logits, ``own-dtype`` a cross entropy on the shifted logits in their own dtype. ``keeps_outputs`` is for loops
    that hold the model's outputs, and so the logits, through the backward pass. ``old_bitsandbytes``: up to 0.42 it
    kept the input of every 4-bit matrix product and decompressed weights to fp16, then copied them to bf16.
    ``attention`` is None for what transformers takes by itself; ``sdpa`` makes Gemma 2 use the fused kernels, without
    its softcap. ``model_code`` is ``transformers`` or ``litgpt``.
    """

    method: str = "lora"
    rank: int = 16
    targets: tuple[str, ...] | str | None = None
    dropout: float = 0.0
    dora: bool = False
    adapter: Any = None
    dtype: str = "bfloat16"
    adapter_dtype: str | None = None
    autocast: bool = True
    checkpointing: bool = True
    optimizer: str = "adamw"
    accumulation: int = 1
    loss: str = "sft"
    padded: bool = True
    double_quant: bool = True
    keeps_outputs: bool = False
    old_bitsandbytes: bool = False
    attention: str | None = None
    model_code: str = "transformers"
