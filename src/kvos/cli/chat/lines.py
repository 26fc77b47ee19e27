"""Where a chat's lines come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console

from kvos.cli.console import printable

__all__ = ["PipedLines", "ReadLine", "TerminalLines", "line_source"]

ReadLine = Callable[[str], str | None]
"""Takes a prompt, gives the next line without its end, or None when there are no more."""

GREEN, PLAIN = "\001\033[1;32m\002", "\001\033[0m\002"
"""Between \\001 and \\002 is what takes no room on the line, for readline's arithmetic."""


class TerminalLines:
    """Asks a person; with readline, where there is one, the line can be edited and earlier ones come back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._has_readline = False
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - importing it is what makes input() use it

            self._has_readline = True

    def __call__(self, prompt: str) -> str | None:
        styled = self._has_readline and not self._console.no_color
        try:
            return input(f"{GREEN}{prompt}{PLAIN} " if styled else f"{prompt} ")
        except EOFError:
            self._console.print()
            return None


class PipedLines:
    """Reads a file or a pipe, and echoes, so that what is printed reads like the conversation that it was."""

    def __init__(self, console: Console, lines: Iterable[str]) -> None:
        self._console = console
        self._lines: Iterator[str] = iter(lines)

    def __call__(self, prompt: str) -> str | None:
        line = next(self._lines, None)
        if line is None:
            return None
        line = line.rstrip("\r\n")
        self._console.out(f"{prompt} {printable(line)}", highlight=False)
        return line


def line_source(console: Console) -> ReadLine:
    """What fits this process's stdin."""
    if sys.stdin.isatty() and console.is_terminal:
        return TerminalLines(console)
    return PipedLines(console, sys.stdin)
