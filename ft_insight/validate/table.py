"""A table of published measurements, as CSV."""

from __future__ import annotations

import csv
import re
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

SAMPLES = ("queries/s", "samples/s", "samples/sec", "sequences/s", "sequences/sec", "examples/s")
TOKENS = ("tokens/s", "tokens/sec", "tok/s")
"""Units of throughput, without case and what follows a space."""


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


_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_A_NUMBER = r"(\d{1,3}(?:,\d{3})+|\d+)"
_MIDDLE = r"(?:mean|average|avg|median)"
_TYPICAL = (re.compile(rf"(?i){_MIDDLE}[\s~:=]*{_A_NUMBER}"), re.compile(rf"(?i){_A_NUMBER}\s*\(?{_MIDDLE}"))
_STATED = re.compile(rf"~?\s*{_A_NUMBER}(?![\d.]|\s*(?:-|–|to)\s*\d|\s*[kK])")


def number(cell: str) -> float | None:
    """Return a cell as a number above 0, or None. ``1,024`` is a thousand and some, ``~5`` is 5."""
    text = cell.strip().removeprefix("~").strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None


def count(cell: str) -> int | None:
    """Return a cell as a whole number above 0, or None."""
    value = number(cell)
    return int(value) if value is not None and value == int(value) else None


def length_of(cell: str) -> float | None:
    """Return the length that rows have as they are computed: ``512``, ``174(median)``, ``<=768 (mean ~210)`` is 210.

    None where only a limit, a range or words are given: a limit says nothing of what is below it.
    """
    found = next((match for pattern in _TYPICAL if (match := pattern.search(cell))), _STATED.match(cell.strip()))
    return number(found.group(1)) if found else None


def says_yes(cell: str) -> bool:
    """Tell whether a cell affirms."""
    return cell.casefold() in ("yes", "y", "true", "1", "on", "full")


def method_of(cell: str) -> str | None:
    """Return ``full``, ``qlora`` or ``lora``, which stands for adapters of all kinds; None for an empty cell."""
    text = cell.casefold()
    if re.search(r"q-?lora|^q|nf4|4-?bit|int4|gptq", text):
        return "qlora"
    if re.search(r"full|^fft|^sft|pre-?train", text):
        return "full"
    return "lora" if text else None


def seconds_of(row: dict[str, str]) -> float | None:
    """Return the seconds of a micro-batch: as measured, else from the throughput of all GPUs; None without either."""
    seconds = number(row.get("step_time_s", ""))
    if seconds is not None:
        return seconds
    rate, batch, length = (number(row.get(name, "")) for name in ("throughput", "batch_per_gpu", "seq_len"))
    if rate is None or batch is None:
        return None
    queries = batch * (number(row.get("n_gpus", "")) or 1.0)
    unit = row.get("unit", "").casefold().split(" ")[0]
    if unit in TOKENS:
        return queries * length / rate if length is not None else None
    return queries / rate if unit in SAMPLES else None
