"""``ft-insight project``: from one run or several and a question to a table, Markdown or JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ft_insight.catalog import Gpu, books, find_gpus
from ft_insight.estimate import DEFAULT_GPUS, Ask, Measured, fit_record, measure, project
from ft_insight.estimate.workload import workload_of
from ft_insight.reader import Status, read_run
from ft_insight.records import Fit, Projection
from ft_insight.report import to_json
from ft_insight.report.job import projection_sections
from ft_insight.report.joint import joint_lines
from ft_insight.report.layout import Section, to_markdown, to_text
from ft_insight.run_view import RunView
from ft_insight.runlog import find_run
from ft_insight.words import clean, fit_text, headline

if TYPE_CHECKING:
    from ft_insight.estimate.joint import Joint


def project_text(run_names: Sequence[str], question: Mapping[str, Any], *, form: str, verbose: bool) -> str:
    """Project the run that ``run_names`` means: the newest without a name, several as one.

    ``question`` holds gpu, counts, batch, top_k, queries, epochs, seq_len, lengths, price, prices (a file) and probe;
    None is the run's own. ``form`` is ``text``, ``markdown`` or ``json``. Raises ``ValueError`` for an unknown
    GPU, a price or a probe that could be meant for several, runs that do not belong together, or a run that cannot
    be priced.
    """
    paths = [find_run(name) for name in run_names or (None,)]
    gpus = find_gpus(question.get("gpu") or DEFAULT_GPUS)
    counts = cast("tuple[int, ...]", question.get("counts") or ())
    price = cast("float | None", question.get("price"))
    if price is not None and question.get("gpu") and len(gpus) != 1:
        raise ValueError("--price needs exactly one --gpu: it is the price of that GPU")
    if price is not None and len(counts) > 1:
        raise ValueError("--price needs one number in --gpus: it is the price of all of them together")
    read = [(path, *_finished(path)) for path in paths]
    view, status = read[0][1:]
    measured = measure(*(each for _, each, _ in read))
    workload = workload_of(
        view,
        queries=question.get("queries"),
        epochs=question.get("epochs"),
        seq_len=question.get("seq_len"),
        lengths=question.get("lengths"),
    )
    asked = Ask(
        workload,
        gpus,
        price,
        price_here=not question.get("gpu"),
        batch=question.get("batch"),
        top_k=question.get("top_k"),
        counts=counts,
        prices=books(question.get("prices")),
        probe=_probe(question.get("probe"), gpus),
    )
    result = project(measured, asked)
    fit = fit_record(measured, view.clock_s)
    if form == "json":
        return _as_json(paths, status, fit, measured.joint, result)
    return _laid_out(view, status, _model_lines(measured, fit), result, len(paths), form=form, verbose=verbose)


def _model_lines(measured: Measured, fit: Fit) -> tuple[str, ...]:
    """Tell the model of step time: of this run, or of several that say more together than each of them."""
    return (fit_text(fit),) if measured.joint is None else joint_lines(measured.joint)


def _finished(path: Path) -> tuple[RunView, Status]:
    view, status = read_run(path, thinned=True)
    if not view.totals.steps:
        raise ValueError(f"{path} has no finished step yet: there is nothing to project from")
    return view, status


def _probe(name: str | None, gpus: tuple[Gpu, ...]) -> Measured | None:
    """Read the run of a probe, and make sure that it is of a GPU that is asked for."""
    if name is None:
        return None
    path = find_run(name)
    probe = measure(_finished(path)[0])
    if probe.here is None:
        raise ValueError(f"{path} ran on no GPU of the catalogue: a probe is measured on the GPU that is asked for")
    if probe.here.name not in {gpu.name for gpu in gpus}:
        raise ValueError(f"{path} ran on {probe.here.name}: ask for it with --gpu {probe.here.name!r}")
    return probe


def _as_json(paths: Sequence[Path], status: Status, fit: Fit, joint: Joint | None, result: Projection) -> str:
    names = [os.fsencode(path).decode("utf-8", "replace") for path in paths]
    data: dict[str, Any] = {
        "run": names[0],
        "status": status.kind,
        "fit": msgspec.to_builtins(fit),
        "projection": msgspec.to_builtins(result),
    }
    if len(names) > 1:
        data["runs"] = names
    if joint is not None:
        unknowns = {name: [value, *joint.interval(name)] for name, value in joint.unknowns.items()}
        data["joint_fit"] = {"formula": joint.best.form.formula, "unknowns": unknowns, "error": joint.best.error}
    return to_json(data)


def _laid_out(
    view: RunView,
    status: Status,
    model: tuple[str, ...],
    result: Projection,
    runs: int,
    *,
    form: str,
    verbose: bool,
) -> str:
    what = "Step time of this run" if runs == 1 else f"Step time of these {runs} runs"
    sections = [Section(what, model), *projection_sections(result, verbose=verbose)]
    note = "" if status.kind == "completed" else f" · {clean(status.text)}"
    lay_out = to_markdown if form == "markdown" else to_text
    return lay_out(headline(view) + note, sections)
