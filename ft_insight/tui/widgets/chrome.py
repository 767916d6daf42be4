"""The frame of the screen: two lines of header that answer "how far, how long, how much", and the key bar."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Static

from ft_insight import units
from ft_insight.reader import Status
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.text import (
    ATTENTION,
    CURVE,
    GOOD,
    QUIET,
    STRONG,
    TRACK,
    clean,
    cut,
    joined,
    words,
)

_SIGNS = {"live": ("●", GOOD), "completed": ("✔", GOOD), "waiting": ("○", QUIET), "reading": ("○", QUIET)}


def header_lines(frame: Frame, width: int) -> list[Text]:
    """Draw the header: what runs where and how it stands; then progress, times and dollars."""
    view = frame.view
    state = status_text(frame.status, frame.paused)
    state = cut(state, max(8, width - 30))
    name = words((" ft-insight  ", f"bold {CURVE}"), (clean(view.title), STRONG))
    if not frame.waiting:
        name.append(f" · {clean(view.device)}", QUIET)
    name = cut(name, width - state.cell_len - 3)
    name.append(" " * (width - name.cell_len - state.cell_len - 1))
    return [name + state, _progress(frame, width)]


def status_text(status: Status, paused: bool = False) -> Text:
    """Say how the run stands; only what needs attention is coloured for it."""
    sign, style = _SIGNS.get(status.kind, ("▲", ATTENTION))
    text = "waiting" if status.kind == "waiting" else clean(status.text)
    line = words((f"{sign} ", style), (text, style if style == ATTENTION else ""))
    return words(("‖ paused  ", ATTENTION), line) if paused else line


def _progress(frame: Frame, width: int) -> Text:
    view = frame.view
    if frame.waiting:
        return Text()
    of = f" / {units.count(view.total_steps)}" if view.total_steps else ""
    facts = [
        words("step ", (units.count(view.step), STRONG), of),
        words((units.clock(frame.elapsed_s), STRONG), " elapsed"),
    ]
    if not frame.status.over:
        facts.append(words((units.clock(view.to_go_s), STRONG), " to go"))
    facts.append(_dollars(frame))
    text = joined(facts)
    room = width - text.cell_len - 4
    if not view.total_steps or room < 8:
        return cut(words(" ", text), width)
    done = round(min(1.0, view.step / view.total_steps) * room)
    return words(" ", ("━" * done, CURVE), ("━" * (room - done), TRACK), "  ", text)


def _dollars(frame: Frame) -> Text:
    view = frame.view
    if view.usd_so_far is None:
        return Text()
    spent = Text(units.money(view.usd_so_far), STRONG)
    if frame.status.over or view.usd_at_end is None:
        return spent
    return words(spent, f" of {units.money(view.usd_at_end)}")


class HeaderBar(Widget):
    """Shows ``header_lines``."""

    def __init__(self) -> None:
        super().__init__(id="header")
        self._shown = Frame()

    def show(self, frame: Frame) -> None:
        """Draw another moment."""
        self._shown = frame
        self.refresh()

    def render(self) -> Text:
        """Return both lines."""
        return Text("\n").join(header_lines(self._shown, self.size.width))


class _Key(Static):
    """A key of the bar that can also be clicked."""

    def __init__(self, key: str, label: str, short: str, action: str, item_id: str) -> None:
        super().__init__(id=item_id)
        self._key, self._label, self._short, self._action = key, label, short, action

    def render(self) -> Text:
        """Return the key and what it does, shortly on a narrow screen."""
        label = self._label if self.app.size.width >= 110 else self._short
        return words((self._key, f"bold {CURVE}"), (f" {label}".rstrip(), ""))

    async def on_click(self) -> None:
        await self.app.run_action(self._action)


class KeyBar(Horizontal):
    """The last line: the tabs and the keys."""

    def __init__(self, tabs: tuple[tuple[str, str, str], ...]) -> None:
        super().__init__(id="keys")
        self._tabs = tabs

    def compose(self) -> ComposeResult:
        """Lay out the tabs at the left and the keys at the right."""
        for number, (name, label, short) in enumerate(self._tabs, 1):
            yield _Key(str(number), label, short, f"app.tab('{name}')", f"key-{name}")
        yield Static("", id="key-space")
        for key, label, short, action in (
            ("s", "sort", "sort", "app.sort"),
            ("c", "change", "diff", "app.change"),
            ("p", "pause", "pause", "app.pause"),
            ("?", "help", "", "app.help"),
            ("q", "quit", "", "app.quit"),
        ):
            yield _Key(key, label, short, action, f"key-{label}")

    def show(self, tab: str, frame: Frame) -> None:
        """Mark the open tab, and what else is on."""
        for name, _, _ in self._tabs:
            self.query_one(f"#key-{name}").set_class(name == tab, "on")
        self.set_class(tab == "experts", "many")
        self.query_one("#key-pause").set_class(frame.paused, "on")
        self.query_one("#key-sort").set_class(frame.by_imbalance, "on")
        self.query_one("#key-change").set_class(frame.since_start, "on")
        for name in ("sort", "change"):
            self.query_one(f"#key-{name}").display = tab == "experts"
