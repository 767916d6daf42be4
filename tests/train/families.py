"""All mixture-of-experts families of transformers: how to build each of them tiny, and how its routers are heard.

``python -m tests.train.families > docs/routers.md`` writes the table of the documentation.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VERSION = ".".join(transformers.__version__.split(".")[:2])
"""Of transformers, as it is installed: its families are found, not listed."""
_MODELS = Path(transformers.__file__).parent / "models"

VOCABULARY, ROWS, TOKENS = 96, 2, 24

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 32,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "max_seq_len": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "mlp_layer_types": ["sparse", "sparse"],
}
"""What is set wherever a family's configuration knows it."""

OUTPUT, ADAPTER, ARGUMENT = "router's output", "adapter", "experts' argument"


@dataclass(frozen=True)
class Family:
    """How to build a family, and where its choice is read."""

    model: str = ""
    """Its class; without a name, the causal model or else the text model that the family exports."""
    options: dict[str, Any] = field(default_factory=dict)
    read: str = OUTPUT
    note: str = ""
    encoder_decoder: bool = False
    grouped: bool = True
    """Whether the family's experts have implementations to choose from; found, not stated."""


GEMMA = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY, "enable_moe_block": True}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SPECIAL: dict[str, Family] = {
    "dbrx": Family(
        "DbrxForCausalLM",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
        },
        read=ARGUMENT,
        note="its router returns bare logits",
    ),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", {"topk_method": "greedy"}),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        {
            "mlp_layer_types": ["hash_moe", "moe"],
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
        read=f"{ARGUMENT}, {OUTPUT}",
        note="layers that choose by a hash of the token are not in its registry",
    ),
    "doge": Family(
        "DogeForCausalLM",
        {"is_moe": True, "num_experts": 16},
        read="table lookup",
        note="product keys; an expert is a row of an embedding",
    ),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", {"moe_layer_start_index": 0}),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [16, 8], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        read=ARGUMENT,
        note="text and vision experts have routers of their own",
    ),
    "flint": Family("FlintForCausalLM", {"mlp_only_layers": []}),
    "gemma4": Family("Gemma4ForCausalLM", GEMMA),
    "glm4v_moe": Family(
        "Glm4vMoeTextModel", {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}}
    ),
    "glm5_next": Family(
        "Glm5NextTextModel",
        {
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 16,
            "index_kpool": 4,
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16}
    ),
    "hy_v4_vl": Family("HYV4VLTextModel", {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}),
    "inkling": Family(
        "InklingForCausalLM",
        {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 16},
    ),
    "inkling2": Family(
        "Inkling2ForCausalLM",
        {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 16},
    ),
    "inkling2_loop": Family(
        "Inkling2LoopForCausalLM",
        {"swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 16},
    ),
    "jamba": Family(
        "JambaForCausalLM",
        {
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "jetmoe": Family(
        "JetMoeForCausalLM",
        {"num_key_value_heads": 2, "kv_channels": 8},
        read=ADAPTER,
        note="routes attention too: two routers a layer",
    ),
    "kolibri1_1": Family(options={"head_dim": 16, "index_num_heads": 1, "mlp_only_layers": []}),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "llama4": Family(
        "Llama4ForCausalLM",
        read=ADAPTER,
        note="all experts multiply all tokens, the others' scaled to zero: these are not counted",
    ),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        {"zero_expert_num": 4},
        note="a choice of an expert that does nothing is none, though real experts multiply its rows by 0",
    ),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", {"num_key_value_heads": 2}),
    "muse_spark": Family("MuseSparkTextModel", {"moe_hidden_size": 16}),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["moe", "full_attention", "moe"],
            "n_groups": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
        },
    ),
    "nllb_moe": Family(
        "NllbMoeModel",
        {
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        read=ADAPTER,
        encoder_decoder=True,
        note="its experts take a one-hot mask for indices, so only the first two ever compute: that is what is counted",
    ),
    "step3p7": Family("Step3p7TextModel", {"sliding_window": 8, "share_expert_dim": 16}),
    "switch_transformers": Family(
        "SwitchTransformersModel",
        {
            "d_kv": 8,
            "d_ff": 32,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "expert_capacity": 3,
        },
        read=ADAPTER,
        encoder_decoder=True,
        note="a token beyond its expert's capacity is dropped, and not counted",
    ),
    "zaya": Family(
        "ZayaForCausalLM",
        {"num_experts_per_tok": 1, "router_hidden_size": 16},
        read=ADAPTER,
        note="a token that skips the experts is multiplied by expert 0 and weighted with 0: not counted",
    ),
}
"""Families that need more than ``SMALL``, or are read in another way than most."""


def _text(name: str) -> str:
    return (_MODELS / name / f"modeling_{name}.py").read_text(encoding="utf-8")


def _names() -> list[str]:
    files = _MODELS.rglob("modeling_*.py")
    return sorted({path.parent.name for path in files if '"router_logits":' in path.read_text(encoding="utf-8")})


def _exported(text: str) -> str:
    names = re.findall(r'"(\w+)"', text[text.rindex("__all__") :])
    return next(name for end in ("ForCausalLM", "TextModel", "Model") for name in names if name.endswith(end))


