"""Blocks that somebody wants stored below: how far they are, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvos.sequences import IndexEntry

__all__ = ["StoreSummary", "StoreTicket"]


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What became of blocks that were to be stored in the last tier.

    Attributes:
        wanted: how many there were.
        safe: how many are there now, whether stored now or before.
    """

    wanted: int
    safe: int


@dataclass(slots=True, eq=False)
class StoreTicket:
    """Published blocks to be stored, in order. Engine thread only; ``future`` may be awaited anywhere.

    Attributes:
        next: the first entry that was not gathered yet.
        under_way: transfers that have not come back.
    """

    entries: Sequence[IndexEntry]
    future: Future[StoreSummary] = field(default_factory=Future)
    next: int = 0
    under_way: int = 0
    safe: int = 0

    @property
    def is_gathered(self) -> bool:
        return self.next >= len(self.entries)

    def finish_if_done(self) -> None:
        """Tell whoever waits, once everything was gathered and has come back."""
        if self.is_gathered and self.under_way == 0 and not self.future.done():
            self.future.set_result(StoreSummary(len(self.entries), self.safe))
