"""What a trainer does, as its seams tell it: turned into marks in the ledger, counts, and records.

The methods are called in the order of a training run, within the trainer's own calls, each behind the guard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from ft_insight import records as r
from ft_insight.callbacks.batches import Shape, measure
from ft_insight.callbacks.clock import HostClock
from ft_insight.callbacks.expert_watch import ExpertWatch
from ft_insight.callbacks.guard import Guard
from ft_insight.callbacks.kernel_watch import KernelWatch
from ft_insight.callbacks.layer_watch import LayerWatch, Look
from ft_insight.callbacks.memory import MemoryReader
from ft_insight.callbacks.memory_watch import MemoryWatch
from ft_insight.callbacks.oom import is_out_of_memory, out_of_memory
from ft_insight.callbacks.output import Output
from ft_insight.callbacks.phases import ClosedStep, Ledger, StepTimes
from ft_insight.callbacks.routers import Flush

BASELINE = "baseline"
"""Kind of the span of a pass over rows of the user's before or after the run."""


@dataclass
class StepFacts:
    """What is known of a step beside its times."""

    step: int
    epoch: float | None
    shapes: list[Shape]
    memory: r.Memory | None
    skipped: bool | None
    experts: list[Flush] = field(default_factory=list)
    look: Look | None = None
    profiled: bool | None = None
    other_batch: int | None = None