def _family(name: str) -> Family:
    family = SPECIAL.get(name, Family())
    text = _text(name)
    grouped = "@use_experts_implementation" in text
    return dataclasses.replace(family, model=family.model or _exported(text), grouped=grouped)


FAMILIES: dict[str, Family] = {name: _family(name) for name in _names()}
"""All that the installed transformers has."""


def enumerate_families() -> dict[str, list[str]]:
    """Return the families whose classes name their routers, by importing all of them, which takes a while."""
    found: dict[str, set[str]] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").rglob("modeling_*.py")):
        if "router_logits" not in path.read_text(encoding="utf-8"):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        for value in vars(importlib.import_module(name)).values():
            registry = vars(value).get("_can_record_outputs") if isinstance(value, type) else None
            if value.__module__ != name if isinstance(value, type) else True:
                continue
            entry = registry.get("router_logits") if isinstance(registry, dict) else None
            for item in entry if isinstance(entry, list | tuple) else [entry] if entry is not None else []:
                found.setdefault(path.parent.name, set()).add(getattr(item, "target_class", item).__name__)
    return {name: sorted(routers) for name, routers in found.items()}


def _known(kind: type[Any]) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {f.name for f in dataclasses.fields(kind)}
    return set(inspect.signature(kind.__init__).parameters)


def make_config(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a family's model class and its tiny configuration."""
    family = FAMILIES[name]
    kind = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), family.model)
    known = _known(kind.config_class)
    small = {key: value for key, value in SMALL.items() if key in known}
    return kind, kind.config_class(**{**small, **family.options, **options})


def build(name: str, seed: int = 0, **options: Any) -> Any:
    """Build a tiny model with random weights, biases of the routers included."""
    kind, config = make_config(name, **options)
    torch.manual_seed(seed)
    model = kind(config)
    randomise(model)
    return model


def randomise(model: torch.nn.Module) -> None:
    """Give random values to what a fresh model has at zero: the corrections that routers add before they choose."""
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.data.uniform_(-0.3, 0.3)
        elif "tid2eid" in name:
            experts = model.config.n_routed_experts
            chosen = [torch.randperm(experts)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.data.copy_(torch.stack(chosen))
    for name, parameter in model.named_parameters():
        if "correction_bias" in name or "expert_bias" in name:
            parameter.data.uniform_(-0.3, 0.3)


def inputs(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return 48 tokens in two rows, without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    if FAMILIES[name].encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    return {"input_ids": ids}


HEAD = """# Tokens per expert

The callback counts, for every router of a model, how many tokens it sends to each of its experts. It reads what the
router hands to the experts. In none of the families below does it take the best of the router's logits itself: for half
of them, which correct scores by a bias, limit groups or drop tokens, that would be wrong.

- A count is of choices: how many tokens chose an expert. Padding is left out, recomputation for a checkpoint is counted
  once, evaluation is kept apart, shared experts (which take all tokens) are not listed.
- A choice without effect is none: of an expert that does nothing (longcat_flash, zaya), or beyond an expert's capacity
  (switch_transformers). Where a model still multiplies such a row, by a real expert and with weight 0, that is not
  counted: the row has no part in the result.
- PEFT adapters on experts and routers, quantised experts, and experts un-fused into 4-bit matrices count as their
  model does.
- Counting adds into one small tensor per layer, on the device, and is copied to the host at most every two seconds.

## Families

All {count} families of mixtures of experts in transformers {version}. Each is built tiny in
`tests/train/test_router_families.py`, where its counts equal the rows that each expert's own weights multiply (less
those of weight 0), for eager experts and, where the family has them, grouped and batched ones. None is left out.

| Family | Choice read from | Counts | Grouped | Note |
|---|---|---|---|---|
"""

TAIL = """
## Other models

A model that is not in the table is searched in this order:

1. beside a module whose `forward` takes the chosen experts (`{arguments}`): that argument. Exact.
2. beside a list of experts, each a module of its own (as in BlackMamba: `router` and `local_experts`): the indices that
   the router returns, if it does; otherwise the rows that each expert is called with. Exact. Rows of padding are left
   out where the router's best scores, padding included, give exactly the same count for every expert, and so are taken
   for the choice; where they do not, `padding_counted` is set.
3. a `router` or `gate` beside any other `experts`: the indices that it returns, exact; or else the best of its scores,
   as many as the configuration says. These counts are marked `approximate`, in the log and wherever they are shown.

Not covered: expert parallelism (untested), kernels that replace the whole block and never call its router (a notice
says that the routers were never called), the padding of a decoder's input in encoder-decoder models (counted, and
marked as such), the routers of images in a batch that has none. Some models of transformers have experts without a
router of tokens, and are not counted: vitpose_backbone (by data set), granite_docling, bamba.
"""


def table() -> str:
    """Return the documentation of all families."""
    from ft_insight.callbacks.router_adapters import INDEX_ARGUMENTS

    rows = [
        f"| {name} | {f.read} | exact | {'yes' if f.grouped else 'no'} | {f.note} |" for name, f in FAMILIES.items()
    ]
    tail = TAIL.format(arguments="`, `".join(INDEX_ARGUMENTS))
    return HEAD.format(count=len(FAMILIES), version=VERSION) + "\n".join(rows) + "\n" + tail


if __name__ == "__main__":
    print(table(), end="")
