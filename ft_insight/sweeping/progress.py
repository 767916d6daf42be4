"""How far a measurement is: a bar in a terminal, plain lines elsewhere, both on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Lines for what is done, and in a terminal a bar below them for what is being done."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def now(self, text: str) -> None:
        """Tell in the bar what is being done, without an end in sight."""
        self._bar.update(self._task, description=text, total=None)

    def begin(self, steps: int) -> None:
        """From here on so many steps are to be done."""
        self._bar.reset(self._task, total=steps, description="measuring")

    def tick(self, text: str) -> None:
        """One more of them is."""
        self._bar.update(self._task, advance=1, description=text)
