"""Which columns of a table stand side by side where there is no room for all of them: for reports and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence


def grouped(widths: Sequence[int], room: int | None, gap: int) -> list[list[int]]:
    """Part the columns after the first into groups that fit ``room`` beside the first, at least one in each.

    ``widths`` are in characters, ``gap`` stands between two columns; without ``room`` there is one group.
    """
    groups: list[list[int]] = [[]]
    used = widths[0]
    for i, width in enumerate(widths[1:], start=1):
        if groups[-1] and room is not None and used + gap + width > room:
            groups.append([])
            used = widths[0]
        groups[-1].append(i)
        used += gap + width
    return groups
