"""The help: keys, and what the words and signs of the dashboard mean."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from ft_insight.tui.widgets.text import CURVE, STRONG, Cell, table

_KEYS = (
    ("1-7, ←, →, Tab", "open a tab"),
    ("↑ ↓ PgUp PgDn", "scroll"),
    ("s", "sort the layers by imbalance (Experts)"),
    ("c", "change since the start instead of load (Experts)"),
    ("↑ ↓ j k", "choose the layer that is shown in detail (Experts)"),
    ("g e d b t", "what if: GPU, epochs, dollars, batch, top-k (Cost)"),
    ("G E D B T 0", "the same the other way; 0 as it was (Cost)"),
    ("n", "all notices in full"),
    ("p", "freeze the screen; the log is followed all the same"),
    ("?", "this help; Esc closes it"),
    ("q", "leave; the run is not touched"),
)
_MEANINGS = (
    ("n/a", "not measured; 0 is written only where 0 was measured"),
    ("NaN/inf", "the trainer logged a value that was not finite"),
    ("orange", "needs attention"),
    ("curves", "faint: each point; bright: running mean"),
    ("tokens, slots", "without and with padding"),
    ("recompute", "forward once more, for gradient checkpointing"),
    ("glue", "what a layer does besides its parts"),
    ("util", "time with any kernel running; SM: cores at work"),
    ("even", "an expert's share if all had the same load"),
    ("dead", "experts that got no token"),
    ("points", "difference of two shares: from 10% to 12% is +2.0"),
    ("start, of late", "the first and the latest 5% of the steps"),
    ("entropy", "1: all experts have the same load, 0: one has it all"),
    ("model, outside", "between the model's parts; outside of the model"),
    ("theoretical", "from launch shape and card; (ncu) is measured"),
    ("ledger gap", "all phases' sum against all steps' wall time"),
)


class Sheet(ModalScreen[None]):
    """Some lines of text that lie over the dashboard until a key closes them."""

    BINDINGS: ClassVar[list[BindingType]] = [("question_mark,n,escape,enter", "dismiss", "close")]

    def __init__(self, lines: list[Text]) -> None:
        super().__init__()
        self._text = Text("\n").join(lines)

    def compose(self) -> ComposeResult:
        """Show the lines, which scroll where they are too many."""
        with VerticalScroll(id="sheet"):
            yield Static(self._text)


def help_lines() -> list[Text]:
    """Write the help: the keys, then the words."""
    rows: list[list[Cell]] = [[Text(key, f"bold {CURVE}"), Text(what)] for key, what in _KEYS]
    rows.append(["", ""])
    for word, what in _MEANINGS:
        rows += [[Text(word, STRONG), what]]
    return table(rows, "<<")
