"""The dashboard: follows one run's log and shows it, on a laptop without torch as well as on the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.message import Message
from textual.theme import Theme
from textual.widgets import ContentSwitcher

from ft_insight.tui.follow import Snapshot, Unreadable, follow
from ft_insight.tui.frame import Frame
from ft_insight.tui.screens.help import Sheet, help_lines
from ft_insight.tui.screens.pages import PAGES, Page
from ft_insight.tui.what_if import AS_IT_WAS, Outlook, outlook, turned
from ft_insight.tui.widgets.chrome import HeaderBar, KeyBar
from ft_insight.tui.widgets.expert_page import moved
from ft_insight.tui.widgets.notices import all_notices

LOOK_S = 5.0
"""An outlook on a live run is worked out anew at most this often, and only while its tab is open."""
LINGER_S = 1.5
"""With ``until``, how long the last figures stay on the screen."""
_TABS = tuple(name for name, *_ in PAGES)
_MOVING = ("live", "silent")
_LEAVING = suppress(NoMatches, ScreenStackError)
"""When the app is left its widgets go one by one, and what was posted before still arrives."""
_THEME = Theme(
    name="ft-insight",
    primary="#6cb0f0",
    accent="#ffa23a",
    warning="#ffa23a",
    error="#ffa23a",
    success="#6fbf73",
    foreground="#c9d3de",
    background="#10151c",
    surface="#10151c",
    panel="#1a212b",
    dark=True,
)


class WatchApp(App[str]):
    """Shows the run that writes ``path``, which may be still to come; its result is an error line or None.

    With ``until`` it leaves by itself, once the run is over or ``until()`` says that nothing more will come.
    """

    CSS_PATH = "app.tcss"
    TITLE = "ft-insight"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012 (as in App)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012 (as in App)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit", priority=True),
        Binding("question_mark", "help", "help"),
        Binding("n", "notices", "notices"),
        Binding("p", "pause", "pause"),
        Binding("s", "sort", "sort"),
        Binding("c", "change", "change"),
        *(Binding(str(n), f"tab('{name}')", name) for n, name in enumerate(_TABS, 1)),
        Binding("right,tab", "turn(1)", "next", priority=True),
        Binding("left,shift+tab", "turn(-1)", "previous", priority=True),
    ]

    class Read(Message):
        """The follower has read something new."""

        def __init__(self, news: Snapshot | Unreadable) -> None:
            super().__init__()
            self.news = news

    class Looked(Message):
        """An outlook has been worked out."""

        def __init__(self, found: Outlook) -> None:
            super().__init__()
            self.found = found

    def __init__(self, path: Path, *, until: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._path = path
        self._until = until
        self._leaving = False
        self._stop = threading.Event()
        self._newest: Snapshot | None = None
        self._frame = Frame(path=path)
        self._looked_at = -LOOK_S
        self._tab = _TABS[0]

    def compose(self) -> ComposeResult:
        """Lay out the header, the pages and the key bar."""
        yield HeaderBar()
        with ContentSwitcher(initial=self._tab):
            for name, _, _, page in PAGES:
                yield page(id=name)
        yield KeyBar(tuple((name, label, short) for name, label, short, _ in PAGES))

    def on_mount(self) -> None:
        """Begin to follow the log."""
        self.register_theme(_THEME)
        self.theme = _THEME.name
        self.animation_level = "none"
        self._draw()
        self.set_interval(1.0, self._tick)
        self.run_worker(self._follow, thread=True, name="follow")
        self.query_one(f"#{self._tab}").focus()

    def on_unmount(self) -> None:
        """Let the follower's thread end."""
        self._stop.set()

    def _follow(self) -> None:
        follow(self._path, lambda news: self.post_message(self.Read(news)), self._stop)

    def on_watch_app_read(self, message: Read) -> None:
        """Take a snapshot in; leave if there is nothing (more) to be followed."""
        if isinstance(message.news, Unreadable):
            self.exit(message.news.message)
            return
        self._newest = message.news
        if self._frame.paused:
            return
        self._take_newest()
        self._leave_if_over()

    def _take_newest(self) -> None:
        if self._newest is None:
            return
        view, status = self._newest.view, self._newest.status
        self._frame = replace(self._frame, view=view, status=status, elapsed_s=self._elapsed(self._newest))
        self._draw()
        self._look_ahead()

    def _look_ahead(self, *, now: bool = False) -> None:
        """Work out what the Cost tab shows, in a thread: fits take tenths of a second."""
        last, view, asked = self._frame.outlook, self._frame.view, self._frame.what_if
        if self._tab != "cost" or (last is not None and last.view is view and last.asked == asked):
            return
        if not now and not self._frame.status.over and time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        measured = last.measured if last is not None and last.view is view else None
        self.run_worker(
            lambda: self.post_message(self.Looked(outlook(view, asked, measured))),
            thread=True,
            exclusive=True,
            group="outlook",
        )

    def on_watch_app_looked(self, message: Looked) -> None:
        """Take an outlook in."""
        self._frame = replace(self._frame, outlook=message.found)
        self._draw()
        # keys may have asked for more while it was worked out
        if message.found.asked != self._frame.what_if:
            self._look_ahead(now=True)

    def _elapsed(self, news: Snapshot) -> float:
        moving = news.status.kind in _MOVING and news.view.header is not None
        return max(news.view.elapsed_s, time.monotonic() - news.origin_s) if moving else news.view.elapsed_s

    def _tick(self) -> None:
        self._leave_if_over()
        if self._newest is None or self._frame.paused or self._frame.status.kind not in _MOVING:
            return
        self._frame = replace(self._frame, elapsed_s=self._elapsed(self._newest))
        with _LEAVING:
            self.screen_stack[0].query_one(HeaderBar).show(self._frame)

    def _draw(self) -> None:
        with _LEAVING:
            screen = self.screen_stack[0]
            screen.query_one(HeaderBar).show(self._frame)
            screen.query_one(KeyBar).show(self._tab, self._frame)
            screen.query_one(f"#{self._tab}", Page).show(self._frame)

    def _leave_if_over(self) -> None:
        if self._until is not None and not self._leaving and self._is_over(self._until):
            self._leaving = True
            self.set_timer(LINGER_S, self._leave)

    def _leave(self) -> None:
        # a run may have been resumed, or its user may have stopped to look
        self._leaving = False
        if self._until is not None and self._is_over(self._until) and not self._frame.paused:
            self.exit(None)

    def _is_over(self, until: Callable[[], bool]) -> bool:
        return self._frame.status.over or until()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keep the dashboard's keys from working behind the help."""
        return action == "quit" or not isinstance(self.screen, Sheet)

    def action_tab(self, name: str) -> None:
        """Open a tab."""
        self._tab = name
        self.query_one(ContentSwitcher).current = name
        self._draw()
        self.query_one(f"#{name}").focus()
        self._look_ahead(now=True)

    def action_turn(self, by: int) -> None:
        """Open the next tab, or the one before."""
        self.action_tab(_TABS[(_TABS.index(self._tab) + by) % len(_TABS)])

    def action_pause(self) -> None:
        """Freeze what is shown, or catch up with the log."""
        self._frame = replace(self._frame, paused=not self._frame.paused)
        if not self._frame.paused:
            self._take_newest()
            self._leave_if_over()
        self._draw()

    def action_sort(self) -> None:
        """Sort the layers of experts by imbalance, or back into their order."""
        self._frame = replace(self._frame, by_imbalance=not self._frame.by_imbalance)
        self._draw()

    def action_change(self) -> None:
        """Show experts by their change since the start, or by their load again."""
        self._frame = replace(self._frame, since_start=not self._frame.since_start)
        self._draw()

    def action_layer(self, by: int) -> None:
        """Select a layer of experts that many rows further down."""
        self._frame = replace(self._frame, layer=moved(self._frame, by))
        self._draw()

    def action_what_if(self, name: str, by: int) -> None:
        """Turn one value of what the Cost tab is asked a step up or down."""
        self._frame = replace(self._frame, what_if=turned(self._frame.what_if, name, by, self._frame.outlook))
        self._draw()
        self._look_ahead(now=True)

    def action_as_it_was(self) -> None:
        """Ask for the run as it was again."""
        self._frame = replace(self._frame, what_if=AS_IT_WAS)
        self._draw()
        self._look_ahead(now=True)

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Sheet(help_lines()))

    def action_notices(self) -> None:
        """Show all notices in full."""
        self.push_screen(Sheet(all_notices(self._frame, min(70, self.size.width - 6))))


def watch(path: Path, *, until: Callable[[], bool] | None = None) -> str | None:
    """Run the dashboard until it is left, and return a line to print then: an error, or None."""
    return WatchApp(path, until=until).run()
