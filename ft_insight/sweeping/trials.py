"""A few steps of a real trainer at one batch size, with nothing saved, evaluated or reported, and all undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback
from transformers.utils import logging

from ft_insight.callbacks.batches import measure
from ft_insight.callbacks.oom import is_out_of_memory
from ft_insight.sweeping.question import SweepError
from ft_insight.sweeping.restore import Snapshot, free_memory, inner_optimizer
from ft_insight.sweeping.rows import LongestRows
from ft_insight.sweeping.search import Trial

T = TypeVar("T")

TRIAL_STEPS = 2
"""The optimizer's state appears in the first step: only the second needs all memory at once."""
ACCUMULATED = 2
"""Micro-batches of a trial's step: from the second on gradients are kept, which takes memory of its own."""
QUIET = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "logging_strategy": "no",
    "report_to": [],
    "push_to_hub": False,
    "auto_find_batch_size": False,
    "dataloader_drop_last": True,
}
"""What a trainer is told for the time of a measurement: only steps, and only full batches."""
PLAIN_LOADER = {
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "train_sampling_strategy": "sequential",
}
"""What it is told for a trial, whose rows are chosen already."""
SAVING = ("save_model", "_save_checkpoint", "save_state", "save_metrics", "push_to_hub")
"""What a trainer's own ``train`` or ``training_step`` may call, whatever its arguments say."""


class Bench:
    """A trainer on the bench: runs some of its steps, and puts it back as it was after each run. Left, it frees memory.

    ``train`` starts its training: ``trainer.train``, unless that is what was intercepted.
    """

    def __init__(self, trainer: Any, train: Callable[[], Any]) -> None:
        check_trainer(trainer)
        self.trainer = trainer
        self._train = train
        self._snapshot = Snapshot(trainer)

    def __enter__(self) -> Bench:
        self._verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # the training says it once; here each trial would, in the middle of the bar
        return self

    def __exit__(self, *_: object) -> None:
        logging.set_verbosity(self._verbosity)
        free_memory()

    @property
    def on_cuda(self) -> bool:
        """Memory is a device's own, and ends with an error."""
        return bool(self.trainer.args.device.type == "cuda")

    @property
    def working_batch(self) -> int:
        """Queries per device and micro-batch that the trainer is set to."""
        return int(self.trainer.args.per_device_train_batch_size)

    def set_batch(self, batch: int) -> None:
        """Set the batch size of the loaders to come, in the two places where a Trainer keeps it."""
        self.trainer.args.per_device_train_batch_size = batch
        self.trainer._train_batch_size = self.trainer.args.train_batch_size

    def run(
        self, steps: int, callbacks: Iterable[Any], prepare: Callable[[], None] = lambda: None, **settings: Any
    ) -> None:
        """Train ``steps`` optimizer steps, heard by these callbacks alone, and put the trainer back as it was.

        ``prepare`` may change the trainer once more before it starts. Raises what training raises.
        """
        trainer = self.trainer
        try:
            # not by setattr, which some versions of these arguments forbid once they are set up
            vars(trainer.args).update(_typed(trainer.args, {**QUIET, "max_steps": steps, **settings}))
            trainer.model_init = None  # a second model beside the first would take memory that is being measured
            trainer.callback_handler.callbacks[:] = [DefaultFlowCallback(), *callbacks]
            self._quieten()
            prepare()
            self._train()
        finally:
            self._snapshot.restore()

    def _quieten(self) -> None:
        """Take from the trainer what would save, and what would end before the measurement does."""
        trainer = self.trainer
        for name in SAVING:
            setattr(trainer, name, lambda *_, **__: None)
        optimizer = inner_optimizer(trainer.optimizer)
        if trainer.lr_scheduler is not None and optimizer is not None:
            # the user's own may be made for the job's steps, and refuse more
            trainer.lr_scheduler = LambdaLR(optimizer, lambda _: 1.0)
        scaler = trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            # steps whose gradients overflow in fp16, as the first do, are skipped: then there is no optimizer state
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    def loader(self, make: Callable[[], Iterable[Any]], batch: int) -> Iterable[Any]:
        """Return a new loader of the trainer's, which must follow the batch size that is set."""
        loader = make()
        sizes = (getattr(each, "batch_size", None) for each in (loader, getattr(loader, "batch_sampler", None)))
        size = next((size for size in sizes if isinstance(size, int)), batch)
        if size != batch:
            raise SweepError(
                f"{type(self.trainer).__name__} loads batches of {size:,} rows where {batch:,} were set: its "
                "get_train_dataloader does not follow self._train_batch_size"
            )
        return loader

    def asked(self, question: Callable[[], T]) -> T:
        """Return the answer of a question that changes the trainer, which is put back as it was."""
        try:
            return question()
        finally:
            self._snapshot.restore()

    def attempt(self, rows: LongestRows, batch: int) -> Trial:
        """Try a batch of the longest rows, for whether it fits."""
        trainer = self.trainer
        watch = Watch(trainer.args.device)

        def prepare() -> None:
            make = trainer.get_train_dataloader
            trainer.train_dataset = rows.batch(batch)
            trainer._get_train_sampler = lambda *_, **__: None  # one of the user's own may count on all rows
            self.set_batch(batch)
            trainer.get_train_dataloader = lambda: Endless(lambda: self.loader(make, batch), watch.see)

        accumulation = min(ACCUMULATED, trainer.args.gradient_accumulation_steps)
        try:
            self.run(TRIAL_STEPS, [watch], prepare, gradient_accumulation_steps=accumulation, **PLAIN_LOADER)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return watch.trial(batch, fits=False)
        if not watch.steps:
            raise SweepError(f"training ended before its first step at batch {batch:,}: nothing was measured")
        return watch.trial(batch, fits=True)


