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

if TYPE_CHECKING:
    from ft_insight.callbacks.session import Session

Call = Callable[..., Any]

CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers keeps the function that a layer checkpoints itself with."""


class Seams:
    """All patches and hooks of one session."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._handles: list[Any] = []
        self._checkpoints: list[tuple[weakref.ref[nn.Module], CheckpointSeam]] = []

    def install(self, session: Session, trainer: Any, model: nn.Module) -> list[str]:
        """Take up the trainer's and the model's seams; return the names of those that are not there."""
        missing = []
        for owner, name, around in _plan(session, trainer):
            if owner is None or not callable(getattr(owner, name, None)):
                missing.append(name)
                continue
            self._patches.append(Patch(owner, name, around))
        guard = session.guard

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session.forward_begins(module, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            session.forward_ends()

        self.watch_checkpoints(session, model)
        self._handles.append(model.register_forward_pre_hook(Hook(guard, "ledger", before), with_kwargs=True))
        self._handles.append(model.register_forward_hook(Hook(guard, "ledger", after)))
        return missing

    def watch_checkpoints(self, session: Session, model: nn.Module) -> None:
        """Hear of every recomputation of a layer that checkpoints itself, as transformers' layers do."""

        def begins() -> bool:
            return bool(in_backward() and session.guard.run("ledger", session.recompute_begins))

        def ends() -> None:
            session.guard.run("ledger", session.recompute_ends)

        for module in model.modules():
            original = vars(module).get(CHECKPOINT)
            if callable(original):
                seam = CheckpointSeam(original, begins, ends)
                setattr(module, CHECKPOINT, seam)
                self._checkpoints.append((weakref.ref(module), seam))

    def hook_router(self, session: Session, index: int, module: nn.Module) -> None:
        """Hear of every choice of one router."""

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            session.router_chose(index, output)

        self._handles.append(module.register_forward_hook(Hook(session.guard, "experts", after)))

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


def _plan(session: Session, trainer: Any) -> list[tuple[Any, str, Callable[[Call], Call]]]:
    accelerator = getattr(trainer, "accelerator", None)
    return [
        (trainer, "get_batch_samples", lambda call: _fetching(session, call)),
        (trainer, "_prepare_inputs", lambda call: _timed(session, call, "data_wait")),
        (trainer, "training_step", lambda call: _micro(session, call)),
        (accelerator, "backward", lambda call: _backward(session, call)),
        (trainer, "_clip_grad_norm", lambda call: _timed(session, call, "clip")),
        (getattr(trainer, "optimizer", None), "step", lambda call: _timed(session, call, "optimizer")),
        (trainer, "evaluate", lambda call: _outside(session, call, "evaluation")),
        (trainer, "_save_checkpoint", lambda call: _outside(session, call, "saving")),
        (trainer, "log", lambda call: _outside(session, call, "logging")),
        (trainer, "_maybe_log_save_evaluate", lambda call: _watched(session, call)),
        (getattr(trainer, "callback_handler", None), "call_event", lambda call: _events(session, call)),
    ]


def _watched(session: Session, call: Call) -> Call:
    """Pass a call on; if it raises, end the session before the exception goes on its way."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            session.guard.run("end", session.abort, error)
            raise

    return stand_in


def _fetching(session: Session, call: Call) -> Call:
    watched, run = _watched(session, call), session.guard.run

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        run("ledger", session.data_requested)
        result = watched(*args, **kwargs)
        run("ledger", lambda: session.data_arrived(len(result[0])))
        return result

    return get_batch_samples


def _micro(session: Session, call: Call) -> Call:
    watched, run = _watched(session, call), session.guard.run

    def training_step(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else {})
        depth = run("ledger", session.micro_begins, inputs)
        result = watched(*args, **kwargs)
        run("ledger", session.micro_ends, depth)
        return result

    return training_step


def _backward(session: Session, call: Call) -> Call:
    watched, run = _watched(session, call), session.guard.run

    def backward(*args: Any, **kwargs: Any) -> Any:
        run("ledger", session.backward_begins)
        result = watched(*args, **kwargs)
        run("ledger", session.backward_ends)
        return result

    return backward


def _timed(session: Session, call: Call, phase: str) -> Call:
    """Charge a call to a phase if it happens within a step."""
    watched, run, ledger = _watched(session, call), session.guard.run, session.ledger

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if not ledger.in_step:
            return watched(*args, **kwargs)
        run("ledger", ledger.enter, phase)
        result = watched(*args, **kwargs)
        run("ledger", ledger.leave)
        return result

    return stand_in


def _outside(session: Session, call: Call, kind: str) -> Call:
    watched, run = _watched(session, call), session.guard.run

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        outermost = bool(run("ledger", session.outside_begins, kind))
        result = watched(*args, **kwargs)
        run("ledger", session.outside_ends, kind, outermost, session.output.step)
        return result

    return stand_in


def _events(session: Session, call: Call) -> Call:
    watched, run = _watched(session, call), session.guard.run

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        entered = run("ledger", session.event_begins, event, state)
        result = watched(event, args, state, control, **kwargs)
        if entered:
            run("ledger", session.event_ends)
        return result

    return call_event
