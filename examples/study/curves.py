"""The sections of ``study.md`` that are of rates and counts: throughput, SM and DRAM use, accuracy, experts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence

import svg
from study import paper
from study.layout import Row, Shares, figure, percent
from study.measured import Measured

from ft_insight import units
from ft_insight.report.layout import pipes
from ft_insight.words import clean


def throughput(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    rows: list[Row] = [("run", "queries/s", "of dense at batch 1", "paper, CS", "paper, MATH")]
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rates = {(one.run.model, one.run.kind, one.run.name): one.view.rates.queries_per_s for one in ready}
    for one in ready:
        model, kind = one.run.model, one.run.kind
        rate, base = one.view.rates.queries_per_s, rates.get((model, "dense", "batch1"))
        relative = rate / base if rate and base else None
        at_most = [_published_rate(model, kind, one.run.name, data) for data in ("CS", "MATH")]
        times = units.NA if relative is None else f"{relative:.2f}x"
        rows.append((one.run.title, units.rate(rate), times, *at_most))
        if relative is not None:
            curves.setdefault(model, {}).setdefault(kind, []).append((one.run.batch, relative))
    pictures = []
    for model, ours in curves.items():
        published = paper.PUBLISHED[model]["queries_per_s"]["CS"]
        theirs = {
            f"{kind}, paper CS": [(float(batch), rate / published["dense"]["1"]) for batch, rate in series.items()]
            for kind, series in published.items()
        }
        title = f"Throughput of {model} (paper: Fig. 8)"
        drawn = svg.chart(title, "batch", "queries/s, as a multiple of dense at batch 1", _series(ours, theirs))
        pictures.append(figure(figures, f"fig08_throughput_{model}", drawn))
    return "\n\n".join(["## Throughput (Fig. 8)", pipes(rows), *pictures])


def _series(ours: Mapping[str, svg.Points], theirs: Mapping[str, svg.Points]) -> list[svg.Series]:
    styles = [(name, points, "line dots") for name, points in ours.items()]
    styles += [(name, points, "dashed dots") for name, points in theirs.items()]
    return [svg.Series(name, points, i, style) for i, (name, points, style) in enumerate(styles)]


def _published_rate(model: str, kind: str, name: str, data: str) -> str:
    series = paper.PUBLISHED[model]["queries_per_s"][data][kind]
    batch = "1" if name == "batch1" else max(series, key=int)
    return f"{units.rate(series[batch])} at {batch}"


def use(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    bars: dict[str, Shares] = {}
    rows: list[Row] = [("run", "SM", "DRAM", "paper, SM", "paper, memory", "how")]
    for one in ready:
        sm, memory = paper.use(one.run.model, one.run.kind, one.run.name)
        use = one.use
        ours = (percent(use.sm_percent), percent(use.dram_percent))
        rows.append((one.run.title, *ours, percent(sm), percent(memory), clean(use.basis)))
        published = f"{one.run.model} {paper.title(one.run.model, one.run.kind, one.run.name)}"
        for name, here, there in (("SM", use.sm_percent, sm), ("DRAM", use.dram_percent, memory)):
            if here is not None:
                bars[f"{one.run.title}: {name}"] = {name: here / 100}
                bars[f"{published}: {name}"] = {name: there / 100}
    words = (
        "The paper's are of the MoE kernels alone, by Nsight Compute, weighted by time; its memory figure is of the "
        "busiest memory unit. To measure the same here, export a run of Nsight Compute as CSV and add it with "
        "`ft-insight ncu`, then call this study again."
    )
    title = "SM and DRAM use (paper: Fig. 9 and 10)"
    pictures = [figure(figures, "fig09_sm_dram", svg.stacked(title, bars))] if bars else []
    return "\n\n".join(["## SM and DRAM use (Fig. 9 and 10)", words, pipes(rows), *pictures])


def accuracy(asked: argparse.Namespace, ready: Sequence[Measured], figures: dict[str, str]) -> str:
    told = [one for one in ready if one.run.name == "largest" and one.accuracy]
    if not told:
        why = "no run had an answer to score" if asked.epochs else "--epochs was 0"
        return f"## Accuracy by epoch (Fig. 3)\n\nNot measured: {why}."
    epochs = sorted({epoch for one in told for epoch, _ in one.accuracy})
    rows: list[Row] = [("run", *(f"{epoch:.3g}" for epoch in epochs))]
    curves: dict[str, tuple[dict[str, svg.Points], dict[str, svg.Points]]] = {}
    for one in told:
        known = dict(one.accuracy)
        rows.append((one.run.title, *(units.share(known.get(epoch)) for epoch in epochs)))
        ours, theirs = curves.setdefault(one.run.model, ({}, {}))
        ours[one.run.kind] = one.accuracy
        for data, of in paper.PUBLISHED[one.run.model]["accuracy_by_epoch"].items():
            series = of[one.run.kind]
            at = [series[round(e)] if e == round(e) and e < len(series) else None for e in epochs]
            name = f"{one.run.model} paper: {one.run.kind}, {data}"
            rows.append((name, *(units.share(value) for value in at)))
            theirs[f"{one.run.kind}, paper {data}"] = list(enumerate(series))
    pictures = []
    for model, (ours, theirs) in curves.items():
        title = f"Accuracy of {model} (paper: Fig. 3)"
        drawn = svg.chart(title, "epoch", "held-out rows answered right", _series(ours, theirs))
        pictures.append(figure(figures, f"fig03_accuracy_{model}", drawn))
    questions = told[0].view.latest_logs.get("eval_questions")
    words = f"Share of {units.count(questions)} held-out rows answered right, before training (0) and after each epoch."
    return "\n\n".join(["## Accuracy by epoch (Fig. 3)", words, pipes(rows), *pictures])


def experts(ready: Sequence[Measured], figures: dict[str, str]) -> str:
    rows: list[Row] = [("run", *(f"expert {e}" for e in range(8)), "variance", "queries")]
    bars: dict[str, Shares] = {}
    for one in ready:
        if one.run.kind != "sparse" or one.run.name != "largest":
            continue
        for when, load in (("start", one.view.load_start), ("end", one.view.load_end)):
            if load is None:
                continue
            label = f"{one.run.model}, {when}"
            rows.append((label, *_loads(load.means), f"{load.queries}"))
            bars[label] = _by_expert(load.means)
        for data, of in paper.PUBLISHED[one.run.model]["tokens_per_query"].items():
            for when in ("before", "after"):
                label = f"{one.run.model} paper: {data} {when}"
                rows.append((label, *_loads(of[when]), "1000"))
                bars[label] = _by_expert(of[when])
    title = "## Tokens per expert, before and after (Fig. 11)"
    if not bars:
        return f"{title}\n\nNot measured: no sparse run at the largest batch."
    words = (
        "Tokens per query and expert, mean over layers, of the sparse runs at the largest batch: the first and the "
        "last 5% of a run's steps (or 2 s of it, if that is more), which see other rows, against the paper's 1,000 "
        "rows before and after 10 epochs (padding counted there, not here). Variance over the 8 means, divided by 8. "
        "Dense runs are even by definition."
    )
    picture = figure(figures, "fig11_experts", svg.stacked("Tokens per expert (paper: Fig. 11)", bars))
    return "\n\n".join([title, words, pipes(rows), picture])


def _loads(means: Sequence[float]) -> Iterable[str]:
    mean = sum(means) / len(means)
    variance = sum((value - mean) ** 2 for value in means) / len(means)
    return (*(units.significant(value) for value in means), units.significant(variance))


def _by_expert(means: Sequence[float]) -> dict[str, float]:
    whole = sum(means) or 1.0
    return {f"expert {e}": value / whole for e, value in enumerate(means)}
