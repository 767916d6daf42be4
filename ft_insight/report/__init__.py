"""A run as text, Markdown or JSON: pure functions of its view."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ft_insight.estimate.peak_fit import fit_peak
from ft_insight.reader import Status
from ft_insight.report.layout import to_markdown, to_text
from ft_insight.report.sections import report_sections
from ft_insight.run_view import RunView
from ft_insight.verdict import findings
from ft_insight.words import headline

FORMATS = ("text", "markdown", "json")


def render(view: RunView, status: Status, form: str = "text") -> str:
    """Return the report of a run in one of ``FORMATS``, without a newline at the end."""
    if form == "json":
        return to_json(report_data(view, status))
    sections = report_sections(view, status)
    title = headline(view)
    return to_markdown(title, sections) if form == "markdown" else to_text(title, sections)


def report_data(view: RunView, status: Status) -> dict[str, Any]:
    """Return everything that is known of a run as plain data; null is unmeasured."""
    data: dict[str, Any] = msgspec.to_builtins(view)
    data["status"] = {"kind": status.kind, "text": status.text}
    peak = fit_peak(view.filling)
    data["memory_fit"] = None if isinstance(peak, str) else msgspec.to_builtins(peak)
    data["padding_share"] = view.totals.padding_share
    data["findings"] = [msgspec.to_builtins(f) for f in findings(view)]
    change = view.load_change
    data["load_change"] = None if change is None else {**msgspec.to_builtins(change), "basis": change.basis}
    for load, layer in zip(view.experts, data["experts"], strict=True):
        layer.update(shares=load.shares, max_over_mean=load.max_over_mean, cv=load.cv, dead=load.dead)
    return data


def to_json(data: Any) -> str:
    """Return strict JSON, indented for people: what is not finite is null, and what a terminal acts on is escaped."""
    finite = msgspec.json.decode(msgspec.json.encode(data))
    return json.dumps(finite, indent=2, allow_nan=False)
