"""A first-in first-out queue of block ids in one ring of integers: batches in, batches out."""

from __future__ import annotations

import numpy as np

from kvos.types import BlockIds

__all__ = ["FreeQueue"]


class FreeQueue:
    """Oldest first, so that neighbours stay neighbours."""

    def __init__(self) -> None:
        self._ring = np.zeros(16, np.int64)
        self._head = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, ids: BlockIds) -> None:
        """Append a batch; amortised O(1) per id."""
        if self._length + len(ids) > len(self._ring):
            self._widen(self._length + len(ids))
        self._ring[self._places(self._length, len(ids))] = ids
        self._length += len(ids)

    def peek(self, n: int) -> BlockIds:
        """The oldest ``n`` ids, still in the queue; ``n`` is at most the length."""
        return self._ring[self._places(0, n)]

    def drop(self, n: int) -> None:
        """Remove the oldest ``n`` ids."""
        self._head = (self._head + n) % len(self._ring)
        self._length -= n

    def remove(self, ids: BlockIds) -> None:
        """Take ``ids`` out, wherever they stand; the others keep their order. O(length)."""
        old = self.to_array()
        left = old[~np.isin(old, ids)]
        self._ring[: len(left)] = left
        self._head, self._length = 0, len(left)

    def to_array(self) -> BlockIds:
        return self.peek(self._length)

    def _places(self, offset: int, n: int) -> BlockIds:
        return (np.arange(n, dtype=np.int64) + (self._head + offset)) % len(self._ring)

    def _widen(self, at_least: int) -> None:
        old = self.to_array()
        self._ring = np.zeros(max(at_least, 2 * len(self._ring)), np.int64)
        self._ring[: len(old)] = old
        self._head = 0
