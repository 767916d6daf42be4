"""Plain text made safe and set in columns.

Whatever comes from a log passes through ``clean`` and ends in a ``rich.text.Text``: nothing is read as
markup, and no control character reaches the terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from ft_insight.units import NA

ATTENTION = "bold #ffa23a"
"""The one colour that asks to be looked at."""
QUIET = "#7d8794"
STRONG = "bold #e8edf2"
CURVE = "#6cb0f0"
SPARK = "#41709e"
FAINT = "#2c4763"
GOOD = "#6fbf73"
TRACK = "#252d38"
MARK = "#e3e8ee"

Cell = str | Text


def clean(text: object, limit: int = 400) -> str:
    """Make one line of foreign text: control and formatting characters out, white space single, bounded."""
    raw = str(text)[: 4 * limit]
    spaced = "".join(" " if c.isspace() else c for c in raw)
    kept = "".join(c for c in spaced if unicodedata.category(c)[0] != "C")
    line = " ".join(kept.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def tail(text: str, width: int) -> str:
    """Keep the end of a long text: of a path, that is what tells it from others."""
    return text if cell_len(text) <= width else f"…{text[-max(1, width - 1) :]}"


def figure(text: str, style: str = STRONG) -> Text:
    """Style a number to be read first; an unmeasured one stays quiet."""
    return Text(text, QUIET if text == NA else style)


def words(*parts: str | Text | tuple[str, str]) -> Text:
    """Join pieces into one line; plain strings are quiet labels."""
    return Text.assemble(*((p, QUIET) if isinstance(p, str) else p for p in parts))


def joined(parts: Iterable[Text], between: str = " · ") -> Text:
    """Join pieces with a quiet separator, leaving out empty ones."""
    line = Text()
    for part in parts:
        if part.plain:
            line.append(between if line else "", QUIET).append_text(part)
    return line


def flow(parts: Iterable[Text], width: int, most: int = 2) -> list[Text]:
    """Join pieces like ``joined``, over several lines where one is too short for them."""
    lines: list[list[Text]] = [[]]
    for part in parts:
        if lines[-1] and joined([*lines[-1], part]).cell_len > width and len(lines) < most:
            lines.append([])
        lines[-1].append(part)
    return [cut(joined(line), width) for line in lines]


def cut(line: Text, width: int) -> Text:
    """Bound a line to a width, with an ellipsis where something is lost."""
    if line.cell_len <= width:
        return line
    short = line.copy()
    short.truncate(max(1, width), overflow="ellipsis")
    return short


def wrap(text: str, width: int, style: str = "", most: int = 4, indent: int = 0) -> list[Text]:
    """Break plain text into at most ``most`` lines; the last one ends in an ellipsis if there was more."""
    lines: list[str] = []
    room = max(8, width)
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append((" " * indent if lines else "") + word)
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [cut(Text(line, style), width) for line in lines]


def table(rows: Sequence[Sequence[Cell]], align: str, gap: int = 2) -> list[Text]:
    """Set rows in columns; ``align`` has one ``<`` or ``>`` per column."""
    cells = [[c if isinstance(c, Text) else Text(c, QUIET) for c in row] for row in rows]
    widths = [max((row[i].cell_len for row in cells if i < len(row)), default=0) for i in range(len(align))]
    lines = []
    for row in cells:
        line = Text()
        for i, cell in enumerate(row):
            space = " " * (widths[i] - cell.cell_len)
            line.append(" " * gap if i else "")
            line.append_text(Text(space) + cell if align[i] == ">" else cell + Text(space))
        line.rstrip()
        lines.append(line)
    return lines


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int, gap: int = 2) -> list[Text]:
    """Put two blocks of lines next to each other."""
    lines = []
    for i in range(max(len(left), len(right))):
        line = cut(left[i], left_width).copy() if i < len(left) else Text()
        line.append(" " * (left_width - line.cell_len + gap))
        lines.append(line + right[i] if i < len(right) else line)
    return lines
