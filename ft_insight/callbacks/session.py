"""One training run under observation, from ``on_train_begin`` to its end, however it ends."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
from torch import nn

from ft_insight import records as r
from ft_insight.callbacks import facts, place, seams
from ft_insight.callbacks.baseline import AFTER, Baseline, cannot_look
from ft_insight.callbacks.clock import CudaClock, HostClock
from ft_insight.callbacks.expert_watch import ExpertWatch
from ft_insight.callbacks.guard import FtInsightWarning, Guard
from ft_insight.callbacks.kernel_watch import KernelWatch, trace_path
from ft_insight.callbacks.kernels import KernelWindow
from ft_insight.callbacks.layer_watch import LayerWatch, can_time
from ft_insight.callbacks.memory import MemoryReader
from ft_insight.callbacks.memory_watch import MemoryWatch
from ft_insight.callbacks.modules import find_parts
from ft_insight.callbacks.observer import Observer, rounded
from ft_insight.callbacks.oom import is_out_of_memory
from ft_insight.callbacks.output import Output
from ft_insight.catalog import gpu_for_device


@dataclass(frozen=True)
class Study:
    """Steps that are done to measure, not to train."""

    purpose: str
    """``sweep`` or ``probe``."""
    job: r.TrainFacts
    """What the job is set to do whose trainer this is."""
    tried: tuple[r.Tried, ...] = ()


@dataclass(frozen=True)
class Options:
    """What a user may say to the callback."""

    path: str | None = None
    price: float | None = None
    layers_every: int | None = None
    kernels_at: int = 0
    """Step of the run whose kernels are recorded; 0 is none."""
    trace: bool = False
    before: Any = None
    """Rows whose experts are counted before the first step and after the last."""
    study: Study | None = None


class Session:
    """Observes one call of ``trainer.train()``. Everything that it touches is put back by :meth:`end`."""

    def __init__(self, options: Options) -> None:
        self.output = Output()
        self.guard = Guard(self._collector_failed)
        self.options = options
        self.place: place.Place | None = None
        self.rank = 0
        self._seams = seams.Seams()
        self._observer: Observer | None = None
        self._tries_again = False
        self._baseline: Baseline | None = None

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
        for tried in self.options.study.tried if self.options.study is not None else ():
            self.output.put(tried)
        observer = Observer(self.output, self.guard, _clock_for(args, model), MemoryReader(args))
        self._observer = observer
        observer.pad_token_id = _pad_token_id(trainer, model)
        observer.experts = self.guard.run("experts", self._watch_experts, observer, model, header)
        observer.layers = self.guard.run("layers", self._watch_layers, observer, model, header)
        observer.kernels = self.guard.run("kernels", self._watch_kernels, model, header)
        observer.memory = self.guard.run("memory", self._watch_memory, trainer, args, model, header)
        observer.would_have_fitted = self._would_have_fitted
        self._tries_again = bool(getattr(args, "auto_find_batch_size", False)) and (header.train.batch or 0) > 1
        self.guard.run("gpu", self.output.start_sampler, header.devices, rocm=torch.version.hip is not None)
        if trainer is None:
            self.output.notice("ledger", "no trainer found on the stack: step times are off", off=True)
            self.guard.turn_off("ledger")
            return
        accelerator = weakref.ref(trainer.accelerator)
        observer.step_was_skipped = lambda: bool(getattr(accelerator(), "optimizer_step_was_skipped", False))
        if self.options.study is not None:
            observer.other_batch = _other_batch(trainer, header.train.batch)
        weakref.finalize(trainer, _abandoned, self.output)
        missing = self._seams.install(observer, self.abort, trainer, model)
        for name in missing:
            self.output.notice("ledger", f"this trainer has no {name}: its time is in 'other'")
        if self.options.before is not None:
            self._baseline = self.guard.run("baseline", self._take_baseline, trainer, observer, model, header)

    def _header(self, trainer: Any, args: Any, state: Any, model: nn.Module) -> r.Header:
        study = self.options.study
        train = study.job if study is not None else facts.train_facts(trainer, args, state, model)
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
            purpose=study.purpose if study is not None else None,
        )

    def _watch_kernels(self, model: nn.Module, header: r.Header) -> KernelWatch | None:
        if not self.options.kernels_at or self.place is None:
            return None
        device = header.devices[0] if header.devices else None
        on_gpu = device is not None and device.kind == "cuda"
        window = KernelWindow(
            find_parts(model),
            self.guard,
            trace_path(self.place.path, self.options.kernels_at) if self.options.trace else None,
            root=model,
            scoped=not header.train.compiled,
        )
        return KernelWatch(
            window,
            self.options.kernels_at,
            gpu_for_device(device.name, device.memory_bytes) if on_gpu and device is not None else None,
            self.output.put,
            lambda reason: self.output.notice("kernels", reason, off=True),
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

    def _watch_experts(self, observer: Observer, model: nn.Module, header: r.Header) -> ExpertWatch:
        watch = ExpertWatch(model)
        if watch.counter is not None:
            for index, router in enumerate(watch.counter.routers):
                self._seams.hook_router(observer, index, router.tap)
        elif header.model.experts:
            self.output.notice("experts", "this model has experts, but no router of a known kind", off=True)
        return watch

    def _take_baseline(self, trainer: Any, observer: Observer, model: nn.Module, header: r.Header) -> Baseline | None:
        heard = observer.experts is not None and observer.experts.counter is not None
        why = cannot_look(model, header.world_size, header.data_parallel_size)
        if not heard or why is not None:
            self.output.notice("baseline", why or "no router to count at: before= tells nothing", off=True)
            return None
        return Baseline(self.options.before, trainer, model, observer, self.rank, header.world_size)

    def look(self, when: str) -> None:
        """Show the model the rows of ``before=``, where there are any, ``before`` the run or ``after`` it."""
        observer = self._observer
        if self._baseline is None or observer is None:
            return
        # a resumed run begins in the middle: what came before is in the segment before
        if when == AFTER or self.output.step == 0:
            self.guard.run("baseline", self._baseline.look, when)
        observer.forget_spent()

    def _watch_layers(self, observer: Observer, model: nn.Module, header: r.Header) -> LayerWatch | None:
        if self.options.layers_every == 0:
            return None
        parts = find_parts(model)
        placed = set((getattr(model, "hf_device_map", None) or {}).values())
        reason = can_time(model, parts, compiled=bool(header.train.compiled), devices=len(placed))
        if reason is not None:
            self.output.notice("layers", reason, off=True)
            return None
        return LayerWatch(parts, observer.ledger.clock, self.guard, self.options.layers_every)

    def _watch_memory(self, trainer: Any, args: Any, model: nn.Module, header: r.Header) -> MemoryWatch:
        parts = find_parts(model)
        placed = set((getattr(model, "hf_device_map", None) or {}).values())
        reason = can_time(model, parts, compiled=bool(header.train.compiled), devices=len(placed))
        device = torch.device(args.device)
        counts = device.type == "cpu" and not header.train.compiled and header.world_size == 1
        reference = weakref.ref(trainer) if trainer is not None else lambda: None
        return MemoryWatch(
            model,
            parts if reason is None else (),
            self.guard,
            device,
            lambda: getattr(reference(), "optimizer", None),
            counts=counts,
        )

    def _would_have_fitted(self, record: r.OutOfMemory) -> r.OutOfMemory:
        from ft_insight.estimate.memory import would_have_fitted

        return would_have_fitted(self.output.state.view(), record)

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
        """Training is about to end with this exception, or to be tried anew; it goes on its way untouched."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        if self._tries_again and is_out_of_memory(error):
            status = "retried"
        lines = str(error).strip().splitlines()
        self.end(status, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)

    def end(self, status: str, reason: str | None = None) -> None:
        """Put everything back, tell the rest and close the log. May be called again."""
        self._seams.remove()
        observer = self._observer
        if observer is not None:
            observer.let_go()
        if self.output.closed:
            return
        remaining = observer.finish() if observer is not None else {}
        last = self._put_estimates if status not in ("failed", "retried") and self.rank == 0 else None
        self.output.end(status, reason, rounded(remaining), last=last)
        self._complain()

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


def _other_batch(trainer: Any, usual: int | None) -> Callable[[], int | None]:
    reference = weakref.ref(trainer)

    def other_batch() -> int | None:
        batch = getattr(reference(), "_train_batch_size", None)
        return None if batch == usual else batch

    return other_batch


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


def _abandoned(output: Output) -> None:
    with contextlib.suppress(Exception):
        output.end("failed", "training ended without telling its callbacks")
