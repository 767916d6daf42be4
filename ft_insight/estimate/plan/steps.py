"""Two real training steps on fake tensors, and the log of all that they allocate."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from ft_insight.estimate.plan.build import build, materialise, parameter_count, quiet
from ft_insight.estimate.plan.cuda_kernels import cuda_kernels
from ft_insight.estimate.plan.losses import LOSS, Loss, fused_head
from ft_insight.estimate.plan.optimizers import make
from ft_insight.estimate.plan.setup import PlanError, Setup
from ft_insight.estimate.plan.trace import ACTIVATIONS, BACKWARD, GRADIENTS, OPTIMIZER, UPDATE, Log, StorageTrace
from ft_insight.estimate.plan.trace import LOSS as LOSS_PART

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Traced:
    """A log of two steps, and what the model turned out to be."""

    log: Log
    second_step: int
    """Where in the log the second step begins: from there on the optimizer has its states."""
    parameters: int
    trainable: int
    flops_per_token: float
    quantised: int
    """Parameters held in 4 bits."""


def trace_steps(config: Any, setup: Setup, batch: int, length: int) -> Traced:
    """Train two steps of ``batch`` rows of ``length`` tokens, without weights, data or a GPU.

    With gradient accumulation the second step is of two micro-batches: the gradients of the first are there while
    the second is computed.

    Raises:
        PlanError: The model cannot be built or adapted, or decides by values that only real data have.
    """
    log = Log()
    trace = StorageTrace(log)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet(), cuda_kernels(trace, setup.old_bitsandbytes):
        model = build(config, setup)
        parameters, trainable = parameter_count(model)
        quantised = sum(p.numel() for p in model.parameters() if hasattr(p, "compress_statistics"))
        if not trainable:
            raise PlanError("nothing of this model would be trained")
        materialise(model, mode, trace, setup)
        try:
            with ExitStack() as stack:
                loss = stack.enter_context(fused_head(model)) if setup.loss == "sft" else LOSS[setup.loss]
                run = _Run(model, setup, trace, loss, batch, length)
                with mode, trace:
                    second = run.two_steps()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PlanError(f"{type(model).__name__} decides by the data: no plan without them ({error})") from error
    return Traced(log, second, parameters, trainable, log.flops / (batch * length), quantised)


class _Run:
    def __init__(self, model: Any, setup: Setup, trace: StorageTrace, loss: Loss, batch: int, length: int) -> None:
        self.model, self.setup, self.trace, self.loss = model, setup, trace, loss
        self.shape = batch, length
        self.trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._name_gradient)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.base_model.register_forward_hook(self._after_backbone)
        self.optimizer = make(setup.optimizer, self.trained)

    def _name_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.trace.see(parameter.grad, GRADIENTS)

    def _after_backbone(self, *_: Any) -> None:
        self.trace.phase = LOSS_PART

    def two_steps(self) -> int:
        """Return where in the log the second step begins."""
        if self.setup.padded and self.shape[0] > 1:
            self._mask()
        self._step(1)
        second = len(self.trace.log.events)
        self._step(min(2, self.setup.accumulation), last=True)
        return second

    def _mask(self) -> None:
        batch, length = self.shape
        with self.trace.during(ACTIVATIONS):
            mask = torch.empty(batch, 1, length, length, dtype=torch.bool)
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module.plan_mask = mask

    def _step(self, micro_batches: int, last: bool = False) -> None:
        for index in range(micro_batches):
            self.trace.counting = last and index == micro_batches - 1
            self._micro_batch()
        self.trace.counting = False
        with self.trace.during(UPDATE):
            nn.utils.clip_grad_norm_(self.trained, MAX_GRAD_NORM)
            self.optimizer.step()
            self.trace.see_all(list(self.optimizer.state.values()), OPTIMIZER)
            self.optimizer.zero_grad()

    def _micro_batch(self) -> Any:
        with self.trace.during(ACTIVATIONS):
            ids = torch.zeros(self.shape, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.setup.autocast):
                loss, outputs = self.loss(self.model, ids)
            if not self.setup.keeps_outputs:
                del outputs
        with self.trace.during(BACKWARD):
            loss.backward()  # type: ignore[no-untyped-call]
