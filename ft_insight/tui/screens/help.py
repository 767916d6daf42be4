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
    ("1-5, ←, →, Tab", "open a tab"),
    ("↑ ↓ PgUp PgDn", "scroll"),
    ("s", "sort the layers of Experts by imbalance, and back"),
    ("n", "all notices in full"),
    ("p", "freeze the screen, and go on; the log is followed all the while"),
    ("?", "this help; Esc closes it"),
    ("q", "leave; the run is not touched"),
)
_MEANINGS = (
    ("n/a", "not measured; 0 is written only where 0 was measured"),
    ("NaN/inf", "the trainer logged a value that was not finite"),
    ("orange", "needs attention"),
    ("curves", "faint: each point; bright: running mean"),
    ("tokens, slots", "without and with padding"),
    ("util", "time in which some kernel ran; SM: how busy the cores were"),
    ("even", "an expert's share if all had the same load"),
    ("dead", "experts that got no token"),
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
    """Write the help."""
    keys: list[list[Cell]] = [[Text(k, f"bold {CURVE}"), Text(what)] for k, what in _KEYS]
    meanings: list[list[Cell]] = [[Text(k, STRONG), what] for k, what in _MEANINGS]
    return [
        Text("keys", STRONG),
        *table(keys, "<<"),
        Text(),
        Text("meanings", STRONG),
        *table(meanings, "<<"),
    ]
