"""Mixtral with all its matrices in 4 bits, the experts included, ready for LoRA.

transformers 5 keeps the experts of a layer as two 3-D parameters, which ``load_in_4bit`` silently leaves in bf16: it
replaces ``nn.Linear`` only. Here each expert becomes three ``bitsandbytes`` layers, w1, w2 and w3, and PEFT gives each
of them an adapter of its own. ``quantise`` does this to a model in memory; ``load_quantised`` reads a checkpoint tensor
by tensor, so that no more than one matrix is ever held in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralRotaryEmbedding

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MATRICES = ("w1", "w2", "w3")
"""Of an expert, by Mixtral's and the paper's names: gate, down, up."""

Quantiser = Callable[[torch.Tensor], Linear4bit]
"""Turns a weight (out, in) into a 4-bit layer."""


def quantiser(
    quant_type: str = "nf4",
    double_quant: bool = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Quantiser:
    """Return a function from a weight to a ``Linear4bit`` on ``device``, by default on that of the weight."""

    def make(weight: torch.Tensor) -> Linear4bit:
        rows, columns = weight.shape
        layer = Linear4bit(
            columns,
            rows,
            bias=False,
            compute_dtype=compute_dtype,
            compress_statistics=double_quant,
            quant_type=quant_type,
            device="meta",
        )
        # On a CPU with AVX512-BF16, an evaluation would repack the weights, and training after it would get no
        # gradient through them, without a word.
        layer.support_avx512bf16_for_cpu = False
        parameter = Params4bit(
            weight.detach().contiguous(),
            requires_grad=False,
            compress_statistics=double_quant,
            quant_type=quant_type,
            module=layer,
        )
        layer.weight = parameter.to(device or weight.device)  # moving it quantises it
        return layer

    return make


class Experts4bit(nn.Module):
    """The experts of one layer as 4-bit matrices: takes and returns what ``MixtralExperts`` does.

    ``experts`` are the w1 (gate), w2 (down) and w3 (up) of one expert after the other: ``w2(act(w1(x)) * w3(x))``.
    """

    def __init__(self, experts: Iterable[Mapping[str, Linear4bit]], act_fn: nn.Module) -> None:
        super().__init__()
        kept = list(experts)
        self.w1, self.w2, self.w3 = (nn.ModuleList(expert[name] for expert in kept) for name in MATRICES)
        self.act_fn = act_fn
        self.num_experts = len(kept)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        flat = top_k_index.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)[: self.num_experts].tolist()
        weights = top_k_weights.reshape(-1, 1)
        result = torch.zeros_like(hidden_states)
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            places = order[begin : begin + count]
            begin += count
            tokens = places // top_k_index.shape[-1]
            inputs = hidden_states[tokens]
            inner = self.act_fn(self.w1[expert](inputs)) * self.w3[expert](inputs)
            out = self.w2[expert](inner) * weights[places]
            result.index_add_(0, tokens, out.to(result.dtype))
        return result


def quantise_experts(
    model: nn.Module,
    quant_type: str = "nf4",
    double_quant: bool = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> int:
    """Replace the fused experts of every layer by 4-bit ones, one layer after the other; return how many layers.

    The original weights are freed on the way. With ``device`` the 4-bit ones go there, from a model on the CPU.
    """
    quantise_one = quantiser(quant_type, double_quant, compute_dtype, device)
    found = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if _fused(child)]
    for parent, name in found:
        fused: Any = getattr(parent, name)
        experts = [
            {"w1": quantise_one(gate), "w2": quantise_one(down), "w3": quantise_one(up)}
            for (gate, up), down in zip(map(_halves, fused.gate_up_proj), fused.down_proj, strict=True)
        ]
        setattr(parent, name, Experts4bit(experts, fused.act_fn))
    return len(found)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split what transformers 5 keeps as one matrix: w1 (gate) over w3 (up)."""
    gate, up = gate_up.chunk(2)
    return gate, up


def _fused(module: nn.Module) -> bool:
    return isinstance(module, MixtralExperts) and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)


