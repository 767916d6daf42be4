"""Sections of a report, and how they look in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    """A title over lines of text, a table, or both. The table's first row is its head."""

    title: str
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """There is nothing to show."""
        return not (self.lines or len(self.table) > 1 or self.after)


def to_text(title: str, sections: Sequence[Section]) -> str:
    """Lay out for a terminal."""
    blocks = [title]
    for section in sections:
        if section.empty:
            continue
        body = [f"  {line}" for line in (*section.lines, *columns(section.table), *section.after)]
        blocks.append("\n".join([section.title, *body]))
    return "\n\n".join(blocks)


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


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Align a table with spaces: the first column to the left, the others to the right unless they hold words."""
    if len(table) < 2:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    left = [i == 0 or _wordy([row[i] for row in table[1:]]) for i in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in table
    ]


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