class Endless:
    """A trainer's own loader, begun anew whenever it ends. Without a length, so that ``max_steps`` alone rules.

    ``epoch`` is that of its first round: each has an order of rows of its own, as each epoch of a training has.
    """

    def __init__(
        self, make: Callable[[], Iterable[Any]], see: Callable[[Any], None] | None = None, epoch: int = 0
    ) -> None:
        self._make = make
        self._see = see
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        loader = self._make()
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self._epoch)
        empty = False
        while not empty:
            empty = True
            for batch in loader:
                empty = False
                if self._see is not None:
                    self._see(batch)
                yield batch


class Watch(TrainerCallback):  # type: ignore[misc]
    """Times a trial's steps, and reads the memory that they took."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.slots: int | None = None
        self._steps_s: list[float] = []
        self._peak: int | None = None
        self._kept: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the peaks of trials before, whose memory has been given back by now."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, the batch being there."""
        self._begin_s = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop it."""
        self._steps_s.append(self._now() - self._begin_s)
        if self._cuda is not None:
            self._peak = torch.cuda.max_memory_allocated(self._cuda)
            self._kept = torch.cuda.memory_allocated(self._cuda)

    def see(self, batch: Any) -> None:
        """Count a batch's positions."""
        self.slots = measure(batch, None).slots if isinstance(batch, Mapping) else None

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()

    @property
    def steps(self) -> int:
        """How many were done."""
        return len(self._steps_s)

    def trial(self, batch: int, *, fits: bool) -> Trial:
        """Return what was seen; of a batch that does not fit its slots alone."""
        if not fits:
            return Trial(batch, fits=False, slots=self.slots)
        return Trial(batch, True, self.slots, min(self._steps_s, default=None), self._peak, self._kept)


def check_trainer(trainer: Any) -> None:
    """Raise :class:`SweepError` for a trainer that cannot be measured."""
    if not all(hasattr(trainer, name) for name in ("args", "callback_handler", "accelerator", "train")):
        raise SweepError(f"a transformers Trainer is needed, not {type(trainer).__name__}")
    if getattr(trainer, "train_dataset", None) is None:
        raise SweepError("the trainer has no train_dataset")
    if int(getattr(trainer.args, "world_size", 1)) > 1:
        raise SweepError("batch sizes are measured in one process: start it without torchrun or accelerate launch")
    if int(getattr(trainer.args, "n_gpu", 1)) > 1:
        raise SweepError(
            f"batch sizes are measured on one of the {trainer.args.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES=0"
        )
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        raise SweepError("DeepSpeed and FSDP keep weights where they cannot be put back: measure without them")


def _typed(args: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Give settings the type that the arguments keep them in: strategies are enumerations there."""
    known = {name: value for name, value in settings.items() if hasattr(args, name)}
    return {
        name: type(getattr(args, name))(value) if name.endswith("_strategy") else value for name, value in known.items()
    }
