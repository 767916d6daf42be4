"""Load BlackMamba from Zyphra's checkpoint layout, or from what ``save_pretrained`` wrote.

Zyphra's layout is a ``pytorch_model.bin`` with the tensors under "model", and a ``config.json``. All sizes are taken
from the tensors; of ``config.json`` only ``mamba_moe_layers`` is read, where "r" stands for a Mamba block and a
number for so many experts.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .configuration import MAMBA, MOE, BlackMambaConfig
from .modeling import BlackMambaForCausalLM

WEIGHTS, SETTINGS = "pytorch_model.bin", "config.json"

RENAMED = (
    ("embedding.word_embeddings.", "model.embed_tokens."),
    ("decoder.layers.", "model.layers."),
    ("decoder.final_layernorm.", "model.final_layernorm."),
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is fit to be shown."""


def load(source: str | Path, *, top_k: int | None = None, dtype: torch.dtype = torch.float32) -> BlackMambaForCausalLM:
    """Load a folder or a model of the hub; ``top_k`` experts per token (None: as the checkpoint says, or 1)."""
    folder = fetch(source)
    settings = json.loads((folder / SETTINGS).read_text()) if (folder / SETTINGS).exists() else {}
    if settings.get("model_type") == BlackMambaConfig.model_type:
        options: dict[str, Any] = {} if top_k is None else {"num_experts_per_tok": top_k}
        return BlackMambaForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(f"{source} has neither {WEIGHTS} nor a {SETTINGS} of this model")
    try:
        model = from_zyphra(_read(folder / WEIGHTS), settings.get("mamba_moe_layers"), top_k or 1, dtype)
    except (KeyError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is not in Zyphra's layout: {error}") from error
    model.config.name_or_path = str(source)
    return model


def _read(file: Path) -> Mapping[str, torch.Tensor]:
    # weights_only: a checkpoint of somebody else's gets to run no code
    tensors: Mapping[str, torch.Tensor] = torch.load(
        file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True
    )["model"]
    return tensors


def fetch(source: str | Path) -> Path:
    """Return the folder of a checkpoint, downloaded first where it is the name of one on the hub."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.txt", "*.safetensors", WEIGHTS]))


def from_zyphra(
    tensors: Mapping[str, torch.Tensor], kinds: list[Any] | None, top_k: int, dtype: torch.dtype
) -> BlackMambaForCausalLM:
    config = config_of(tensors, kinds, top_k)
    config.dtype = dtype
    with torch.device("meta"):
        model = BlackMambaForCausalLM(config)
    renamed = {rename(name): tensor.to(dtype) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False, assign=True)
    missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise CheckpointError(f"the checkpoint does not fit: missing {missing[:5]}, not known {unexpected[:5]}")
    model.tie_weights()
    return model.eval()


def rename(name: str) -> str:
    """Turn the name that a tensor has in Zyphra's layout into the one it has here."""
    for theirs, ours in RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def config_of(tensors: Mapping[str, torch.Tensor], kinds: list[Any] | None, top_k: int) -> BlackMambaConfig:
    """Read all sizes off the tensors."""
    numbers = [int(m[1]) for name in tensors if (m := re.match(r"decoder\.layers\.(\d+)\.", name))]
    blocks = 1 + max(numbers, default=-1)
    found = [MOE if f"decoder.layers.{i}.mixer.router.weight" in tensors else MAMBA for i in range(blocks)]
    if kinds and found != [MAMBA if str(kind) == "r" else MOE for kind in kinds]:
        raise CheckpointError(f"mamba_moe_layers {kinds} does not fit the tensors")
    if {*found} != {MAMBA, MOE}:
        raise CheckpointError("the checkpoint has not both Mamba blocks and mixtures of experts")
    mamba = f"decoder.layers.{found.index(MAMBA)}.mixer"
    moe = f"decoder.layers.{found.index(MOE)}.mixer"
    vocabulary, hidden = tensors["embedding.word_embeddings.weight"].shape
    inner, states = tensors[f"{mamba}.A_log"].shape
    return BlackMambaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=blocks,
        block_kinds=found,
        moe_intermediate_size=tensors[f"{moe}.local_experts.0.linear_fc2.weight"].shape[1],
        num_local_experts=tensors[f"{moe}.router.weight"].shape[0],
        num_experts_per_tok=top_k,
        state_size=states,
        conv_kernel=tensors[f"{mamba}.conv1d.weight"].shape[-1],
        expand=inner // hidden,
        time_step_rank=tensors[f"{mamba}.dt_proj.weight"].shape[1],
    )
