"""When a sequence's blocks are worth moving next to each other, and which sequence comes first.

Blocks have one size, so scattered ones waste no room; but long runs are read faster. Engine thread only, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvos.errors import InvalidConfigError
from kvos.sequences.block_manager import BlockManager

__all__ = ["Compactor"]


@dataclass(slots=True)
class Compactor:
    """Compacts the most scattered sequence now and then.

    Attributes:
        threshold: runs per block, above which a table counts as scattered; 1 means that no two blocks are neighbours.
        min_runs: tables with fewer runs than this are left alone.
        min_interval: seconds between two looks at the tables, whether or not the first moved anything.
        clock: seconds, never going back.
    """

    threshold: float = 0.25
    min_runs: int = 4
    min_interval: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1 or self.min_runs < 2 or self.min_interval < 0:
            raise InvalidConfigError(
                f"compaction needs 0 <= threshold <= 1, min_runs >= 2 and min_interval >= 0, "
                f"got {self.threshold}, {self.min_runs} and {self.min_interval}"
            )

    def run(self, manager: BlockManager) -> int:
        """Compact the most scattered table that can be improved; returns how many blocks moved, 0 for none.

        Tables with a block that a transfer or an open write uses are passed over. Copies on the calling thread.

        Raises:
            torch.OutOfMemoryError: no memory for the copy; tables and content are as before.
        """
        now = self.clock()
        if self._last is not None and now - self._last < self.min_interval:
            return 0
        self._last = now
        scattered = []
        for sequence, table in manager.tables():
            runs = manager.num_runs(table)
            if runs >= self.min_runs and runs > self.threshold * len(table):
                scattered.append((runs / len(table), runs, sequence, table))
        scattered.sort(key=lambda one: one[:2], reverse=True)
        for _, _, sequence, table in scattered:
            if manager.movable(table) and (moved := manager.compact(sequence)):
                return moved
        return 0
