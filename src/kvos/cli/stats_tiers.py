"""The tiers on the screen, how scattered the free room is, and what the two ways to a block cost now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from kvos.cli.bars import share_bar
from kvos.cli.console import counted, human_bytes, human_seconds

__all__ = ["tier_lines"]

COST_TOKENS = 1000
"""Costs are shown for so many."""

MEGABYTE = 1e6
INDENT = " " * 7
"""As wide as the words in front of the bars."""


def tier_lines(stats: Mapping[str, Any], width: int) -> Iterator[Text]:
    """What ``RuntimeStats.as_dict`` says of free runs, tiers and speeds; what another version left out is not shown."""
    if "free_now" in stats and "free_at_start" in stats:
        yield _free_runs(stats)
    tiers = stats.get("tiers", ())
    for tier in tiers:
        yield _tier(tier, width)
        counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in tier["usage"]["counters"].items() if count]
        if counts:
            yield Text(INDENT + ", ".join(counts), "dim")
    if tiers:
        yield _costs(stats)


def _free_runs(stats: Mapping[str, Any]) -> Text:
    now, start = stats["free_now"], stats["free_at_start"]
    line = Text("free   ", "bold").append(
        f"{counted(now['blocks'], 'block')} in {counted(now['runs'], 'run')}, ", "none"
    )
    line.append(f"the longest {now['longest']:,}")
    return line.append(f"  at start {counted(start['runs'], 'run')}, the longest {start['longest']:,}", "dim")


def _tier(tier: Mapping[str, Any], width: int) -> Text:
    usage, speed = tier["usage"], tier["bytes_per_second"]
    share = usage["used_bytes"] / usage["capacity_bytes"] if usage["capacity_bytes"] else 0.0
    line = Text(f"{tier['name']:<7}", "bold").append_text(share_bar(share, width)).append(f" {share:.1%}", "bold")
    line.append(f" of {human_bytes(usage['capacity_bytes'])}, {counted(usage['blocks'], 'block')}, ", "none")
    line.append("no load measured yet" if speed is None else f"loads {speed / MEGABYTE:,.0f} MB/s")
    if not tier.get("lossless", True):
        line.append("  LOSSY: what comes back is approximate", "bold yellow")
    if tier["switched_off"]:
        line.append("  switched off after failures, tried again soon", "bold red")
    return line


def _costs(stats: Mapping[str, Any]) -> Text:
    """What ``COST_TOKENS`` tokens take from each tier, and computed."""
    line = Text("cost   ", "bold").append(f"{COST_TOKENS:,} tokens: ", "none")
    for tier in stats["tiers"]:
        if tier["bytes_per_second"]:
            seconds = COST_TOKENS * stats["bytes_per_token"] / tier["bytes_per_second"]
            line.append(f"{human_seconds(seconds)} from {tier['name']}, ")
    prefill = stats.get("prefill_tokens_per_second")
    if not prefill:
        return line.append("computing them was not measured yet")
    return line.append(f"{human_seconds(COST_TOKENS / prefill)} computed ({prefill:,.0f} tokens/s)")
