"""A user's training script, run up to its first ``train()``, in whose place its trainer is measured."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from ft_insight.sweeping.question import SweepError

T = TypeVar("T")

NEEDED = ("torch", "transformers", "accelerate")
Study = Callable[[Any, Callable[[], Any]], T]
"""Measures a trainer; the second argument starts its training."""


class ScriptFailed(Exception):  # noqa: N818 - the script's failure, not ours
    """The script itself failed, as it would have without us; ``code`` is what it exits with."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Measured(BaseException):
    """Unwinds the script once its trainer is measured. Not an Exception, which scripts catch around ``train()``."""


def in_script(script: str, arguments: Sequence[str], study: Study[T]) -> T:
    """Run a script as ``python script arguments`` would, and return what ``study`` makes of the first trainer to train.

    The script ends there: what it does after ``train()`` is not done. Raises :class:`SweepError` for a script that
    is not there or never trains, and :class:`ScriptFailed` where it fails before, its traceback told.
    """
    if not os.path.isfile(script):
        raise SweepError(
            f"{script} {'is a folder' if os.path.isdir(script) else 'does not exist'}; name a Python script"
        )
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SweepError(f"running {script} needs {', '.join(missing)}: pip install 'ft-insight[train]'")
    results: list[T | Exception] = []
    with _as_main(script, arguments), _intercepted(study, results):
        _run(script, results)
    if not results:
        raise SweepError(f"{script} ended without calling train() of a transformers Trainer: nothing was measured")
    result = results[0]
    if isinstance(result, SweepError):
        raise result
    if isinstance(result, Exception):
        _tell(result, script)
        raise ScriptFailed(1)
    return result


def _run(script: str, results: list[Any]) -> None:
    """Run a script until it ends; how it ends once there is a result is of no interest."""
    try:
        runpy.run_path(script, run_name="__main__")
    except _Measured:
        pass
    except SystemExit as leave:
        if not results and leave.code not in (None, 0):
            raise
    except Exception as error:  # noqa: BLE001 - whatever a script raises is to be shown as its own
        if not results:
            results.append(error)


@contextmanager
def _intercepted(study: Study[T], results: list[T | Exception]) -> Iterator[None]:
    """Have ``train`` of every Trainer measure it instead; an error in it becomes the result."""
    from transformers import Trainer

    original = Trainer.train

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not results:
            try:
                results.append(study(self, partial(original, self)))
            except Exception as error:  # noqa: BLE001 - scripts catch it around train(), and would go on as if trained
                results.append(error)
        raise _Measured

    Trainer.train = train
    try:
        yield
    finally:
        Trainer.train = original


@contextmanager
def _as_main(script: str, arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv, sys.path
    sys.argv = [script, *arguments]
    sys.path = [os.path.dirname(os.path.abspath(script)), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before


def _tell(error: Exception, script: str) -> None:
    """Print the script's own traceback, from its first line on; a syntax error has none."""
    found = error.__traceback__
    while found is not None and not _same_file(found.tb_frame.f_code.co_filename, script):
        found = found.tb_next
    sys.stderr.write("".join(traceback.format_exception(type(error), error, found)))


def _same_file(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)
