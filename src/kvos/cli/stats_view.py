"""A runtime's stats on the screen: the pool as a bar, rates, and every counter with what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvos.cli.bars import bar_width, share_bar
from kvos.cli.console import counted, human_bytes, short_dtype
from kvos.cli.stats_tiers import tier_lines
from kvos.counters import COUNTERS

__all__ = ["blocks_bar", "stats_view"]

STATUSES = {
    "active": ("█", "cyan", "held by sessions"),
    "reserved": ("▓", "magenta", "promised to a request"),
    "cached": ("▒", "yellow", "held by nobody, still findable"),
    "free": ("░", "bright_black", "free"),
}
"""Status to glyph, colour and meaning; the glyphs can be told apart without colour."""


def stats_view(stats: Mapping[str, Any], width: int) -> RenderableType:
    """What ``RuntimeStats.as_dict`` gives, for people."""
    capacity = stats["max_blocks"] * stats["block_size"]
    head = Text(str(stats["model"]), "bold").append(f" in {short_dtype(stats['dtype'])}, ", "none")
    head.append(f"{counted(stats['sessions'], 'session')}, {stats['running']} running; room for {capacity:,} tokens ")
    head.append(f"in {human_bytes(capacity * stats['bytes_per_token'])} ({human_bytes(stats['bytes_per_token'])} each)")
    counters = stats["counters"]
    reuse = Text("reuse  ", "bold").append_text(share_bar(stats["reuse_rate"], width))
    reuse.append(f" {stats['reuse_rate']:.1%}", "bold")
    reuse.append(f"  {counters['tokens_reused']:,} of {counters['prompt_tokens']:,} prompt tokens", "none")
    return Group(head, reuse, blocks_bar(stats, width), *tier_lines(stats, width), _counters(counters))


def blocks_bar(stats: Mapping[str, Any], width: int) -> RenderableType:
    """The pool by status. Of what has not been allocated from the system yet, only the number is shown."""
    blocks = stats["blocks"]
    total = sum(blocks.values())
    bar = Text("blocks ", "bold")
    for status, length in _lengths({name: blocks[name] for name in STATUSES}, bar_width(width)).items():
        glyph, colour, _ = STATUSES[status]
        bar.append(glyph * length, colour)
    bar.append(f" {stats['utilisation']:.1%}", "bold").append(f" of {stats['max_blocks']:,} blocks in use", "none")
    legend = Text(f"       of the {total:,} allocated so far: ", "dim")
    for status, (glyph, colour, meaning) in STATUSES.items():
        if blocks[status]:
            legend.append(f" {glyph}", colour).append(f" {blocks[status]:,} {meaning} ", "none")
    return Group(bar, legend)


def _counters(counters: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("COUNTER")
    table.add_column("SO FAR", justify="right")
    table.add_column("WHAT IT COUNTS", style="dim")
    for name, value in counters.items():
        table.add_row(name, f"{value:,}", COUNTERS.get(name, ""), style="" if value else "dim")
    return table


def _lengths(parts: Mapping[str, int], cells: int) -> dict[str, int]:
    """``cells`` divided in proportion; whatever is there gets one at least, at the cost of the longest."""
    total = sum(parts.values())
    if not total:
        return dict.fromkeys(parts, 0)
    lengths = {name: max(1 if value else 0, round(value / total * cells)) for name, value in parts.items()}
    longest = max(lengths, key=lambda name: lengths[name])
    lengths[longest] += cells - sum(lengths.values())
    return lengths
