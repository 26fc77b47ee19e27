"""Progress of something that takes more than a second or two, and who shows it.

The work reports to a small protocol; a bar on stderr, silence, or a caller's own object stand behind it.
"""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

__all__ = ["BarProgress", "Progress", "SilentProgress"]

LINE_SECONDS = 10.0
"""Where no bar can be shown: a line at most so often, so that a log tells a long wait from a hang."""


class Progress(Protocol):
    """Phases one after another: ``begin``, ``update`` any number of times, ``end``. From one thread."""

    def begin(self, label: str, total: int | None) -> None:
        """A phase starts. ``total`` is in any unit of the caller's, ``None`` if it isn't known."""

    def update(self, done: int) -> None:
        """So much of ``total`` is done so far."""

    def end(self) -> None:
        """The phase is over, for whatever reason. Without a phase it does nothing."""


class SilentProgress:
    """Shows nothing."""

    def begin(self, label: str, total: int | None) -> None:
        return

    def update(self, done: int) -> None:
        return

    def end(self) -> None:
        return


class BarProgress:
    """A bar per phase on stderr; where stderr is no terminal, a line per phase and one now and then during it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._label = ""
        self._total: int | None = None
        self._last_line = 0.0

    def begin(self, label: str, total: int | None) -> None:
        self.end()
        if not self._console.is_terminal:
            self._label, self._total, self._last_line = label, total, time.monotonic()
            self._console.print(label, highlight=False)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = RichProgress(*columns, TimeElapsedColumn(), console=self._console)
        self._task = self._bar.add_task(label, total=total)
        self._bar.start()

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._total and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(f"{self._label}: {100 * done // self._total} %", highlight=False)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
