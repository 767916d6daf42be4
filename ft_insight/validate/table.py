"""A table of published measurements, as CSV."""

from __future__ import annotations

import csv
from pathlib import Path

COLUMNS = (
    "source",
    "model",
    "params_b",
    "method",
    "precision",
    "grad_ckpt",
    "gpu",
    "n_gpus",
    "batch_per_gpu",
    "seq_len",
    "grad_accum",
    "throughput",
    "unit",
    "step_time_s",
    "peak_mem_gib",
    "sweep_id",
    "pair_id",
    "notes",
)


class TableError(ValueError):
    """A file that is no table of measurements; the message is one line."""


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows, an absent cell as an empty string."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise TableError(f"{path.name} has no column {', '.join(missing)}; needed are {', '.join(COLUMNS)}")
            rows = [{name: (row[name] or "").strip() for name in COLUMNS} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path.name} is no CSV in UTF-8: {error}") from error
    if not rows:
        raise TableError(f"{path.name} has no rows")
    return rows


def number(cell: str) -> float | None:
    """Return a cell as a number above 0, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None
