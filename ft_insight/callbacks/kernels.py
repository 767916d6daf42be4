"""A window of one step in which every operator and every kernel is recorded, and then told by role.

:class:`KernelWindow` lives in the training process and on its threads; :func:`summarise` reads what it brought home
and touches neither model nor device, so that it may run in a background thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.overrides import _get_current_function_mode as _mode

from ft_insight import records as r
from ft_insight.callbacks.guard import Guard, Hook
from ft_insight.callbacks.kernel_roles import assign
from ft_insight.callbacks.kernel_scopes import PREFIX, Follower, Mark, Scope, plan
from ft_insight.callbacks.kernel_totals import total
from ft_insight.callbacks.kernel_trace import read_trace
from ft_insight.callbacks.modules import Part
from ft_insight.catalog import Gpu

COLLECTOR = "kernels"


class _Leave(Hook):
    """A hook that closes what another one opened: it runs even where its collector failed in between."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._guard.is_off(self._collector):
            with contextlib.suppress(Exception):
                self._body(*args, **kwargs)
        else:
            super().__call__(*args, **kwargs)


@dataclass
class KernelTrace:
    """What a window brought home; ``source`` saves the trace as JSON to a path, which torch allows once."""

    source: Callable[[str], object]
    scopes: list[Scope]
    path: Path | None = None
    tf32: bool = False
    step: int = 0
    t_s: float = 0.0

    def load(self) -> bytes:
        """Return the trace as JSON, and leave it at ``path`` if there is one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.source(str(self.path))
            return self.path.read_bytes()
        handle, name = tempfile.mkstemp(suffix=".json", prefix="ft-insight-")
        os.close(handle)
        try:
            self.source(name)
            return Path(name).read_bytes()
        finally:
            Path(name).unlink(missing_ok=True)


@dataclass
class _Opened:
    module: int
    range: Any
    follower: Follower | None


class _Stacks(threading.local):
    """Open scopes of a thread: on CUDA, recomputation runs on autograd's own."""

    def __init__(self) -> None:
        self.opened: list[_Opened] = []


@dataclass
class KernelWindow:
    """Records one step. ``open`` and ``close`` belong on the training thread; ``abandon`` may always be called."""

    parts: list[Part]
    guard: Guard
    trace_path: Path | None = None
    root: nn.Module | None = None
    scoped: bool = True
    """False for a compiled model, which hooks would compile anew: then parts and roles are mostly unknown."""
    _handles: list[Any] = field(default_factory=list)
    _stacks: _Stacks = field(default_factory=_Stacks)
    _followers: list[Follower] = field(default_factory=list)
    _profiler: Any = None
    _scopes: list[Scope] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """A step is being recorded."""
        return self._profiler is not None

    def open(self) -> None:
        """Start recording; raise where somebody else's profiler already does."""
        if self.is_open:
            return
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another torch profiler is running")
        try:
            self._scopes, marks = plan(self.parts, self.root) if self.scoped else ([], [])
            for mark in marks:
                self._hook(mark)
            self._profiler = _profiler()
            self._profiler.start()
        except BaseException:
            self.abandon()
            raise

    def _hook(self, mark: Mark) -> None:
        key = id(mark.module)

        def enter(module: nn.Module, args: Any) -> None:
            self._enter(key, mark)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._leave(key)

        handles = self._handles
        handles.append(mark.module.register_forward_pre_hook(Hook(self.guard, COLLECTOR, enter)))
        leave_hook = _Leave(self.guard, COLLECTOR, leave)
        handles.append(mark.module.register_forward_hook(leave_hook, always_call=True))

    def _enter(self, key: int, mark: Mark) -> None:
        scope: Any = torch.profiler.record_function(f"{PREFIX}{mark.scope}")
        scope.__enter__()
        follower: Any = None
        if mark.weights and mark.roles is not None:
            follower = Follower(self.guard, mark.weights, mark.roles)
            self._followers.append(follower)
            follower.__enter__()
        self._stacks.opened.append(_Opened(key, scope, follower))

    def _leave(self, key: int) -> None:
        """Close a scope, and whatever an exception left open within it."""
        opened = self._stacks.opened
        if any(each.module == key for each in opened):
            while opened and self._pop(opened) != key:
                pass

    def _pop(self, opened: list[_Opened]) -> int:
        each = opened.pop()
        if each.follower is not None:
            each.follower.active = False
            if _current_mode() is each.follower:
                each.follower.__exit__(None, None, None)
            self._followers.remove(each.follower)
        each.range.__exit__(None, None, None)
        return each.module

    def close(self) -> KernelTrace | None:
        """Stop recording and remove everything; return what was recorded."""
        profiler = self._release()
        if profiler is None:
            return None
        profiler.stop()
        tf32 = torch.backends.cuda.matmul.allow_tf32
        return KernelTrace(profiler.export_chrome_trace, self._scopes, self.trace_path, tf32)

    def abandon(self) -> None:
        """Remove everything and forget what was recorded. Harmless where nothing is open."""
        profiler = self._release()
        if profiler is not None:
            with contextlib.suppress(Exception):
                profiler.stop()

    def _release(self) -> Any:
        """Take all hooks and scopes away; return the profiler, which still runs."""
        profiler, self._profiler = self._profiler, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for follower in self._followers:
            follower.active = False  # on another thread it cannot be taken off, but passes calls on
        opened = self._stacks.opened
        while opened:
            with contextlib.suppress(Exception):
                self._pop(opened)
        self._followers.clear()
        return profiler


def _current_mode() -> Any:
    return _mode()  # type: ignore[no-untyped-call]


def _profiler() -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # the profiler's own tree of events costs several times the step; the exported trace is enough
    options: dict[str, Any] = {"trace_only": True} if _knows_trace_only() else {}
    config = _ExperimentalConfig(**options)
    return torch.profiler.profile(activities=activities, record_shapes=True, experimental_config=config)


def _knows_trace_only() -> bool:
    return "trace_only" in (_ExperimentalConfig.__init__.__doc__ or "")


def summarise(trace: KernelTrace, *, gpu: Gpu | None) -> r.Kernels:
    """Tell a trace by role. Costs some 0.3 s per 10 000 operators, and may run in any thread, once."""
    read = read_trace(trace.load())
    assign(read, trace.scopes)
    return total(read, trace, gpu)


def from_json(data: dict[str, Any], scopes: list[Scope]) -> KernelTrace:
    """Make a trace of what a profiler saved elsewhere."""
    text = json.dumps(data)
    return KernelTrace(lambda path: Path(path).write_text(text), scopes)
