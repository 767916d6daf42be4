"""What the reader should know: findings, the log's notices, and what is wrong with the run or its log."""

from __future__ import annotations

from rich.text import Text

from ft_insight import units
from ft_insight.run_view import RunView
from ft_insight.tui.frame import Frame
from ft_insight.tui.widgets.text import ATTENTION, QUIET, STRONG, clean, figure, tail, words, wrap
from ft_insight.verdict import Finding, findings


def notice_texts(view: RunView) -> list[tuple[str, str]]:
    """List all there is to tell, what needs attention first: pairs of text and style."""
    found = [(clean(_shortened(finding), 240), ATTENTION) for finding in findings(view)]
    for number, what in ((view.malformed_lines, "malformed"), (view.unknown_lines, "of unknown type")):
        if number:
            found.append((f"{units.count(number)} lines of the log are {what} and were passed over", ATTENTION))
    told = sorted(view.notices, key=lambda n: not n.off)
    found += [
        (f"{clean(n.collector, 24)}{' off' if n.off else ''}: {clean(n.text)}", ATTENTION if n.off else "")
        for n in told
    ]
    return found


def _shortened(finding: Finding) -> str:
    """Keep a long name of a layer from pushing out what was found of it."""
    name, found, rest = finding.text.partition(": expert ")
    return f"{tail(clean(name), 40)}{found}{rest}" if finding.topic == "experts" else finding.text


def notice_lines(frame: Frame, width: int, height: int) -> list[Text]:
    """Draw as many as there is room for, and how many more there are."""
    found = notice_texts(frame.view)
    if not found:
        return [Text("nothing to report", QUIET)]
    lines: list[Text] = []
    height = min(height, max(3, height // 6))
    for at, (text, style) in enumerate(found):
        left = height - len(lines)
        if left <= 1 and at < len(found) - 1 and lines:
            lines.append(Text(f"{len(found) - at} more: n", QUIET))
            break
        sign = ("▲ ", ATTENTION) if style else ("· ", QUIET)
        block = wrap(text, width - 2, "", most=max(1, min(2, left)))
        lines += [words(sign if i == 0 else "  ", line) for i, line in enumerate(block)]
    return lines


def all_notices(frame: Frame, width: int) -> list[Text]:
    """Write all of them in full."""
    lines = [Text("findings and notices", STRONG)]
    for text, style in notice_texts(frame.view):
        sign = ("▲ ", style) if style else ("· ", QUIET)
        block = wrap(text, width - 2, "", most=20)
        lines += [words(sign if i == 0 else "  ", line) for i, line in enumerate(block)]
    return lines


def notice_title(frame: Frame) -> Text:
    """Head the list with the number of entries, and the key that shows them in full."""
    count = len(notice_texts(frame.view))
    return words(("findings and notices", ""), *((" · ", figure(str(count)), " (n)") if count else ()))
