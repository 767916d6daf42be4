"""A tiny mixture-of-experts model and its tokeniser, made on the spot, so that a demo trains on any laptop.

The model has everything that makes profiling a big one interesting, just small: fused experts behind a top-k
router, grouped-query attention, LoRA on all of them. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

__all__ = ["build_tiny_mixtral", "build_tokenizer", "lora_config"]

MAX_POSITIONS = 2048
HEAD_DIM = 32

_SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

# The generation block lets TRL train on the assistant's words only, should that be asked for.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokeniser on the texts; the same texts give the same tokeniser.

    Few texts give fewer than `vocab_size` tokens: build the model for `len(tokenizer)`.
    """
    special = [*_SPECIAL.values(), *_ROLE_TOKENS]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest} to cover every byte, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_POSITIONS,
        padding_side="right",
        additional_special_tokens=list(_ROLE_TOKENS),
        **_SPECIAL,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def build_tiny_mixtral(
    vocab_size: int,
    *,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 256,
    experts: int = 8,
    top_k: int = 2,
    seed: int = 0,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> MixtralForCausalLM:
    """Build a random Mixtral of a few million parameters, the same one for the same arguments.

    The caller's random state is left as it was. `output_router_logits` is left to TRL, which turns the
    balancing loss on for such models by itself.
    """
    if hidden < HEAD_DIM or hidden % HEAD_DIM:
        raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, got {hidden}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts ({experts}), got {top_k}")
    heads = hidden // HEAD_DIM
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=HEAD_DIM,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=MAX_POSITIONS,
        # The usual 0.02 suits thousands of hidden units. With so few, and the output layer frozen under LoRA,
        # the logits could hardly move, and a demo's loss should be seen to fall.
        initializer_range=hidden**-0.5,
        sliding_window=None,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )
    # The weights are drawn on the CPU, so only the CPU's generator is forked and seeded.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return MixtralForCausalLM(config)


def lora_config(rank: int = 16) -> LoraConfig:
    """Put LoRA on the attention and also on the fused experts and the router, where most of the weights are.

    The experts are bare parameters, not layers, hence `target_parameters`; PEFT wants no dropout for these.
    """
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    }
    return LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", **options)
