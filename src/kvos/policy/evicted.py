"""Blocks that had to leave lately, watched by address: they explain later misses, and teach when blocks come back."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from kvos.policy.base import Ints

__all__ = ["CLASSES", "EvictedBlocks", "unpacked"]

EMPTY = -1

CLASSES = 3
"""Blocks that came back never, once, more often: what came back tends to come back."""

REMEMBERED_EVICTIONS = 65_536
"""Addresses of evicted blocks that are kept, to explain later misses and to see them come back: some ten megabytes."""


class EvictedBlocks:
    """The latest evictions, by address, as a ring: the oldest is given up for the newest.

    Attributes:
        came_back, given_up: ``age * CLASSES + class`` of lives that ended so since they were last counted.
    """

    def __init__(self) -> None:
        self.came_back: list[int] = []
        self.given_up: list[int] = []
        self._places: dict[Hashable, int] = {}
        self._ring: list[Hashable | None] = [None] * REMEMBERED_EVICTIONS
        self._uses: Ints = np.full(REMEMBERED_EVICTIONS, EMPTY, np.int64)  # request of the last use * CLASSES + class
        self._next = 0

    def __contains__(self, address: Hashable) -> bool:
        return address in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, address: Hashable, used_at: int, of_class: int, now: int) -> None:
        """``address`` was evicted at request ``now``."""
        place, oldest = self._next, self._ring[self._next]
        if oldest is not None:
            self.given_up.append(_life(self._take(oldest), now))
        self._places[address] = place
        self._ring[place] = address
        self._uses[place] = used_at * CLASSES + of_class
        self._next = (place + 1) % len(self._ring)

    def come_back(self, address: Hashable, now: int) -> int | None:
        """``address`` is wanted again; its class, None if it isn't known."""
        if address not in self._places:
            return None
        use = self._take(address)
        self.came_back.append(_life(use, now))
        return use % CLASSES

    def uses(self) -> tuple[Ints, Ints]:
        """Request of the last use, and class, of all that are known."""
        return unpacked(self._uses[self._uses != EMPTY])

    def _take(self, address: Hashable) -> int:
        place = self._places.pop(address)
        use = int(self._uses[place])
        self._ring[place] = None
        self._uses[place] = EMPTY
        return use


def unpacked(lives: npt.ArrayLike) -> tuple[Ints, Ints]:
    """Times or ages, and classes."""
    times, classes = np.divmod(np.asarray(lives, np.int64), CLASSES)
    return times, classes


def _life(use: int, now: int) -> int:
    """Age and class, packed, of a life that began with ``use`` and ends now."""
    used_at, of_class = divmod(use, CLASSES)
    return (now - used_at) * CLASSES + of_class
