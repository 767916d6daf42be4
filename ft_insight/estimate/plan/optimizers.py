"""Optimizers by the names of transformers, with the states and temporaries that they have on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SMALL_8BIT = 4096
"""bitsandbytes keeps states of fewer elements in fp32 (``min_8bit_size``)."""
BLOCK_8BIT = 256
PAGED_FROM = 100_000
"""bitsandbytes pages states of at least so many elements (``get_state_buffer``); smaller ones stay on the GPU."""


class BitsAndBytesAdamW(torch.optim.Optimizer):
    """The states of bitsandbytes' AdamW: 8 or 32 bits, on the GPU or paged. Its kernels update in place."""

    def __init__(self, parameters: Iterable[Tensor], bits: int, paged: bool) -> None:
        super().__init__(parameters, {"bits": bits, "paged": paged})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states that are not there yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _states(parameter, group["bits"], group["paged"])


def _states(parameter: Tensor, bits: int, paged: bool) -> dict[str, Tensor]:
    count = parameter.numel()
    small = count < SMALL_8BIT
    states: dict[str, Tensor] = {}
    for name in ("1", "2"):
        if not (paged and count >= PAGED_FROM):
            dtype = torch.float32 if bits == 32 or small else torch.uint8
            states[f"state{name}"] = torch.empty(parameter.shape, dtype=dtype)
        if bits == 8 and not small:
            states[f"absmax{name}"] = torch.empty(-(-count // BLOCK_8BIT))
    return states


def make(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer called ``name`` in `ft_insight.estimate.plan.setup.OPTIMIZERS`."""
    if name == "adamw":  # transformers' default, adamw_torch_fused: one kernel, no temporaries
        return torch.optim.AdamW(parameters, fused=True)
    if name == "adamw_torch":  # torch's own default on a GPU: kernels over lists, with temporaries of a whole list
        return torch.optim.AdamW(parameters, foreach=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, foreach=True)
    return BitsAndBytesAdamW(parameters, 8 if name.endswith("8bit") else 32, name.startswith("paged"))
