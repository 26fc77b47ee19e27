"""Bars of text."""

from __future__ import annotations

from rich.text import Text

__all__ = ["bar_width", "share_bar"]

LONGEST_BAR = 64


def share_bar(share: float, width: int) -> Text:
    """``share`` of one as a bar on a screen of ``width`` columns; what is more than one fills it."""
    cells = bar_width(width)
    full = round(min(1.0, share) * cells)
    return Text("█" * full, "green").append("░" * (cells - full), "bright_black")


def bar_width(width: int) -> int:
    """Columns of a bar that leaves room for words behind it."""
    return max(8, min(LONGEST_BAR, width - 50))
