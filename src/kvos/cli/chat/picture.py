"""Block tables as rows of coloured cells, which can be told apart without colour, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvos.cli.console import counted
from kvos.runtime import SessionReport

__all__ = ["CELLS", "block_ranges", "cells", "legend", "session_rows", "shared_with"]

CELLS = {
    (True, False): ("■", "cyan", "shared"),
    (False, False): ("□", "yellow", "own"),
    (True, True): ("◩", "cyan", "shared, not full"),
    (False, True): ("◪", "yellow", "own, not full"),
}
"""(shared, partly filled) to glyph, colour and meaning."""

GROUP = 8
"""Cells between two gaps, so that they can be counted."""


def cells(report: SessionReport, block_size: int) -> Text:
    """One cell per block of the session's table, first token first."""
    shared = set(report.shared_blocks)
    computed = report.tokens - report.pending
    row = Text()
    for place, block in enumerate(report.blocks):
        partly = (place + 1) * block_size > computed
        glyph, colour, _ = CELLS[block in shared, partly]
        if place and place % GROUP == 0:
            row.append(" ")
        row.append(glyph, colour)
    return row


def legend(block_size: int) -> Text:
    """What the cells mean."""
    line = Text(f"one cell = one block of {block_size} tokens:", "dim")
    for glyph, colour, meaning in CELLS.values():
        line.append(f"  {glyph}", colour).append(f" {meaning}", "dim")
    return line


def session_rows(reports: Sequence[SessionReport], block_size: int, current: str) -> RenderableType:
    """Every session's row, what is in it in words, and the numbers of its blocks; the legend last."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column(overflow="fold")
    for report in reports:
        name = Text(report.name, "bold green" if report.name == current else "bold")
        table.add_row(name, cells(report, block_size) if report.blocks else Text("no blocks yet", "dim"))
        table.add_row("", Text(_in_words(report, reports), "dim"))
    return Group(table, legend(block_size))


def _in_words(report: SessionReport, reports: Sequence[SessionReport]) -> str:
    words = f"{counted(report.tokens, 'token')}, {counted(report.messages, 'message')}"
    if report.pending:
        words += f", {counted(report.pending, 'token')} not computed yet"
    if not report.blocks:
        return words
    words += f" · blocks {block_ranges(report.blocks)} · {report.private_blocks} own"
    if report.shared_blocks:
        words += f", {len(report.shared_blocks)} shared with {', '.join(shared_with(report, reports)) or 'nobody else'}"
    return words


def shared_with(report: SessionReport, reports: Iterable[SessionReport]) -> list[str]:
    """Names of the other sessions that hold one of its blocks."""
    mine = set(report.blocks)
    return [other.name for other in reports if other.name != report.name and mine.intersection(other.blocks)]


def block_ranges(blocks: Sequence[int]) -> str:
    """``0-11, 15, 20-21``, in the order of the table."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
