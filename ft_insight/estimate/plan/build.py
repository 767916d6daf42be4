"""The model that is to be trained, with its adapters, without its weights."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ft_insight.estimate.plan.cuda_kernels import ATTENTION
from ft_insight.estimate.plan.litgpt import LitGpt
from ft_insight.estimate.plan.setup import PlanError, Setup
from ft_insight.estimate.plan.trace import WEIGHTS, StorageTrace

QUANT_BLOCK = 64
"""Weights that share one absmax (bitsandbytes' default)."""
NESTED_BLOCK = 256
"""Absmaxes that share one second-level absmax under double quantisation."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the warnings of model building off the terminal: none is about the user's run."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


def build(config: Any, setup: Setup) -> Any:
    """Return the model on the meta device: quantised, wrapped by PEFT and frozen as ``setup`` says.

    Raises:
        PlanError: transformers or PEFT refuse this model or these adapters.
    """
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, setup.dtype)
    if setup.model_code == "litgpt":
        return _litgpt(config, setup, dtype)
    softcap = getattr(config, "attn_logit_softcapping", None) and setup.attention != "sdpa"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager" if softcap else ATTENTION
            )
    except (ValueError, KeyError, TypeError, ImportError) as error:
        raise PlanError(f"transformers cannot build this model: {_one_line(error)}") from error
    if setup.method == "qlora":
        _quantise(model, setup)
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if setup.method != "full":
        model = _adapt(model, setup)
    model.train()
    return model


def _litgpt(config: Any, setup: Setup, dtype: torch.dtype) -> nn.Module:
    if setup.method == "full":
        raise PlanError("LitGPT's decoder is known here with adapters alone")
    if config.model_type not in LitGpt.families:
        raise PlanError(f"LitGPT's {config.model_type} is not known here")
    with torch.device("meta"):
        model = LitGpt(config, setup).to(dtype)
    if setup.method == "qlora":
        _to_4bit(model, setup, [])
    model.train()
    return model


def _quantise(model: Any, setup: Setup) -> None:
    from transformers.quantizers.base import HfQuantizer

    keep = HfQuantizer.get_modules_to_not_convert(model, None, getattr(model, "_keep_in_fp32_modules", None))
    _to_4bit(model, setup, keep)
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)


def _to_4bit(model: nn.Module, setup: Setup, keep: list[str]) -> None:
    """Put transformers' 4-bit layers in the place of linear ones, as ``load_in_4bit`` does."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=setup.double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    replace_with_bnb_linear(model, modules_to_not_convert=keep, quantization_config=how)


def _adapt(model: Any, setup: Setup) -> Any:
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS_CHOICE

    chosen = setup.targets or PEFTS_CHOICE.get(model.config.model_type, "all-linear")
    targets = list(chosen) if isinstance(chosen, (tuple, list)) else chosen
    config = setup.adapter or LoraConfig(
        r=setup.rank,
        lora_alpha=2 * setup.rank,
        lora_dropout=setup.dropout,
        target_modules=targets,
        use_dora=setup.dora,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(model, config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(f"PEFT cannot adapt this model: {_one_line(error)}") from error
    if setup.checkpointing:
        wrapped.enable_input_require_grads()
    dtype = setup.adapter_dtype or ("bfloat16" if setup.method == "qlora" else None)  # as TRL does for QLoRA
    if dtype:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, dtype))
    return wrapped


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def parameter_count(model: nn.Module) -> tuple[int, int]:
    """Return (all, trainable) parameters of a model on the meta device, tied ones once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def materialise(model: nn.Module, mode: FakeTensorMode, trace: StorageTrace, setup: Setup) -> None:
    """Swap every parameter and buffer for a fake one that stands on a device; 4-bit ones for what they become."""
    swapped: dict[int, Any] = {}
    dtype = torch.float16 if setup.old_bitsandbytes else torch.bfloat16

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in swapped:
            with mode:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            trace.see(new, WEIGHTS)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            swapped[id(tensor)] = (new, tensor)  # holding the old one keeps its id taken
        result: torch.Tensor = swapped[id(tensor)][0]
        return result

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                packed = hasattr(parameter, "compress_statistics")
                module._parameters[name] = _packed(parameter, mode, trace, dtype) if packed else fake(parameter)  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fake(buffer)


def _packed(weight: Any, mode: FakeTensorMode, trace: StorageTrace, dtype: torch.dtype) -> nn.Parameter:
    """Return a 4-bit weight as bitsandbytes holds it: half a byte each, absmax per 64, in 8 bits if nested."""
    from bitsandbytes.functional import QuantState

    blocks = -(-weight.numel() // QUANT_BLOCK)
    with mode:
        data = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="cpu")
        code = torch.empty(16, device="cpu")
        if weight.compress_statistics:
            second = QuantState(
                absmax=torch.empty(-(-blocks // NESTED_BLOCK), device="cpu"),
                code=torch.empty(256, device="cpu"),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
            absmax, offset = torch.empty(blocks, dtype=torch.uint8, device="cpu"), torch.empty((), device="cpu")
        else:
            second = offset = None
            absmax = torch.empty(blocks, device="cpu")
    state = QuantState(
        absmax=absmax,
        shape=weight.shape,
        code=code,
        blocksize=QUANT_BLOCK,
        quant_type=weight.quant_type,
        dtype=dtype,
        offset=offset,
        state2=second,
    )
    trace.see_all([data, code, absmax, offset, *([second.absmax, second.code] if second else [])], WEIGHTS)
    new: Any = nn.Parameter(data, requires_grad=False)
    new.quant_state, new.quant_type, new.compress_statistics = state, weight.quant_type, weight.compress_statistics
    new.bnb_quantized = True
    return new  # type: ignore[no-any-return]
