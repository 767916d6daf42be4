"""Throughput and loss: what the run achieves, in figures and curves."""

from __future__ import annotations

from rich.text import Text

from ft_insight import units
from ft_insight.run_view import Points, RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.plots import Axis, Layer, chart, spark, tick, trend
from ft_insight.tui.widgets.text import ATTENTION, CURVE, MARK, QUIET, clean, figure, joined, words

NOT_FINITE = "NaN/inf"


def throughput_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw queries and tokens per second, the share of padding, and the curve of queries per second."""
    view = frame.view
    points = view.curves.get("queries_per_s", ())
    now = words(("queries/s ", ""), _rate(view.recent.queries_per_s), f" now, {_plain(view.rates.queries_per_s)} mean")
    tokens = joined(
        [
            words(("tokens/s ", ""), _rate(view.recent.real_tokens_per_s)),
            words(("slots/s ", ""), figure(_plain(view.recent.slots_per_s), "")),
            words(("padding ", ""), figure(units.share(view.totals.padding_share)), " of slots"),
        ]
    )
    if height < 6:
        return [_with_spark(now, points, width, 0.0), tokens]
    now = words(("━ " if points else "", CURVE), now)
    curve = chart(trend(points), width, height - 2, Axis(tick, low=0.0), Axis(_step))
    return [now, tokens, *(curve or [Text("no curve before the second step", QUIET)])]


def loss_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw the latest loss, evaluation loss, gradient norm and learning rate, and the curve of the loss."""
    view = frame.view
    points = view.curves.get("loss", ())
    evaluation = eval_name(view)
    tall = height >= 6
    dots = view.curves.get(evaluation or "", ()) if tall else ()
    sign = Text("• " if dots else "", MARK)
    line = Text("━ " if points and tall else "", CURVE)
    first = joined(
        [
            words(line, _logged(view, "loss", "loss")),
            words(sign, _logged(view, evaluation or "eval_loss", "eval")),
        ]
    )
    second = joined(
        [
            _logged(view, "grad_norm", "grad norm"),
            _logged(view, "learning_rate", "lr"),
            words(("epoch ", ""), figure(_plain(view.epoch), "")),
        ]
    )
    if not tall:
        return [_with_spark(first, points, width, None), second]
    layers = [*trend(points), Layer(dots, MARK, sign="•")]
    curve = chart(layers, width, height - 2, Axis(tick), Axis(_step))
    return [first, second, *(curve or [Text("no loss logged yet", QUIET)])]


def eval_name(view: RunView) -> str | None:
    """Find the evaluation loss: the trainer's own, or that of the first of several evaluation sets."""
    if "eval_loss" in view.latest_logs:
        return "eval_loss"
    return next((n for n in view.latest_logs if n.startswith("eval_") and n.endswith("_loss")), None)


def value_text(view: RunView, name: str) -> Text:
    """Write a logged value; one that was not finite asks for attention, one never logged is n/a."""
    value = view.latest_logs.get(name)
    if value is None and name in view.nonfinite:
        return Text(NOT_FINITE, ATTENTION)
    return figure(_plain(value))


def _logged(view: RunView, name: str, label: str) -> Text:
    own = "" if name in ("loss", "eval_loss", "grad_norm", "learning_rate") else f" ({clean(name, 24)})"
    return words((f"{label} ", ""), value_text(view, name), own)


def _with_spark(line: Text, points: Points, width: int, low: float | None) -> Text:
    room = width - line.cell_len - 2
    return words(line, "  ", spark(points, room, low)) if room >= 6 and points else line


def _plain(value: float | None) -> str:
    return units.NA if value is None else units.significant(value)


def _rate(value: float | None) -> Text:
    return figure(_plain(value))


def _step(value: float) -> str:
    return f"step {units.count(value)}"
