"""``ft-insight validate``: the estimator run over a table of published measurements."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ft_insight.validate.checked import Checked
from ft_insight.validate.summary import report_text
from ft_insight.validate.table import TableError, read_table

__all__ = ["Checked", "TableError", "validate_text"]


def validate_text(path: Path, *, fast: bool = False) -> str:
    """Predict what a table says was measured, each figure without using itself, and return the comparison as text.

    Batch and token sweeps by leave-one-out, the same work on several GPUs from each other, peak memory by tracing
    the step. The last takes minutes and needs torch: ``fast``, or an environment without it, leaves it out. Raises
    :class:`TableError` with one line for a file that is not such a table.
    """
    from ft_insight.validate import pairs, sweeps

    rows = read_table(path)
    checks, left_out = sweeps.check(rows)
    for found, why in (pairs.check(rows), _peaks(rows, fast=fast)):
        checks += found
        left_out += why
    idle = sum(not any(row[name] for name in ("sweep_id", "pair_id", "peak_mem_gib")) for row in rows)
    if idle:
        left_out.append(f"{idle} rows left out: no sweep_id, no pair_id and no peak memory, so nothing to compare")
    if not checks:
        raise TableError(f"{path.name} holds nothing to check: no sweeps, no pairs, no peak memory")
    return report_text(path.name, len(rows), checks, left_out)


def _peaks(rows: list[dict[str, str]], *, fast: bool) -> tuple[list[Checked], list[str]]:
    measured = sum(bool(row["peak_mem_gib"]) for row in rows)
    if fast or not measured:
        return [], [f"{measured} rows of peak memory left out: --fast was asked for"] if measured else []
    if find_spec("torch") is None:
        return [], [f"{measured} rows of peak memory left out: they need torch (pip install ft-insight[train])"]
    from ft_insight.validate import peaks

    return peaks.check(rows)
