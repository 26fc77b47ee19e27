"""A pool of blocks against a trace: longest-prefix hits, everything kept, leaves evicted first.

The order in which blocks leave is the runtime's own (``kvos.policy.EvictionOrder``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvos.policy import EvictionOrder, EvictionPolicy
from kvos.simulate.trace import Trace

__all__ = ["Replay"]


class Replay:
    """One pool of ``capacity`` blocks and one policy. Not thread-safe.

    A request's own blocks stay until it is over; what exceeds the pool isn't kept.
    """

    def __init__(self, trace: Trace, capacity: int, policy: EvictionPolicy) -> None:
        self.trace = trace
        self.capacity = capacity
        self.order = EvictionOrder(policy)
        self.places: dict[int, int] = {}  # where a block of the trace is in the pool
        self._free = list(range(capacity))
        self._content = [0] * capacity
        self._removable = np.ones(capacity, np.bool_)

    def run(self) -> int:
        """Replay all requests; the number of blocks that were hit."""
        return sum(map(self.request, self.trace.paths))

    def request(self, path: Sequence[int]) -> int:
        """One request: hits, then room, then its other blocks are kept. Returns the hits."""
        self.order.begin_request()
        kept = path[: self.capacity]
        found: list[int] = []
        for block in kept:
            place = self.places.get(block)
            if place is None:
                break
            found.append(place)
        hits = np.array(found, np.int64)
        self.order.touch(hits, hit=True)
        self._make_room(len(kept) - len(found), hits)
        parent = found[-1] if found else None
        for block in kept[len(found) :]:
            place = self._free.pop()
            self.places[block] = place
            self._content[place] = block
            self.order.insert(place, parent, block)
            parent = place
        return len(found)

    def _make_room(self, n: int, held: np.typing.NDArray[np.int64]) -> None:
        missing = n - len(self._free)
        if missing <= 0:
            return
        self._removable[held] = False
        removed = self.order.remove_coldest(missing, self._removable)
        self._removable[held] = True
        for place in removed:
            del self.places[self._content[place]]
        self._free += removed

    def check_invariants(self) -> None:
        """Raises AssertionError if pool and order contradict each other."""
        self.order.check_invariants()
        parents = self.trace.parents
        expected = {
            place: (block, self.places[parents[block]] if parents[block] >= 0 else None)
            for block, place in self.places.items()
        }
        assert self.order.forest() == expected, "what is kept and what may leave differ"
        assert len(self.places) + len(self._free) == self.capacity, "blocks of the pool are lost"
