"""One training run under observation, from ``on_train_begin`` to its end, however it ends."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
import weakref
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
from torch import nn

from ft_insight import records as r
from ft_insight.callbacks import facts, place, seams
from ft_insight.callbacks.batches import Shape, measure
from ft_insight.callbacks.clock import CudaClock, HostClock
from ft_insight.callbacks.expert_watch import ExpertWatch
from ft_insight.callbacks.guard import FtInsightWarning, Guard
from ft_insight.callbacks.layer_watch import LayerWatch, Look, can_time
from ft_insight.callbacks.memory import MemoryReader
from ft_insight.callbacks.modules import find_parts
from ft_insight.callbacks.output import Output
from ft_insight.callbacks.phases import ClosedStep, Ledger, StepTimes
from ft_insight.callbacks.routers import Flush


@dataclass(frozen=True)
class Options:
    """What a user may say to the callback."""

    path: str | None = None
    price: float | None = None
    layers_every: int | None = None


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


class Session:
    """Observes one call of ``trainer.train()``. Everything that it touches is put back by :meth:`end`."""

    def __init__(self, options: Options) -> None:
        self.output = Output()
        self.guard = Guard(self._collector_failed)
        self.options = options
        self.place: place.Place | None = None
        self.rank = 0
        self._seams = seams.Seams()
        self._shapes: list[Shape] = []
        self._spent_s = 0.0
        self._outside: list[str] = []
        self._experts: ExpertWatch | None = None
        self._layers: LayerWatch | None = None
        self._opened_s = 0.0
        self._pad_token_id: int | None = None
        self._trainer: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._in_forward = False
        self.ledger = Ledger(HostClock(), self._on_step)

    def _collector_failed(self, collector: str, reason: str) -> None:
        self.output.notice(collector, f"off: {reason}", off=True)
        if collector == "ledger":
            # without it nobody tells training from evaluation, and a wrong count is worse than none
            self.guard.turn_off("experts")

    # beginning

    def begin(self, args: Any, state: Any, model: nn.Module, retried: place.Place | None) -> None:
        """Open the log, write the header, take up observation. Called within ``on_train_begin``."""
        trainer = find_trainer()
        self.rank = int(getattr(args, "process_index", 0) or 0)
        header = self._header(trainer, args, state, model)
        self.place = self._choose_place(header, retried)
        self.place, self.output.writer = place.open_writer(self.place, self.output.clock)
        self.output.step = state.global_step
        self.output.put(
            r.Header(
                **{f: getattr(header, f) for f in header.__struct_fields__}
                | {"run_id": self.place.run_id, "segment": self.place.segment}
            )
        )
        self.ledger = Ledger(_clock_for(args, model), self._on_step)
        self.memory = MemoryReader(args)
        self._pad_token_id = _pad_token_id(trainer, model)
        self._experts = self.guard.run("experts", self._watch_experts, model, header)
        self._layers = self.guard.run("layers", self._watch_layers, model, header)
        self.guard.run("gpu", self.output.start_sampler, header.devices)
        if trainer is None:
            self.output.notice("ledger", "no trainer found on the stack: step times are off", off=True)
            self.guard.turn_off("ledger")
            return
        self._trainer = weakref.ref(trainer)
        weakref.finalize(trainer, _abandoned, self.output)
        missing = self._seams.install(self, trainer, model)
        for name in missing:
            self.output.notice("ledger", f"this trainer has no {name}: its time is in 'other'")

    def _header(self, trainer: Any, args: Any, state: Any, model: nn.Module) -> r.Header:
        train = facts.train_facts(trainer, args, state, model)
        return r.Header(
            schema=r.SCHEMA,
            run_id="",
            segment=0,
            wall_time_s=round(time.time() - self.output.clock(), 3),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            rank=self.rank,
            world_size=int(getattr(args, "world_size", 1) or 1),
            host=self.output.host,
            pid=self.output.pid,
            first_step=state.global_step,
            model=facts.model_facts(model),
            train=train,
            dataset=facts.attempt(lambda: facts.dataset_facts(trainer.train_dataset, args)) or r.DatasetFacts(),
            devices=facts.devices(args, model),
            versions=facts.versions(),
            data_parallel_size=facts.attempt(lambda: _data_parallel_size(trainer, args)),
            price_usd_per_hour=self.options.price,
        )

    def _choose_place(self, header: r.Header, retried: place.Place | None) -> place.Place:
        if retried is not None:
            return place.Place(retried.path, retried.run_id, place.count_segments(retried.path), append=True)
        identity = place.Identity(
            header.model.name, header.model.parameters, header.train.output_dir, header.first_step
        )
        mine = place.choose(self.options.path, identity) if self.rank == 0 else None
        if header.world_size > 1:
            mine = place.share(mine, self.rank, f"{header.train.output_dir}@{header.first_step}")
        if mine is None:  # rank 0 has no callback, or did not answer
            mine = place.choose(self.options.path, identity)
        return place.for_rank(mine, self.rank)

    def _watch_experts(self, model: nn.Module, header: r.Header) -> ExpertWatch:
        watch = ExpertWatch(model)
        if watch.counter is not None:
            for index, router in enumerate(watch.counter.routers):
                self._seams.hook_router(self, index, router.module)
        elif header.model.experts:
            self.output.notice("experts", "this model has experts, but no router of a known kind", off=True)
        return watch

    def _watch_layers(self, model: nn.Module, header: r.Header) -> LayerWatch | None:
        if self.options.layers_every == 0:
            return None
        parts = find_parts(model)
        placed = set((getattr(model, "hf_device_map", None) or {}).values())
        reason = can_time(model, parts, compiled=bool(header.train.compiled), devices=len(placed))
        if reason is not None:
            self.output.notice("layers", reason, off=True)
            return None
        return LayerWatch(parts, self.ledger.clock, self.guard, self.options.layers_every)

    def _look(self, method: str, *args: Any) -> Any:
        """Tell the layer timer of something, behind the guard."""
        if self._layers is not None and self._layers.timer.installed:
            return self.guard.run("layers", getattr(self._layers.timer, method), *args)
        return None

    # what the seams tell: steps

    def data_requested(self) -> None:
        """The trainer asks for the micro-batches of a new step."""
        self._shapes = []
        self._opened_s = self.ledger.clock.now()
        if self._layers is not None:
            self.guard.run("layers", self._layers.step_begins)
        self.ledger.open_step()
        self.ledger.enter("data_wait")

    def data_arrived(self, batches: int) -> None:
        """They are there; none are at the end of an epoch that is shorter than announced."""
        self.ledger.leave()
        if batches == 0:
            self.ledger.drop_step()

    def micro_begins(self, inputs: Any) -> int:
        """A micro-batch is about to be computed; return a mark for :meth:`micro_ends`."""
        if self.ledger.in_step:
            self.ledger.begin_micro(len(self._shapes))
            self._shapes.append(self.guard.run("batches", measure, inputs, self._pad_token_id) or Shape())
            self._look("micro_begins")
        return self.ledger.depth

    def micro_ends(self, depth: int) -> None:
        """It was computed, or failed."""
        self._in_forward = False
        self.ledger.unwind(depth)
        if self.ledger.in_step:
            self._look("micro_ends")
            self.ledger.switch("other")
            self.ledger.begin_micro(-1)

    def backward_begins(self) -> None:
        """Autograd starts on a micro-batch."""
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
            memory=self.guard.run("memory", self.memory.read),
            skipped=self._optimizer_skipped(),
        )
        self._shapes = []
        now = self.ledger.clock.now()
        if self._experts is not None:
            known.experts = self.guard.run("experts", self._experts.take, now) or []
        if self._layers is not None:
            known.look = self.guard.run("layers", self._layers.step_ends, known.step, now - self._opened_s)
        spent = self.guard.spent_s
        self.ledger.close_step(spent - self._spent_s, known)
        self._spent_s = spent

    def _optimizer_skipped(self) -> bool | None:
        accelerator = getattr(self._trainer(), "accelerator", None)
        return True if getattr(accelerator, "optimizer_step_was_skipped", False) else None

    def _on_step(self, step: ClosedStep, times: StepTimes) -> None:
        known: StepFacts = step.facts  # type: ignore[assignment]
        micro = []
        for index, shape in enumerate(known.shapes):
            compute = times.micro_s.get(index)
            counts = shape.resolved(arrived=times.confirmed)
            micro.append(r.MicroBatch(**counts, compute_s=None if compute is None else round(compute, 7)))
        self.output.put(
            r.Step(
                step=known.step,
                t_s=self.output.since_start(step.begin_s),
                wall_s=round(step.end_s - step.begin_s, 7),
                phases_s=_rounded(times.phases_s),
                clock=times.clock,
                before_s=_rounded(step.before_s),
                micro=tuple(micro),
                epoch=None if known.epoch is None else round(known.epoch, 5),
                memory=known.memory,
                skipped=known.skipped,
                self_s=round(step.self_s, 7),
            )
        )
        now = round(self.output.clock(), 3)
        if self._experts is not None:
            tell = self._experts.tell
            self.guard.run("experts", tell, known.experts, self.output.put, known.step, now, arrived=times.confirmed)
        if self._layers is not None and known.look is not None:
            self.guard.run("layers", self._layers.tell, known.look, self.output.put, now, arrived=times.confirmed)

    # what the seams tell: the model

    def forward_begins(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        """The root of the model is called."""
        grad = torch.is_grad_enabled()
        training = self.ledger.in_step and module.training and grad
        mode = "train" if training else "evaluation" if "evaluation" in self._outside and not module.training else None
        if self._experts is not None:
            self.guard.run("experts", self._experts.forward_begins, mode, arguments.get("attention_mask"))
        self._in_forward = training
        if training:
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
        if self._experts is not None and self._experts.counter is not None:
            self._experts.counter.count(index, output)

    # what the seams tell: outside of steps

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

    def logged(self, state: Any, logs: dict[str, Any]) -> None:
        """The trainer logged some values."""
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        values, nonfinite = r.finite(numbers)
        self.output.put(
            r.Logs(
                step=state.global_step,
                t_s=round(self.output.clock(), 6),
                epoch=state.epoch,
                values=values,
                nonfinite=nonfinite,
                texts={k: v for k, v in logs.items() if isinstance(v, str)},
            )
        )

    # end

    def abort(self, error: BaseException) -> None:
        """Training is about to end with this exception; it goes on its way untouched."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        lines = str(error).strip().splitlines()
        self.end(status, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)

    def end(self, status: str, reason: str | None = None) -> None:
        """Put everything back, tell the rest and close the log. May be called again."""
        self._seams.remove()
        if self._layers is not None:
            self._layers.timer.remove()
        if self.output.closed:
            return
        self.guard.run("ledger", self.ledger.resolve, wait=True)
        self.guard.run("experts", self._finish_experts)
        remaining = self.guard.run("ledger", self.ledger.remaining) or {}
        last = self._put_estimates if status != "failed" and self.rank == 0 else None
        self.output.end(status, reason, _rounded(remaining), last=last)
        self._complain()

    def _finish_experts(self) -> None:
        self.ledger.clock.wait()
        watch = self._experts
        if watch is None or watch.counter is None:
            return
        watch.finish(self.output.put, self.output.step, round(self.output.clock(), 3))
        if watch.counter.calls == 0 and self.output.state.view().totals.steps:
            self.output.notice("experts", "the routers were never called: tokens per expert are unknown", off=True)

    def _put_estimates(self) -> None:
        self.guard.run("estimate", self._estimate)

    def _estimate(self) -> None:
        from ft_insight.estimate import estimate_records

        for record in estimate_records(self.output.state.view(), round(self.output.clock(), 3)):
            self.output.put(record)

    def _complain(self) -> None:
        writer = self.output.writer
        if writer is not None and writer.failure:
            warnings.warn(f"ft-insight: the log is incomplete: {writer.failure}", FtInsightWarning, stacklevel=2)


def find_trainer() -> Any:
    """Find the trainer whose ``train`` is on the stack: the one way from a callback to it."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if owner is not None and hasattr(owner, "callback_handler") and hasattr(owner, "accelerator"):
            return owner
        frame = frame.f_back
    return None


def _clock_for(args: Any, model: nn.Module) -> HostClock:
    device = getattr(args, "device", None)
    placed = getattr(model, "hf_device_map", None) or {}
    # events of several devices cannot be compared; the trainer synchronises every micro-batch anyway
    if getattr(device, "type", None) == "cuda" and len(set(placed.values())) <= 1:
        return CudaClock()
    return HostClock()


def _pad_token_id(trainer: Any, model: nn.Module) -> int | None:
    value = getattr(getattr(trainer, "data_collator", None), "pad_token_id", None)
    if value is None:
        value = getattr(getattr(model, "config", None), "pad_token_id", None)
    return value if isinstance(value, int) else None


def _data_parallel_size(trainer: Any, args: Any) -> int:
    shared = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    return max(1, int(args.world_size) // int(shared))


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 7) for name, value in seconds.items()}


def _abandoned(output: Output) -> None:
    with contextlib.suppress(Exception):
        output.end("failed", "training ended without telling its callbacks")
