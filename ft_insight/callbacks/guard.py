"""The one policy by which nothing here can harm a training run.

All code of ft-insight that runs inside training runs through :meth:`Guard.run`: what it raises becomes one
warning with a reason and a notice in the log, its collector is off from then on, and training goes on untouched.
The same place measures what ft-insight itself costs.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")


class FtInsightWarning(UserWarning):
    """A part of ft-insight is off, or something that it cannot measure; training is not affected."""


class Guard:
    """Runs the bodies of collectors; ``on_failure(collector, reason)`` is told once for each that fails."""

    def __init__(self, on_failure: Callable[[str, str], None]) -> None:
        self._on_failure = on_failure
        self._off: set[str] = set()
        self._depth = 0
        self.spent_s = 0.0
        """Host seconds spent inside, so far."""

    @property
    def inside(self) -> bool:
        """A body of ft-insight's own is running."""
        return self._depth > 0

    def is_off(self, collector: str) -> bool:
        """Tell whether a collector has failed, or was turned off."""
        return collector in self._off

    def turn_off(self, collector: str) -> None:
        """Run nothing of this collector any more."""
        self._off.add(collector)

    def run(self, collector: str, body: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Call ``body``; return its result, or None if it raised or its collector is off."""
        if collector in self._off:
            return None
        start = perf_counter()
        self._depth += 1
        try:
            return body(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - this is the one place that stands between us and a training run
            self._fail(collector, error)
            return None
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.spent_s += perf_counter() - start

    def _fail(self, collector: str, error: Exception) -> None:
        self._off.add(collector)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            f"ft-insight: {collector} is off for the rest of this run ({reason}); training goes on",
            FtInsightWarning,
            stacklevel=2,
        )
        with contextlib.suppress(Exception):  # telling of a failure must not be the next failure
            self._on_failure(collector, reason)


class Patch:
    """Stands in for one method of one object, and can be taken away again.

    ``around(call)`` gets the original bound method and returns what stands in for it. The object is held weakly, so
    that an abandoned trainer can be freed. If somebody patched over us in the meantime, ``remove`` leaves their
    wrapper where it is, and ours passes calls straight through.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        watched = around(original)
        state = {"active": True}

        @wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return (watched if state["active"] else original)(*args, **kwargs)

        stand_in.__ft_insight__ = True  # type: ignore[attr-defined]
        self._owner = weakref.ref(owner)
        self._name = name
        self._state = state
        self._stand_in = stand_in
        self._was_own = vars(owner).get(name)
        setattr(owner, name, stand_in)

    def remove(self) -> None:
        """Put the original back."""
        self._state["active"] = False
        owner = self._owner()
        if owner is None or vars(owner).get(self._name) is not self._stand_in:
            return
        if self._was_own is None:
            delattr(owner, self._name)
        else:
            setattr(owner, self._name, self._was_own)


class CheckpointSeam:
    """Stands in for the function that a decoder layer checkpoints itself with, and tells when it recomputes.

    What is checkpointed runs a second time within backward; ``begins`` and ``ends`` are told of that time. A copy of
    the model gets the original function.
    """

    def __init__(self, original: Callable[..., Any], begins: Callable[[], bool], ends: Callable[[], None]) -> None:
        self.original = original
        self._begins = begins
        self._ends = ends

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint ``function``, watching its second run."""

        def watched(*inner: Any, **named: Any) -> Any:
            if not self._begins():
                return function(*inner, **named)
            try:
                return function(*inner, **named)
            finally:  # a checkpoint that has recomputed enough leaves by an exception
                self._ends()

        return self.original(watched, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _same, (self.original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original


def _same(value: Any) -> Any:
    return value


def inert(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what a hook becomes in a copy of the model."""


def _inert() -> Callable[..., None]:
    return inert


class Hook:
    """A module hook that can be copied and pickled with its model: the copy does nothing.

    Hooks that are bound methods or closures break ``copy.deepcopy(model)`` or ``pickle.dumps(model)`` in the
    middle of training, which callbacks for averaging or checkpointing do.
    """

    def __init__(self, guard: Guard, collector: str, body: Callable[..., None]) -> None:
        self._guard = guard
        self._collector = collector
        self._body = body

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the body behind the guard; what it returns is dropped, so that nothing is changed."""
        self._guard.run(self._collector, self._body, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _inert, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert
