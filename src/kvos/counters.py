"""Plain counters: names to integers, added to on the engine thread and read from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COUNTERS", "Counters"]

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "tokens_computed": "tokens that went through the model",
        "prompt_tokens": "tokens in front of the first generated one, of all admitted requests",
        "tokens_reused": "tokens of admitted requests whose KV was already there",
        "tokens_generated": "tokens that were sampled",
        "tokens_shared": "tokens taken over from another sequence's published blocks",
        "blocks_allocated": "blocks handed to block tables",
        "blocks_copied": "partial blocks copied before a write (copy-on-write)",
        "blocks_deduplicated": "full blocks that turned out to exist already and were given back",
        "blocks_reclaimed": "cached blocks that had to leave",
        "blocks_scrubbed": "blocks overwritten with zeros before somebody else got them",
        "segments_added": "growth steps of the pool",
        "steps": "forward passes",
        "requests": "generations and prefills that were started",
        "requests_cancelled": "of those, cancelled by the caller",
        "requests_failed": "of those, ended by an error",
        "forks": "child sessions made",
        "full_hits": "requests whose every token was in the cache; the last one was computed for its logits only",
        "sessions_left": "idle sessions that gave their blocks back, for want of room or beyond the limit",
        "sessions_returned": "sessions that had left, or were hibernated, and were wanted again",
        "thrash_pauses": "times that sessions came back so soon that nobody leaves for a while",
        "compactions": "tables whose blocks were moved next to each other",
        "blocks_compacted": "blocks moved by that; a shared one counts once",
        "tokens_restored": "tokens whose KV came back from a lower tier",
        "restores": "requests that began to load blocks from a lower tier",
        "restores_late": "of those, overtaken by their deadline; the rest was computed",
        "restores_failed": "of those, met a block that was damaged, unreadable or gone; the rest was computed",
        "restores_not_worth_it": "requests whose blocks were below, and were computed because that is faster",
        "blocks_stored": "blocks that a lower tier has taken, or had already",
        "stores_failed": "batches of blocks that a lower tier could not take",
        "stores_skipped": "blocks not stored, because their tier was switched off after failures",
        "history_rewritten": "appends for which the chat template changed earlier turns",
    }
)
"""Every counter and what it counts."""


class Counters:
    """Monotonic integers. One writer (the engine thread); ``snapshot`` may be called from any thread."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, amount: int = 1) -> None:
        self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        """A copy; single values are exact, and together they may be one step apart."""
        return dict(self._values)
