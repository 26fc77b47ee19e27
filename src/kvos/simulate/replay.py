"""A pool of blocks against a trace: longest-prefix hits, everything inserted, leaves evicted first."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvos.policy.base import EvictionCandidate, EvictionPolicy
from kvos.policy.returns import ReturnEstimator
from kvos.simulate.trace import Trace

__all__ = ["ExpectedReturnReplay", "KeyedReplay", "Replay"]

BATCHES = 64
"""Keys that change with time are computed anew after this part of the pool was evicted."""

GHOSTS = 65536
"""So many addresses of evicted blocks are remembered: a few MB, whatever a block is worth."""

TAIL, KINDS = 3, 6
"""Classes of blocks: hit never, once, more often; and the same for the last block of its newest request."""


class Replay(ABC):
    """One pool and one policy. A request's own blocks stay until it is over; what exceeds the pool isn't kept.

    Times are numbers of requests. Not thread-safe.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.trace = trace
        self.capacity = capacity
        self.cached = [False] * len(trace.parents)
        self.children = [0] * len(trace.parents)
        self.size = 0

    def run(self) -> int:
        """Replay all requests; the number of blocks that were hit."""
        return sum(self.request(time, path) for time, path in enumerate(self.trace.paths))

    def request(self, time: int, path: Sequence[int]) -> int:
        """One request: hits, then room, then its blocks are inserted. Returns the hits."""
        hits = 0
        for block in path:
            if not self.cached[block]:
                break
            hits += 1
        self.touch(time, path, hits)
        kept = path[: self.capacity]
        while self.size + len(kept) - hits > self.capacity:
            self._remove(self.victim(time))
        for block in kept[hits:]:
            self.cached[block] = True
            parent = self.trace.parents[block]
            if parent >= 0:
                self.children[parent] += 1
        self.size += max(len(kept) - hits, 0)
        self.inserted(kept)
        return hits

    @abstractmethod
    def touch(self, time: int, path: Sequence[int], hits: int) -> None:
        """A request uses ``path``; the first ``hits`` blocks were cached."""

    @abstractmethod
    def victim(self, time: int) -> int:
        """The cached leaf that leaves now; never a block of the request at ``time``."""

    @abstractmethod
    def inserted(self, path: Sequence[int]) -> None:
        """``path`` is cached now."""

    @abstractmethod
    def exposed(self, block: int) -> None:
        """``block`` became a leaf, because the last one after it was evicted."""

    def _remove(self, block: int) -> None:
        self.cached[block] = False
        self.size -= 1
        parent = self.trace.parents[block]
        if parent >= 0:
            self.children[parent] -= 1
            if not self.children[parent]:
                self.exposed(parent)


class KeyedReplay(Replay):
    """A policy whose key changes only when a block is used: one heap, entries that are out of date are passed over."""

    def __init__(self, trace: Trace, capacity: int, policy: EvictionPolicy) -> None:
        super().__init__(trace, capacity)
        self.policy = policy
        self.last_used = [-1] * len(trace.parents)
        self.hits = [0] * len(trace.parents)
        self.heap: list[tuple[tuple[float, ...], int, int]] = []

    def touch(self, time: int, path: Sequence[int], hits: int) -> None:
        for place, block in enumerate(path):
            self.last_used[block] = time
            self.hits[block] = self.hits[block] + 1 if place < hits else 0

    def victim(self, time: int) -> int:
        while True:
            _, used, block = heapq.heappop(self.heap)
            if used == time:
                continue  # of this request: `inserted` offers its last block again
            if self.cached[block] and not self.children[block] and self.last_used[block] == used:
                return block

    def inserted(self, path: Sequence[int]) -> None:
        if path and not self.children[path[-1]]:
            self.exposed(path[-1])

    def exposed(self, block: int) -> None:
        used = self.last_used[block]
        candidate = EvictionCandidate(used, self.trace.depths[block], self.hits[block])
        heapq.heappush(self.heap, (self.policy.sort_key(candidate), used, block))


