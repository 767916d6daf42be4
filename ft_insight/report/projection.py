"""``ft-insight project``: from a run and a question to a table, or JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ft_insight.catalog import Gpu, find_gpu, load_gpus
from ft_insight.estimate import DEFAULT_GPUS, Ask, fit_record, measure, project
from ft_insight.estimate.workload import workload_of
from ft_insight.reader import read_run
from ft_insight.report import to_json
from ft_insight.report.layout import Section, to_text
from ft_insight.report.sections import projection_sections
from ft_insight.runlog import find_run
from ft_insight.words import clean, fit_text, headline


def project_text(run_name: str | None, question: Mapping[str, Any], *, as_json: bool, verbose: bool) -> str:
    """Project the run that ``run_name`` means.

    ``question`` holds gpu, queries, epochs, seq_len and price; None is the run's own. Raises ``ValueError`` with one
    line for an unknown GPU, a price that could be meant for several, or a run that cannot be priced.
    """
    path = find_run(run_name)
    gpus = resolve_gpus(question.get("gpu"))
    price = cast("float | None", question.get("price"))
    if price is not None and question.get("gpu") and len(gpus) != 1:
        raise ValueError("--price needs exactly one --gpu: it is the price of that GPU")
    view, status = read_run(path)
    if not view.totals.steps:
        raise ValueError(f"{path} has no finished step yet: there is nothing to project from")
    measured = measure(view)
    workload = workload_of(
        view, queries=question.get("queries"), epochs=question.get("epochs"), seq_len=question.get("seq_len")
    )
    asked = Ask(workload, gpus, price, price_here=not question.get("gpu"))
    result = project(measured, asked)
    fit = fit_record(measured, view.clock_s)
    if as_json:
        return to_json(
            {
                "run": os.fsencode(path).decode("utf-8", "replace"),
                "status": status.kind,
                "fit": msgspec.to_builtins(fit),
                "projection": msgspec.to_builtins(result),
            }
        )
    sections = [
        Section("Step time of this run", (fit_text(fit),)),
        *projection_sections(result, verbose=verbose),
    ]
    note = "" if status.kind == "completed" else f" · {clean(status.text)}"
    return to_text(headline(view) + note, sections)


def resolve_gpus(names: list[str] | None) -> tuple[Gpu, ...]:
    """Return the GPUs that are asked for, each once; ``all`` is the whole catalogue."""
    if not names:
        return tuple(find_gpu(name) for name in DEFAULT_GPUS)
    found: dict[str, Gpu] = {}
    for name in names:
        chosen = load_gpus() if name.lower() == "all" else (find_gpu(name),)
        found.update((gpu.name, gpu) for gpu in chosen)
    return tuple(found.values())
