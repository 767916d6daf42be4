"""Throughput against batch: the model's curve with its band, what was measured, the present and the largest batch."""

from __future__ import annotations

from rich.text import Text

from ft_insight import units
from ft_insight.run_view import Points
from ft_insight.tui.frame import Frame
from ft_insight.tui.what_if import Outlook
from ft_insight.tui.widgets.plots import Axis, Layer, chart, tick
from ft_insight.tui.widgets.text import ATTENTION, CURVE, FAINT, MARK, figure, joined, words


def batch_chart(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw queries/s against queries per micro-batch; [] where the run does not tell a curve."""
    found = frame.outlook
    if found is None or not found.curve or height < 5:
        return []
    top = max(y for _, y in (*found.high, *found.curve)) * 1.05
    measured = _measured(frame, found)
    layers = [
        Layer(found.low, FAINT),
        Layer(found.high, FAINT),
        Layer(measured, CURVE, joined=False),
        Layer(found.curve, MARK),
        *_upright(found.present, top, CURVE),
        *_upright(_largest(found), top, ATTENTION),
    ]
    last = _last(found)
    low, high = Axis(tick, low=0.0, high=max([top, *(y for _, y in measured)])), Axis(units.count, low=0.0, high=last)
    return [_key(found), *chart(layers, width, height - 1, low, high)]


def _key(found: Outlook) -> Text:
    largest = _largest(found)
    # what lies beyond the axis is not drawn
    sign = "│" if (largest or 0) <= _last(found) else "→"
    return joined(
        [
            words(("━", MARK), " queries/s by batch, ", ("━", FAINT), " 80% interval"),
            words(("•", CURVE), " micro-batches as measured"),
            words(("│", CURVE), " present batch ", figure(units.count(found.present))),
            words((sign, ATTENTION), " largest ", figure(units.count(largest))) if largest else Text(),
        ]
    )


def _last(found: Outlook) -> float:
    """Return where the axis of batches ends."""
    return max(x for x, _ in found.curve)


def _largest(found: Outlook) -> int | None:
    return found.here.largest_batch if found.here else None


def _measured(frame: Frame, found: Outlook) -> Points:
    """Return (queries, queries/s) of micro-batches: each as if its whole step were made of its like."""
    rest = (found.measured.rest_s or 0.0) if found.measured else 0.0
    times = found.measured.accumulation if found.measured else 1.0
    ranks = found.measured.ranks if found.measured else 1
    return tuple(
        (float(m.queries), m.queries * times * ranks / (times * m.compute_s + rest))
        for m in frame.view.micro
        if m.queries and m.compute_s
    )


def _upright(batch: int | None, top: float, style: str) -> list[Layer]:
    return [Layer(((float(batch), 0.0), (float(batch), top)), style)] if batch else []
