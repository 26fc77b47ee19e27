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


def help_text(about: str, *examples: tuple[str, str], after: str = "") -> str:
    """Paragraphs, then a list of ``(command line, what it does)``."""
    text = cleandoc(about)
    if examples:
        width = max(len(line) for line, _ in examples)
        lines = [f"  [cyan]{line:<{width}}[/cyan]  [dim]{what}[/dim]" for line, what in examples]
        text += "\n\n\b\n" + "\n".join(["[bold]Examples[/bold]", *lines])
    return f"{text}\n\n{after}" if after else text
