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

from ft_insight.callbacks.model_state import ModelState


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, without gradients and uncompiled, and put everything back at the end.

    Restored are all that hangs on the model's modules (see :class:`ModelState`), and the states of Python's, NumPy's
    and torch's random numbers, those of the model's CUDA devices included. Nothing here asks for gradients; memory
    that torch keeps for reuse is released.

    Raises:
        RuntimeError: at the end, if a tensor too large to be copied was written into.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    numbers = _RandomNumbers(devices)
    state = ModelState(model)
    try:
        for module in model.modules():
            # not by eval(): a module may do more there than note the mode
            vars(module)["training"] = False
        with torch.no_grad(), _uncompiled():
            yield
    finally:
        numbers.restore()
        written = state.restore()
        if devices:
            torch.cuda.empty_cache()
    if written:
        raise RuntimeError(f"a tensor of the model was written into and could not be restored: {written[0]}")


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
