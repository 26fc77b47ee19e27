"""How the help of a command is written: what it is for, then examples that work as printed."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

__all__ = ["HELP_SETTINGS", "help_text"]

HELP_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "add_completion": False,
    "pretty_exceptions_enable": False,  # KvosGroup shows errors
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""For every group of commands."""

NARROW = 80
"""Columns of a terminal that nobody widened."""


def help_text(about: str, *examples: tuple[str, str], after: str = "") -> str:
    """Paragraphs, then a list of ``(command line, what it does)``."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in cleandoc(about).split("\n\n")]
    if examples:
        paragraphs.append("\b\n" + "\n".join(["[bold]Examples[/bold]", *_example_lines(examples)]))
    return "\n\n".join([*paragraphs, after] if after else paragraphs)


def _example_lines(examples: tuple[tuple[str, str], ...]) -> list[str]:
    """Side by side where that fits into a narrow terminal, else one below the other."""
    width, longest = max(len(line) for line, _ in examples), max(len(what) for _, what in examples)
    if width + longest + 6 <= NARROW:
        return [f"  [cyan]{line:<{width}}[/cyan]  [dim]{what}[/dim]" for line, what in examples]
    return [text for line, what in examples for text in (f"  [cyan]{line}[/cyan]", f"      [dim]{what}[/dim]")]
