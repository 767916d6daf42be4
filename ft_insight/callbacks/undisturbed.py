"""Work on a model in the midst of training, after which model and random numbers are as if it had never been."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

SMALL_BYTES = 4 << 20
"""Buffers up to this size are copied, so that what is written into them can be undone."""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, without gradients and uncompiled, and put everything back at the end.

    Restored are each module's own attributes and buffers (a rotary embedding of dynamic length changes both), and the
    states of Python's, NumPy's and torch's random numbers, those of the model's CUDA devices included. Gradients and
    parameters are not touched, for nothing here asks for gradients; memory that torch keeps for reuse is released.

    Raises:
        RuntimeError: at the end, if a buffer too large to be copied was written into.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    numbers = _RandomNumbers(devices)
    modules = [_ModuleState(module) for module in model.modules()]
    try:
        for module in model.modules():
            # not by eval(): a module may do more there than note the mode
            vars(module)["training"] = False
        with torch.no_grad(), _uncompiled():
            yield
    finally:
        numbers.restore()
        written = [name for state in modules for name in state.restore()]
        if devices:
            torch.cuda.empty_cache()
    if written:
        raise RuntimeError(f"a buffer of the model was written into and could not be restored: {written[0]}")


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Run what is compiled as if it were not: its graphs would be made over for batches that are not training's."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing has been compiled without it
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class _RandomNumbers:
    """The states of all sources of random numbers that training draws from."""

    def __init__(self, devices: list[int]) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


class _ModuleState:
    """What a module holds beside parameters and children: its attributes as they are, its buffers with content."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._buffers = dict(module._buffers)
        self._versions = {name: _version(b) for name, b in self._buffers.items()}
        self._copies = {
            name: buffer.detach().clone()
            for name, buffer in self._buffers.items()
            if buffer is not None and buffer.numel() * buffer.element_size() <= SMALL_BYTES
        }

    def restore(self) -> list[str]:
        """Set all back; return the names of buffers whose content is lost."""
        own = vars(self._module)
        for name in own.keys() - self._attributes.keys():
            del own[name]
        own.update(self._attributes)
        registered = self._module._buffers
        for name in registered.keys() - self._buffers.keys():
            del registered[name]
        registered.update(self._buffers)
        lost = []
        for name, buffer in self._buffers.items():
            if buffer is None or _version(buffer) == self._versions[name]:
                continue
            if name in self._copies:
                with torch.no_grad():
                    buffer.copy_(self._copies[name])
            else:
                lost.append(f"{type(self._module).__name__}.{name}")
        return lost


def _version(tensor: torch.Tensor | None) -> int | None:
    """Return how often a tensor was written into; None where torch does not keep count."""
    return None if tensor is None or tensor.is_inference() else tensor._version