class ExpectedReturnReplay(Replay):
    """Learns when blocks of a class come back, and evicts those that are least worth their place; ties by last use."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        blocks = len(trace.parents)
        self.estimator = ReturnEstimator(KINDS)
        self.last_used = np.full(blocks, -1, dtype=np.int64)
        self.kinds = np.zeros(blocks, dtype=np.int64)
        self.watched = np.zeros(blocks, dtype=bool)  # cached, or a ghost
        self.ghosts: dict[int, None] = {}
        self.leaves: dict[int, None] = {}
        self.heap: list[tuple[float, int, int, int]] = []
        self.worth = self.estimator.index(0)
        self.relearn = 0  # from this request on, `worth` is out of date
        self.valued = 0  # request at which the heap's keys were computed
        self.left = 0  # evictions until they are computed anew

    def touch(self, time: int, path: Sequence[int], hits: int) -> None:
        if not path:
            return
        blocks = np.asarray(path, dtype=np.int64)
        back = blocks[self.watched[blocks]]
        self.estimator.end(self.kinds[back], self.last_used[back], time, returned=True)
        self.kinds[blocks] = np.where(self.watched[blocks], np.minimum(self.kinds[blocks] % TAIL + 1, TAIL - 1), 0)
        self.kinds[blocks[-1]] += TAIL
        self.last_used[blocks] = time
        self.watched[blocks] = True
        self.estimator.begin(self.kinds[blocks], time)
        for block in path[hits:]:
            self.ghosts.pop(block, None)
        for block in path[self.capacity :]:
            self._haunt(block, time)

    def victim(self, time: int) -> int:
        while True:
            if self.left <= 0 or not self.heap:
                self._value_leaves(time)
            _, used, _, block = heapq.heappop(self.heap)
            if self.cached[block] and not self.children[block] and self.last_used[block] == used:
                self.left -= 1
                self.leaves.pop(block, None)
                self._haunt(block, time)
                return block

    def inserted(self, path: Sequence[int]) -> None:
        for block in path[:-1]:
            self.leaves.pop(block, None)
        if path and not self.children[path[-1]]:
            self.leaves[path[-1]] = None

    def exposed(self, block: int) -> None:
        self.leaves[block] = None
        if self.last_used[block] < self.valued:
            self._offer(np.array([block], dtype=np.int64))

    def _value_leaves(self, time: int) -> None:
        """Begin a new heap, with what was learned until ``time``; blocks of the request at ``time`` stay out."""
        if time >= self.relearn:
            self.worth = self.estimator.index(time)
            self.relearn = time + 1 + time // BATCHES
        self.valued = time
        self.left = -(-self.capacity // BATCHES)
        self.heap = []
        leaves = np.fromiter(self.leaves, dtype=np.int64, count=len(self.leaves))
        self._offer(leaves[self.last_used[leaves] < time])

    def _offer(self, leaves: NDArray[np.int64]) -> None:
        """Put leaves on the heap, with their worth at the request of the last evaluation."""
        used = self.last_used[leaves]
        worth = self.worth[self.kinds[leaves], self.estimator.bucket(self.valued + 1 - used)]
        depths = [-self.trace.depths[block] for block in leaves]
        for entry in zip(worth.tolist(), used.tolist(), depths, leaves.tolist(), strict=True):
            heapq.heappush(self.heap, entry)

    def _haunt(self, block: int, time: int) -> None:
        """Go on watching an address that isn't cached any more; the one that is a ghost for longest is given up."""
        self.ghosts[block] = None
        if len(self.ghosts) > GHOSTS:
            oldest = next(iter(self.ghosts))
            del self.ghosts[oldest]
            self.watched[oldest] = False
            self.estimator.end(self.kinds[[oldest]], self.last_used[[oldest]], time, returned=False)
