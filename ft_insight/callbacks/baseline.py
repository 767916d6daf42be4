"""What the experts take of a data set of the user's: one pass over it before the first step, and one after the last.

So the load of a model before and after its fine-tuning is told on the same rows, as in the paper's Fig. 11, and not on
whatever batches training began and ended with.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from torch import nn

from ft_insight.callbacks.facts import bare_model
from ft_insight.callbacks.observer import Observer
from ft_insight.callbacks.undisturbed import undisturbed

MOST_ROWS = 1000
"""Rows of the data set that are looked at; the paper took as many."""
BEFORE, AFTER = "before", "after"

Row = dict[str, Any]


def check_source(source: Any) -> None:
    """Raise ValueError, in one line, for what can be no source of rows."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix not in (".json", ".jsonl"):
            raise ValueError(f"before must be a data set, a list of rows or a .json or .jsonl file, not {source!r}")
        if not path.is_file():
            raise ValueError(f"before={os.fspath(source)!r}: there is no such file")
    elif isinstance(source, Mapping):
        raise ValueError(f"before must be one data set, not several: choose one of {', '.join(map(str, source))}")
    elif not isinstance(source, Iterable):
        raise ValueError(f"before must be a data set, a list of rows or a file of them, not {type(source).__name__}")


def cannot_look(model: nn.Module, ranks: int, data_ranks: int | None) -> str | None:
    """Return why no pass can be made over this model, or None if it can.

    Where ranks hold parts of one another's weights, a pass that fails on one of them would leave the others waiting.
    """
    if ranks > 1 and (data_ranks not in (None, ranks) or any(_is_part(p) for p in model.parameters())):
        return "the weights or rows of this model are spread over several ranks: no pass before and after the run"
    return None


def _is_part(parameter: torch.Tensor) -> bool:
    return type(parameter).__name__ in ("DTensor", "FlatParameter") or hasattr(parameter, "ds_id")


class Baseline:
    """The rows, tokenised and collated as the trainer does it, and the passes over them.

    Each rank looks at its share of the rows and waits for no other one. What is raised here is for the guard.
    """

    def __init__(self, source: Any, trainer: Any, model: nn.Module, observer: Observer, rank: int, ranks: int) -> None:
        self._source = source
        self._trainer = weakref.ref(trainer)
        self._model = weakref.ref(model)
        self._observer = observer
        self._rank, self._ranks = rank, ranks
        self._rows: list[Row] | None = None

    def look(self, when: str) -> None:
        """Make one pass, ``before`` or ``after``, and put what the experts took. Its time is a span of its own."""
        trainer, model = self._trainer(), self._model()
        if trainer is None or model is None:
            return
        self._observer.pass_begins(when)
        try:
            with undisturbed(model):
                if self._rows is None:
                    self._rows = self._share(trainer)
                with trainer.compute_loss_context_manager():
                    self._forward(trainer, model)
            self._observer.put_pass(when, len(self._rows))
        finally:
            self._observer.pass_ends(when)

    def _share(self, trainer: Any) -> list[Row]:
        rows, more = read_rows(self._source)
        if more:
            self._observer.output.notice("baseline", f"only the first {MOST_ROWS:,} rows of before= are looked at")
        rows = prepared(trainer, rows)
        # the longest first: what does not fit fails at once, and rows of like length stand together
        rows.sort(key=lambda row: -len(row.get("input_ids", ())))
        return rows[self._rank :: self._ranks]

    def _forward(self, trainer: Any, model: nn.Module) -> None:
        rows = iter(self._rows or ())
        bare = bare_model(model)
        fixed = _lean_arguments(bare)
        keep_labels = bool(getattr(getattr(bare, "config", None), "is_encoder_decoder", False))
        while batch := list(itertools.islice(rows, trainer.args.per_device_eval_batch_size)):
            inputs = dict(trainer._prepare_input(trainer.data_collator(copy.deepcopy(batch))))
            if not keep_labels:
                inputs.pop("labels", None)
            model(**inputs, **fixed)


def _lean_arguments(model: nn.Module) -> dict[str, Any]:
    """Return what spares a forward pass the work that the routers do not need: a cache, and logits of all tokens."""
    known = inspect.signature(type(model).forward).parameters
    lean = {"use_cache": False, "logits_to_keep": 1}
    return {name: value for name, value in lean.items() if name in known}


# rows


def read_rows(source: Any) -> tuple[list[Row], bool]:
    """Return at most ``MOST_ROWS`` rows, and whether there were more."""
    if isinstance(source, str | os.PathLike):
        taken = _file_rows(Path(source))
    else:
        if isinstance(source, datasets.Dataset) and source.format["type"] != "custom":
            source = source.with_format(None)
        taken = list(itertools.islice(iter(source), MOST_ROWS + 1))
    for number, row in enumerate(taken):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} of before= is no mapping of columns to values")
    if not taken:
        raise ValueError("before= has no rows")
    return [dict(row) for row in taken[:MOST_ROWS]], len(taken) > MOST_ROWS


def _file_rows(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            lines = (line for line in file if line.strip())
            return [json.loads(line) for line in itertools.islice(lines, MOST_ROWS + 1)]
        rows = json.load(file)
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} holds no list of rows")
    return rows[: MOST_ROWS + 1]


def prepared(trainer: Any, rows: list[Row]) -> list[Row]:
    """Tokenise and truncate rows as this trainer does with those of an evaluation, but never pack or shuffle them."""
    data = datasets.Dataset.from_list(rows)
    prepare = getattr(trainer, "_prepare_dataset", None)
    if callable(prepare) and not getattr(trainer, "_skip_prepare_dataset", False):
        args = copy.copy(trainer.args)
        args.dataset_num_proc, args.shuffle_dataset = None, False
        formatting = getattr(trainer, "_formatting_func", None)
        with _alone(), _quiet():
            data = prepare(data, trainer.processing_class, args, False, formatting, "before")
    elif not callable(prepare) and "input_ids" not in data.column_names:
        raise ValueError(f"the rows of before= have no input_ids, and {type(trainer).__name__} tokenises none")
    ready: list[Row] = trainer._remove_unused_columns(data, description="before").to_list()
    return ready


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait for no other rank: one of them may have failed on the way, and preparing rows needs nobody else."""
    state: Any = PartialState()
    state.wait_for_everyone = lambda: None  # on the instance, whose attributes all instances share
    try:
        yield
    finally:
        del state.wait_for_everyone


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
