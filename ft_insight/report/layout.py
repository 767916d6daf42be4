"""Sections of a report, and how they look in a terminal and in Markdown."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

import msgspec

from ft_insight.column_groups import grouped

GAP = 2


class Section(msgspec.Struct, frozen=True):
    """A title over lines of text, a table, or both. The table's first row is its head."""

    title: str
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """There is nothing to show."""
        return not (self.lines or len(self.table) > 1 or self.after)


def to_text(title: str, sections: Sequence[Section], width: int | None = None) -> str:
    """Lay out for a terminal of ``width`` columns: of the one there is, and endless where the text goes elsewhere."""
    room = width or _terminal_width()
    blocks = [_wrapped(title.split("\n"), room)]
    for section in sections:
        if section.empty:
            continue
        table = [f"  {line}".rstrip() for line in columns(section.table, room and room - 2)]
        before, after = (_wrapped(lines, room, indent=2) for lines in (section.lines, section.after))
        blocks.append([*_wrapped([section.title], room), *before, *table, *after])
    return "\n\n".join("\n".join(block) for block in blocks)


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def _wrapped(lines: Sequence[str], width: int | None, indent: int = 0) -> list[str]:
    """Break lines between words, for what a terminal breaks within them is hard to read."""
    first = " " * indent
    if width is None:
        return [first + line for line in lines]
    wrapper = textwrap.TextWrapper(
        max(width, 20),
        initial_indent=first,
        subsequent_indent=first + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part for line in lines for part in wrapper.wrap(line)]


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Lay out for an issue or a wiki."""
    blocks = [f"## {escape(title)}"]
    for section in sections:
        if section.empty:
            continue
        blocks.append(f"### {escape(section.title)}")
        blocks += ["\n".join(f"- {escape(line)}" for line in section.lines)] if section.lines else []
        blocks += [pipes(section.table)] if len(section.table) > 1 else []
        blocks += ["\n".join(f"- {escape(line)}" for line in section.after)] if section.after else []
    return "\n\n".join(blocks)


def columns(table: Sequence[Sequence[str]], room: int | None = None) -> list[str]:
    """Align a table with spaces: the first column to the left, the others to the right unless they hold words.

    Columns that ``room`` is too small for stand in a table of their own below, beside the first column again.
    """
    if len(table) < 2:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    left = [i == 0 or _wordy([row[i] for row in table[1:]]) for i in range(len(widths))]
    lines: list[str] = []
    for group in grouped(widths, room, GAP):
        lines += [""] if lines else []
        lines += [
            (" " * GAP)
            .join(row[i].ljust(widths[i]) if left[i] else row[i].rjust(widths[i]) for i in (0, *group))
            .rstrip()
            for row in table
        ]
    return lines


def _wordy(cells: Sequence[str]) -> bool:
    return any(cell and not (cell[0].isdigit() or cell[0] in "$<-n[") for cell in cells)


def pipes(table: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    head, *rows = [[escape(cell) for cell in row] for row in table]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape(text: str) -> str:
    """Keep what comes from a log from being read as Markdown or HTML."""
    for mark in ("\\", "|", "<", "`", "*", "_", "[", "]", "~", "#", "&", ">"):
        text = text.replace(mark, "\\" + mark)
    return text
