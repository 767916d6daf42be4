"""``study.md`` and its figures: what was measured here beside what the paper published, and what was not measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from study import paper
from study.curves import accuracy, experts, throughput, use
from study.layout import Row
from study.measured import Measured
from study.shares import kernels, layers, phases

from ft_insight import units
from ft_insight.report.layout import escape, pipes
from ft_insight.words import clean


def write_study(folder: Path, asked: argparse.Namespace, runs: Sequence[Measured]) -> Path:
    """Write ``study.md`` and its figures into a folder; return the path of the former."""
    figures: dict[str, str] = {}
    ready = [one for one in runs if one.reason is None]
    sections = [
        _intro(asked, ready),
        _runs(runs),
        _largest(runs),
        phases(ready, figures),
        layers(ready, figures),
        kernels(ready, figures),
        throughput(ready, figures),
        use(ready, figures),
        accuracy(asked, ready, figures),
        experts(ready, figures),
        _not_measured(asked, runs),
    ]
    for name, text in figures.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    file = folder / "study.md"
    file.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return file


def _intro(asked: argparse.Namespace, ready: Sequence[Measured]) -> str:
    devices = sorted({clean(one.view.device) for one in ready}) or ["no run has completed"]
    versions = ready[0].view.header.versions if ready and ready[0].view.header else {}
    wanted = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    data = escape(Path(asked.dataset).name) if asked.dataset else "made-up rows"
    lines = [
        "# The paper's study, on this machine",
        f"- machine: {escape(', '.join(devices))}; "
        + escape(", ".join(f"{name} {clean(versions[name])}" for name in wanted if name in versions)),
        f"- data: {data}, cut at {asked.max_length} tokens; {asked.steps} steps a run"
        + (f", the runs at the largest batch {asked.epochs:g} epochs" if asked.epochs else ""),
        "- dense: every token goes to all 8 experts; sparse: to 2 of them",
        f"- paper: {escape(paper.PUBLISHED['about'])}",
    ]
    if asked.tiny:
        lines.append(
            "- **tiny random models**: their shares show that the study works, and say nothing about Mixtral 8x7B, "
            "BlackMamba 2.8B or a GPU; the paper's figures stand beside them for their form only"
        )
    return "\n".join([lines[0], "", *lines[1:]])


def _runs(runs: Sequence[Measured]) -> str:
    head = ("run", "batch", "steps counted", "step", "queries/s", "tokens/s", "padding", "loss", "peak memory", "log")
    rows: list[Row] = [head]
    for one in runs:
        name = f"{one.run.model} {one.run.kind}"
        if one.reason is not None:
            rows.append((name, _batch(one), *[units.NA] * 7, clean(one.reason)))
            continue
        view = one.view
        losses = view.curves.get("loss", ())
        rows.append(
            (
                name,
                _batch(one),
                str(one.steps),
                units.duration(one.step_s),
                units.rate(view.rates.queries_per_s),
                units.rate(view.rates.real_tokens_per_s),
                units.share(view.totals.padding_share),
                f"{losses[0][1]:.3g} -> {losses[-1][1]:.3g}" if losses else units.NA,
                units.size(view.memory.peak_allocated_bytes if view.memory else None),
                f"{one.run.folder.name}/{one.run.log.name}",
            )
        )
    note = (
        "Steps and rates leave out the first step, which warms up, and the one under the profiler. Layers were timed "
        "on each step."
    )
    return "\n\n".join(["## Runs", pipes(rows), note])


def _batch(one: Measured) -> str:
    return str(one.run.batch) if one.run.name == "batch1" else f"{one.largest.batch if one.largest else '?'} (largest)"


def _largest(runs: Sequence[Measured]) -> str:
    rows: list[Row] = [("run", "largest batch", "how", "paper, CS", "paper, MATH")]
    for one in runs:
        if one.largest is not None:
            published = paper.PUBLISHED[one.run.model]["table_iii"][one.run.kind]
            batch = str(one.largest.batch) if one.largest.batch else "none"
            rows.append(
                (
                    f"{one.run.model} {one.run.kind}",
                    batch,
                    clean(one.largest.basis),
                    str(published["CS"]),
                    str(published["MATH"]),
                )
            )
    return "\n\n".join(["## Largest batch (Table III, 48 GB)", pipes(rows)])


def _not_measured(asked: argparse.Namespace, runs: Sequence[Measured]) -> str:
    lines = [f"{one.run.title}: {one.reason}" for one in runs if one.reason is not None]
    lines += dict.fromkeys(
        clean(f"{notice.collector}: {notice.text}") for one in runs if one.reason is None for notice in one.view.notices
    )
    if any(one.largest is not None and not one.largest.measured for one in runs):
        lines.append("the largest batch: it is a cap here, so the paper's Table III has nothing to stand beside it")
    lines.append("energy, other GPUs and the cost of the job: see ft-insight report and ft-insight project of each log")
    lines.append("how all this depends on the length of queries (section IV-B6): --max-length, and another --output")
    return "\n\n".join(["## Not measured here", "\n".join(f"- {escape(line)}" for line in lines)])