class Observer:
    """Takes in what happens and puts out records. Collectors that are None are off."""

    def __init__(self, output: Output, guard: Guard, clock: HostClock, memory: MemoryReader) -> None:
        self.output = output
        self.guard = guard
        self.ledger = Ledger(clock, self._on_step)
        self.experts: ExpertWatch | None = None
        self.layers: LayerWatch | None = None
        self.kernels: KernelWatch | None = None
        self.memory: MemoryWatch | None = None
        self.pad_token_id: int | None = None
        self.step_was_skipped: Callable[[], bool] = bool
        """Tells whether the gradient scaler has skipped the optimizer."""
        self.other_batch: Callable[[], int | None] = lambda: None
        """In a sweep, tells the batch size of a step where it is not the header's."""
        self.seams = 0
        """How many of the trainer's calls that are watched are on the stack."""
        self._memory = memory
        self._shapes: list[Shape] = []
        self._queries: int | None = 0
        self._spent_s = guard.spent_s
        self._outside: list[str] = []
        self._opened_s = 0.0
        self._in_forward = False
        self._told_error = 0
        self.would_have_fitted: Callable[[r.OutOfMemory], r.OutOfMemory] = lambda record: record
        """Adds to a record of a failure the largest batch that would have fitted, by what was measured before."""
        self._passing: str | None = None
        self._peaks: dict[str, int] = {}

    def finish(self) -> dict[str, float]:
        """Training is over: tell all that is still to be told; return the seconds since the last step, by kind."""
        self.guard.run("ledger", self.ledger.resolve, wait=True)
        self.guard.run("experts", self._finish_experts)
        if self.kernels is not None:
            self.guard.run("kernels", self.kernels.finish)
        return self.guard.run("ledger", self.ledger.remaining) or {}

    def _finish_experts(self) -> None:
        self.ledger.clock.wait()
        watch = self.experts
        if watch is None or watch.counter is None:
            return
        watch.finish(self._put_experts, self.output.step, round(self.output.clock(), 3))
        if silent := watch.counter.silent():
            of = f"{len(silent)} of {len(watch.counter.routers)} routers ({silent[0].name})"
            text = f"{of} tell nothing of their choice that is understood here, and are not counted"
            self.output.notice("experts", text, off=len(silent) == len(watch.counter.routers))
        elif watch.counter.calls == 0 and self.output.state.view().totals.steps:
            self.output.notice("experts", "the routers were never called: tokens per expert are unknown", off=True)

    def let_go(self) -> None:
        """Take the layers' hooks out of the model."""
        if self.layers is not None:
            self.layers.timer.remove()
        if self.memory is not None:
            self.guard.run("clean-up", self.memory.let_go)
        if self.kernels is not None:
            # under a name of its own: it must run also when the collector has failed and is off
            self.guard.run("clean-up", self.kernels.let_go)

    def _look(self, method: str, *args: Any) -> Any:
        """Tell the layer timer of something, behind the guard."""
        if self.layers is not None and self.layers.timer.installed:
            return self.guard.run("layers", getattr(self.layers.timer, method), *args)
        return None

    def _remember(self, method: str, *args: Any) -> Any:
        """Tell the memory watch of something, behind the guard."""
        if self.memory is not None:
            return self.guard.run("memory", getattr(self.memory, method), *args)
        return None

    def failed(self, error: BaseException) -> None:
        """An exception leaves one of the trainer's calls; what it says of memory is told, once, where it comes up."""
        if is_out_of_memory(error) and id(error) != self._told_error:
            self._told_error = id(error)
            self.guard.run("memory", self._tell_out_of_memory, error)
        if self.memory is not None:
            # whoever catches it trains on
            self.guard.run("clean-up", self.memory.let_go)

    def _tell_out_of_memory(self, error: BaseException) -> None:
        if self.memory is None:
            return
        shape = self._shapes[-1] if self._shapes and self.ledger.in_step else Shape()
        step, t_s = self.output.step + 1, round(self.output.clock(), 3)
        record = out_of_memory(error, self.memory, self.ledger.bucket, step, t_s, (shape.rows, shape.slots))
        self.output.put(self.would_have_fitted(record))

    # steps

    def data_requested(self) -> None:
        """The trainer asks for the micro-batches of a new step."""
        self._shapes = []
        self._opened_s = self.ledger.clock.now()
        recorded = self.kernels is not None and self.guard.run("kernels", self.kernels.step_begins)
        if self.layers is not None and not recorded:  # one close look at a time
            self.guard.run("layers", self.layers.step_begins)
        if self.memory is not None:
            timed = self.layers is not None and self.layers.timer.installed
            self.guard.run("memory", self.memory.step_begins, free=not recorded and not timed)
        self.ledger.open_step()
        self.ledger.enter("data_wait")

    def data_arrived(self, batches: int) -> None:
        """They are there; none are at the end of an epoch that is shorter than announced."""
        self.ledger.leave()
        self._remember("expect", batches)
        if batches == 0:
            self.ledger.drop_step()
            self.let_go()

    def micro_begins(self, inputs: Any) -> int:
        """A micro-batch is about to be computed; return a mark for :meth:`micro_ends`."""
        if self.ledger.in_step:
            self.ledger.begin_micro(len(self._shapes))
            self._shapes.append(self.guard.run("batches", measure, inputs, self.pad_token_id) or Shape())
            self._look("micro_begins")
            self._remember("micro_begins", inputs, self._shapes[-1].slots)
        return self.ledger.depth

    def micro_ends(self, depth: int) -> None:
        """It was computed, or failed."""
        self._remember("micro_ends")
        if self.memory is not None and self.guard.is_off("memory"):
            self.guard.run("clean-up", self.memory.let_go)
        self._in_forward = False
        self.ledger.unwind(depth)
        if self.ledger.in_step:
            self._look("micro_ends")
            self.ledger.switch("other")
            self.ledger.begin_micro(-1)

    def backward_begins(self) -> None:
        """Autograd starts on a micro-batch."""
        self._remember("backward_begins")
        self.ledger.enter("backward")
        self._look("mark", "backward")

    def backward_ends(self) -> None:
        """The gradients of a micro-batch are there."""
        self._look("mark", "backward end")
        self.ledger.leave()
        if self.ledger.in_step:
            self.ledger.switch("other")

    def recompute_begins(self) -> bool:
        """A checkpointed layer is computed anew within backward; False if that is none of a step's."""
        if not self.ledger.in_step:
            return False
        self.ledger.enter("recompute")
        return True

    def recompute_ends(self) -> None:
        """It has recomputed what backward needs."""
        self.ledger.leave()

    def step_ended(self, state: Any) -> None:
        """An optimizer step is complete, gradients zeroed, before any callback hears of it."""
        if not self.ledger.in_step:
            return
        self.output.step = state.global_step
        known = StepFacts(
            step=state.global_step,
            epoch=state.epoch,
            shapes=self._shapes,
            memory=self._memory_at_end(),
            skipped=True if self.step_was_skipped() else None,
            other_batch=self.other_batch(),
        )
        self._shapes = []
        filled = self._remember("take", known.step, round(self.output.clock(), 3), known.memory)
        if filled is not None:
            self.output.put(filled)
        now = self.ledger.clock.now()
        if self.experts is not None:
            known.experts = self.guard.run("experts", self.experts.take, now) or []
        if self.layers is not None:
            known.look = self.guard.run("layers", self.layers.step_ends, known.step, now - self._opened_s)
        if self.memory is not None and self.memory.slowed:
            known.profiled = True
        if self.kernels is not None:
            at_s = round(self.output.clock(), 3)
            recorded = self.guard.run("kernels", self.kernels.step_ends, known.step, at_s)
            known.profiled = known.profiled or recorded or None
        spent = self.guard.spent_s
        self.ledger.close_step(spent - self._spent_s, known)
        self._spent_s = spent

    def _memory_at_end(self) -> r.Memory | None:
        memory = self.guard.run("memory", self._memory.read)
        return self._remember("step_ends", memory) or memory

    def _on_step(self, step: ClosedStep, times: StepTimes) -> None:
        known: StepFacts = step.facts  # type: ignore[assignment]
        micro = []
        for index, shape in enumerate(known.shapes):
            compute = times.micro_s.get(index)
            counts = shape.resolved(arrived=times.confirmed)
            self._count_queries(counts["queries"])
            begin = times.micro_begin_s.get(index)
            micro.append(r.MicroBatch(**counts, compute_s=_round(compute), begin_s=_round(begin)))
        self.output.put(
            r.Step(
                step=known.step,
                t_s=self.output.since_start(step.begin_s),
                wall_s=round(step.end_s - step.begin_s, 7),
                phases_s=rounded(times.phases_s),
                clock=times.clock,
                host_phases_s=rounded(times.host_s) if times.clock != "host" else None,
                idle_at_most_s=_round(times.idle_at_most_s),
                optimizer_begin_s=_round(times.optimizer_begin_s),
                lag_s=_round(times.lag_s),
                before_s=rounded(step.before_s),
                micro=tuple(micro),
                epoch=None if known.epoch is None else round(known.epoch, 5),
                memory=known.memory,
                skipped=known.skipped,
                profiled=known.profiled,
                other_batch=known.other_batch,
                self_s=round(step.self_s, 7),
            )
        )
        now = round(self.output.clock(), 3)
        if self.experts is not None:
            tell = self.experts.tell
            self.guard.run("experts", tell, known.experts, self._put_experts, known.step, now, arrived=times.confirmed)
        if self.layers is not None and known.look is not None:
            self.guard.run("layers", self.layers.tell, known.look, self.output.put, now, arrived=times.confirmed)

    def _count_queries(self, queries: int | None) -> None:
        known = self._queries is not None and queries is not None
        self._queries = (self._queries or 0) + (queries or 0) if known else None

    def _put_experts(self, record: r.Experts) -> None:
        """Put counts with the queries behind them: all micro-batches since the counts before."""
        if record.mode == "train":
            record = msgspec.structs.replace(record, queries=self._queries)
            self._queries = 0
        self.output.put(record)

    # the model

    def forward_begins(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """The root of the model is called."""
        grad = torch.is_grad_enabled()
        training = self.ledger.in_step and module.training and grad
        mode = "train" if training else "evaluation" if "evaluation" in self._outside and not module.training else None
        mode = self._passing or mode
        if self.experts is not None:
            self.guard.run("experts", self.experts.forward_begins, mode, arguments.get("attention_mask"))
        self._in_forward = training
        if training:
            self._remember("forward_begins")
            self.ledger.enter("forward")
            self._look("mark", "forward")

    def forward_ends(self) -> None:
        """It returned."""
        if self._in_forward:
            self._in_forward = False
            self.ledger.leave()
            self.ledger.switch("loss")

    def router_chose(self, index: int, output: Any) -> None:
        """A router of the model returned."""
        if self.experts is not None and self.experts.counter is not None:
            self.experts.counter.count(index, output)

    # outside of steps

    def pass_begins(self, mode: str) -> None:
        """The model is about to be shown rows that are neither training's nor an evaluation's."""
        self._peaks = self._memory.peaks()
        self._passing = mode
        self.outside_begins(BASELINE)

    def put_pass(self, mode: str, queries: int) -> None:
        """All rows of a pass were shown: put what the experts took of them."""
        if self.experts is None:
            return
        self.ledger.clock.wait()
        record = self.experts.take_pass(mode, self.output.step, round(self.output.clock(), 3))
        if record is not None:
            self.output.put(msgspec.structs.replace(record, queries=queries))
        elif queries:
            self.output.notice(BASELINE, "no router was called: what the experts took is unknown", off=True)

    def pass_ends(self, mode: str) -> None:
        """It is over, or failed: no more is counted for it."""
        self._passing = None
        if self.experts is not None:
            self.experts.forget(mode)
        self._memory.disregard_since(self._peaks)
        self.outside_ends(BASELINE, True, self.output.step)

    def forget_spent(self) -> None:
        """What was spent up to now has a span of its own: it is none of the next step's."""
        self._spent_s = self.guard.spent_s

    def outside_begins(self, kind: str) -> bool:
        """An evaluation, a save or logging begins; False if it is part of another one."""
        self._outside.append(kind)
        if self.ledger.in_step or len(self._outside) > 1:
            return False
        self.ledger.enter(kind)
        return True

    def outside_ends(self, kind: str, outermost: bool, step: int) -> None:
        """It ended."""
        if kind in self._outside:
            self._outside.remove(kind)
        if not outermost:
            return
        end = self.ledger.leave()
        if kind == "logging":
            return
        seconds = self.ledger.take_outside(kind)
        begin = self.output.since_start(end - seconds)
        self.output.put(r.Span(kind=kind, t_s=begin, wall_s=round(seconds, 7), step=step))

    def event_begins(self, name: str, state: Any) -> bool:
        """The trainer is about to tell all callbacks of an event; False if their time is part of something else."""
        if name == "on_step_end":
            self.step_ended(state)
        if self._outside:
            return False
        self.ledger.enter("callbacks")
        return True

    def event_ends(self) -> None:
        """All callbacks have heard of it."""
        self.ledger.leave()


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Round to a tenth of a microsecond, below which no clock here tells anything."""
    return {name: round(value, 7) for name, value in seconds.items()}


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)