def quantise(model: Any, compute_dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Quantise experts and attention of a model in memory, freeze the rest, and mark it as 4-bit; return it."""
    quantise_experts(model, compute_dtype=compute_dtype, **options)
    quantise_one = quantiser(compute_dtype=compute_dtype, **options)
    for parent in list(model.modules()):
        for name in ATTENTION:
            if type(getattr(parent, name, None)) is nn.Linear:
                setattr(parent, name, quantise_one(getattr(parent, name).weight))
    return _mark(model)


def _mark(model: Any) -> Any:
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True  # so PEFT takes its 4-bit adapter layers, and TRL bf16 adapters, as QLoRA does
    return model


def lora_config(rank: int = 16, alpha: int = 32, experts: int = 8) -> LoraConfig:
    """Put LoRA on w1, w2 and w3 of all experts and on the router, each with an A and a B of its own, as the paper does.

    The router is a bare parameter, hence ``target_parameters``; PEFT wants no dropout for these.
    """
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=[f"{name}.{e}" for name in MATRICES for e in range(experts)],
        target_parameters=["mlp.gate.weight"],
    )


def storage_bytes(module: nn.Module) -> int:
    """Return the bytes that the weights of a module take, with what 4-bit ones need to be read; shared ones once."""
    seen: dict[int, int] = {}
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.buffers()
    for parameter in module.parameters():
        yield parameter.data
        state = getattr(parameter, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            values = vars(part).values() if part is not None else ()
            yield from (value for value in values if isinstance(value, torch.Tensor))


def load_quantised(
    folder: Path,
    *,
    device: torch.device | str,
    compute_dtype: torch.dtype = torch.bfloat16,
    top_k: int | None = None,
    attention: str = "sdpa",
    quant_type: str = "nf4",
    double_quant: bool = True,
) -> Any:
    """Read a Mixtral checkpoint (safetensors) tensor by tensor, and quantise each on ``device`` as it comes.

    Raises:
        ValueError: This is no Mixtral checkpoint, or it lacks weights.
    """
    config = MixtralConfig.from_pretrained(folder)
    if config.model_type != "mixtral" or "num_local_experts" not in json.loads((folder / "config.json").read_text()):
        raise ValueError(f"{folder} is no Mixtral")
    if top_k is not None:
        if top_k > config.num_local_experts:
            raise ValueError(f"--top-k {top_k}: the model has {config.num_local_experts} experts")
        config.num_experts_per_tok = top_k
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=compute_dtype, attn_implementation=attention)
    model.model.rotary_emb = MixtralRotaryEmbedding(config).to(device)
    quantise_one = quantiser(quant_type, double_quant, compute_dtype, device)
    with ExitStack() as stack:
        weights = _Checkpoint(folder, stack)
        for name, _ in list(model.named_parameters()):
            parent_name, _, own = name.rpartition(".")
            owner_name, _, child = parent_name.rpartition(".")
            if own in ("gate_up_proj", "down_proj"):
                continue
            if child in ATTENTION:
                setattr(model.get_submodule(owner_name), child, quantise_one(weights[name].to(compute_dtype)))
            elif name in weights or not (config.tie_word_embeddings and name == "lm_head.weight"):
                value = weights[name].to(device, compute_dtype)
                setattr(model.get_submodule(parent_name), own, nn.Parameter(value, requires_grad=False))
        for index, layer in enumerate(model.model.layers):
            place = f"model.layers.{index}.mlp.experts"
            experts = (
                {name: quantise_one(weights.expert(place, e, name).to(compute_dtype)) for name in MATRICES}
                for e in range(config.num_local_experts)
            )
            layer.mlp.experts = Experts4bit(experts, layer.mlp.experts.act_fn)
    if config.tie_word_embeddings:
        model.tie_weights()
    model.config.name_or_path = str(folder)
    return _mark(model)


class _Checkpoint:
    """The tensors of a folder of safetensors files by the names of transformers 5, read when asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Any, str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a dict
                self._files[name.replace(".block_sparse_moe.", ".mlp.")] = (file, name)
        if not self._files:
            raise ValueError(f"{folder} holds no *.safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        file, stored = self._find(name)
        tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def _find(self, name: str) -> tuple[Any, str]:
        if name not in self._files:
            raise ValueError(f"{self._folder} lacks {name}")
        return self._files[name]

    def expert(self, place: str, expert: int, name: str) -> torch.Tensor:
        """Return w1, w2 or w3 of an expert, whichever way they are stored."""
        if f"{place}.gate_up_proj" not in self:
            return self[f"{place}.{expert}.{name}.weight"]
        if name == "w2":
            return self._slice(f"{place}.down_proj", expert)
        return _halves(self._slice(f"{place}.gate_up_proj", expert))[name == "w3"]

    def _slice(self, name: str, expert: int) -> torch.Tensor:
        file, stored = self._find(name)
        tensor: torch.Tensor = file.get_slice(stored)[expert]
        return tensor
