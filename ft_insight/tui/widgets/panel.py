"""The widget behind every drawing: a frame in, lines of text out, at the size that the layout gave it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual.geometry import Size
from textual.widget import Widget

from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.text import cut

Draw = Callable[[Frame, int, int], list[Text]]
Title = Callable[[Frame], Text]


class Panel(Widget):
    """Shows what ``draw(frame, width, height)`` returns. With ``tall`` the drawing decides its height.

    ``short`` is the title for when the panel is too narrow for the other one.
    """

    def __init__(
        self, draw: Draw, title: Title | str, *, classes: str = "", tall: bool = False, short: Title | None = None
    ) -> None:
        super().__init__(classes=f"panel {'tall' if tall else ''} {classes}")
        self._drawing = draw
        self._heading = title
        self._short = short
        self._room = 0
        self._shown = Frame()
        self._lines = 0
        self._measured = False
        """The layout has asked how many lines there are: it depends on them."""

    def show(self, frame: Frame) -> None:
        """Draw another moment."""
        self._shown = frame
        title = Text(self._heading) if isinstance(self._heading, str) else self._heading(frame)
        room = max(10, self.size.width - 2)
        if self._short is not None and title.cell_len > room:
            title = self._short(frame)
        title = cut(title, room)
        self.border_title = title if self.styles.border_left[0] else Text(" ") + title + Text(" ")
        grown = self._measured and self.size.width > 0 and self._lines != len(self._draw(self.size.width))
        self.refresh(layout=grown)

    def on_resize(self) -> None:
        """Fit title and drawing to the new size."""
        self.show(self._shown)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Tell the layout how many lines the drawing takes."""
        self._measured = True
        self._room = max(1, container.height - 2)
        return max(1, len(self._draw(width)))

    def render(self) -> Text:
        """Return the drawing as one text, cut to the panel's size."""
        width, height = self.size
        if not self.styles.is_auto_height:
            self._room = height
        lines = self._draw(width)
        return Text("\n").join([cut(line, width) for line in lines[:height]])

    def _draw(self, width: int) -> list[Text]:
        lines = self._drawing(self._shown, width, self._room)
        self._lines = len(lines)
        return lines
