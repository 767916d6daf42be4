"""Where ft-insight touches a trainer and its model, and how it lets go again.

A Trainer tells its callbacks neither when forward and backward begin nor when data is fetched, and nothing at all
after an exception. So a handful of its methods are stood in for, on this one instance, for the time of one
``train()``; each passes the call on with arguments and result untouched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from ft_insight.callbacks.guard import CheckpointSeam, Hook, Patch
from ft_insight.callbacks.layers import in_backward
from ft_insight.callbacks.router_adapters import Tap

if TYPE_CHECKING:
    from ft_insight.callbacks.observer import Observer

Call = Callable[..., Any]
Abort = Callable[[BaseException], None]

CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers keeps the function that a layer checkpoints itself with."""


class Seams:
    """All patches and hooks of one observer."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._handles: list[Any] = []
        self._checkpoints: list[tuple[weakref.ref[nn.Module], CheckpointSeam]] = []

    def install(self, observer: Observer, abort: Abort, trainer: Any, model: nn.Module) -> list[str]:
        """Take up the trainer's and the model's seams; return the names of those that are not there."""
        missing = []
        for owner, name, around in _plan(observer, trainer):
            if owner is None or not callable(getattr(owner, name, None)):
                missing.append(name)
                continue
            self._patches.append(Patch(owner, name, _stand_in(observer, abort, around)))

        guard = observer.guard

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observer.forward_begins(module, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            observer.forward_ends()

        self.watch_checkpoints(observer, model)
        self._handles.append(model.register_forward_pre_hook(Hook(guard, "ledger", before), with_kwargs=True))
        self._handles.append(model.register_forward_hook(Hook(guard, "ledger", after)))
        return missing

    def watch_checkpoints(self, observer: Observer, model: nn.Module) -> None:
        """Hear of every recomputation of a layer that checkpoints itself, as transformers' layers do."""

        def begins() -> bool:
            return bool(in_backward() and observer.guard.run("ledger", observer.recompute_begins))

        def ends() -> None:
            observer.guard.run("ledger", observer.recompute_ends)

        for module in model.modules():
            original = vars(module).get(CHECKPOINT)
            if callable(original):
                seam = CheckpointSeam(original, begins, ends)
                setattr(module, CHECKPOINT, seam)
                self._checkpoints.append((weakref.ref(module), seam))

    def hook_router(self, observer: Observer, index: int, tap: Tap) -> None:
        """Hear of every choice of one router."""

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            observer.router_chose(index, output)

        self._handles.append(tap.listen(Hook(observer.guard, "experts", after)))

    def remove(self) -> None:
        """Let go of everything."""
        for patch in reversed(self._patches):
            patch.remove()
        for handle in self._handles:
            handle.remove()
        for reference, seam in self._checkpoints:
            module = reference()
            if module is not None and vars(module).get(CHECKPOINT) is seam:
                setattr(module, CHECKPOINT, seam.original)
        self._patches.clear()
        self._checkpoints.clear()
        self._handles.clear()


def _plan(observer: Observer, trainer: Any) -> list[tuple[Any, str, Callable[[Call], Call]]]:
    accelerator = getattr(trainer, "accelerator", None)
    return [
        (trainer, "get_batch_samples", lambda call: _fetching(observer, call)),
        (trainer, "_prepare_inputs", lambda call: _timed(observer, call, "data_wait")),
        (trainer, "training_step", lambda call: _micro(observer, call)),
        (accelerator, "backward", lambda call: _backward(observer, call)),
        (trainer, "_clip_grad_norm", lambda call: _timed(observer, call, "clip")),
        (getattr(trainer, "optimizer", None), "step", lambda call: _timed(observer, call, "optimizer")),
        (trainer, "evaluate", lambda call: _outside(observer, call, "evaluation")),
        (trainer, "_save_checkpoint", lambda call: _outside(observer, call, "saving")),
        (trainer, "log", lambda call: _outside(observer, call, "logging")),
        (trainer, "_maybe_log_save_evaluate", lambda call: call),
        (getattr(trainer, "callback_handler", None), "call_event", lambda call: _events(observer, call)),
    ]


def _stand_in(observer: Observer, abort: Abort, around: Callable[[Call], Call]) -> Callable[[Call], Call]:
    return lambda call: around(_watched(observer, abort, call))


def _watched(observer: Observer, abort: Abort, call: Call) -> Call:
    """Pass a call on. An exception that leaves the outermost seam ends the session, before it goes on its way.

    One that somebody catches on the way, as those do who skip a batch that does not fit, ends nothing.
    """
    guard, ledger = observer.guard, observer.ledger

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        depth = ledger.depth
        observer.seams += 1
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            observer.failed(error)
            guard.run("ledger", ledger.unwind, depth)
            if observer.seams == 1:
                guard.run("end", abort, error)
            raise
        finally:
            observer.seams -= 1

    return stand_in


def _fetching(observer: Observer, call: Call) -> Call:
    run = observer.guard.run

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        run("ledger", observer.data_requested)
        result = call(*args, **kwargs)
        run("ledger", lambda: observer.data_arrived(len(result[0])))
        return result

    return get_batch_samples


def _micro(observer: Observer, call: Call) -> Call:
    run = observer.guard.run

    def training_step(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else {})
        depth = run("ledger", observer.micro_begins, inputs)
        result = call(*args, **kwargs)
        run("ledger", observer.micro_ends, depth)
        return result

    return training_step


def _backward(observer: Observer, call: Call) -> Call:
    run = observer.guard.run

    def backward(*args: Any, **kwargs: Any) -> Any:
        run("ledger", observer.backward_begins)
        result = call(*args, **kwargs)
        run("ledger", observer.backward_ends)
        return result

    return backward


def _timed(observer: Observer, call: Call, phase: str) -> Call:
    """Charge a call to a phase if it happens within a step."""
    run, ledger = observer.guard.run, observer.ledger

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not ledger.in_step:
            return call(*args, **kwargs)
        run("ledger", ledger.enter, phase)
        result = call(*args, **kwargs)
        run("ledger", ledger.leave)
        return result

    return stand_in


def _outside(observer: Observer, call: Call, kind: str) -> Call:
    run = observer.guard.run

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        outermost = bool(run("ledger", observer.outside_begins, kind))
        try:
            return call(*args, **kwargs)
        finally:
            run("ledger", observer.outside_ends, kind, outermost, observer.output.step)

    return stand_in


def _events(observer: Observer, call: Call) -> Call:
    run = observer.guard.run

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        entered = run("ledger", observer.event_begins, event, state)
        result = call(event, args, state, control, **kwargs)
        if entered:
            run("ledger", observer.event_ends)
        return result

    return call_event
