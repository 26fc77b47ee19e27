"""Blocks that are findable, as a forest of prefixes: what is known of their uses, and who leaves first.

The prefix index of a runtime and the simulator stand on the same object, so that one does what the other measures. A
block is a small whole number, its address anything that names its content. Time is counted in requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable

import numpy as np

from kvos.policy.base import Bools, Candidates, EvictionPolicy, Floats, Ints
from kvos.policy.evicted import CLASSES, EvictedBlocks, unpacked
from kvos.policy.returns import ReturnHistory

__all__ = ["EvictionOrder"]

PLANNED_SHARE = 64
"""Keys are computed for the next so manyth part of the cached blocks, since that looks at every one of them."""

NO_PARENT = -1


class EvictionOrder:
    """Uses of findable blocks, and of those that had to leave lately. Not thread-safe."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.history = ReturnHistory(CLASSES)
        self._requests = 0
        self._uses = 0
        self._lives = 0  # begun by blocks that were asked for
        self._evicted = EvictedBlocks()
        self._plan: list[tuple[float, int, int, int]] = []  # a heap of key, last use, -depth, block
        self._planned_at = 0  # the use after which it was made
        self._plan_lasts = 0  # evictions
        self._keys: Floats = np.zeros(0)  # by block; NaN for what was not cached then
        self._addresses: list[Hashable] = []
        self._present: Bools = np.zeros(0, np.bool_)
        self._parent: Ints = np.zeros(0, np.int64)
        self._children: Ints = np.zeros(0, np.int64)
        self._depth: Ints = np.zeros(0, np.int64)
        self._last_used: Ints = np.zeros(0, np.int64)
        self._used_at: Ints = np.zeros(0, np.int64)  # the request of the last use
        self._hits: Ints = np.zeros(0, np.int64)
        self._class: Ints = np.zeros(0, np.int64)

    # -- what happens ----------------------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """Time goes on."""
        self._requests += 1

    def insert(self, block: int, parent: int | None, address: Hashable) -> None:
        """``block`` is findable now, behind ``parent``; a use. If it was evicted lately, it has come back."""
        if block >= len(self._addresses):
            self._grow(block + 1)
        self._addresses[block] = address
        self._uses += 1
        self._lives += 1
        self._present[block] = True
        self._children[block] = 0
        self._last_used[block] = self._uses
        self._used_at[block] = self._requests
        self._hits[block] = 0
        self._class[block] = 0
        if parent is None:
            self._parent[block] = NO_PARENT
            self._depth[block] = 0
        else:
            self._parent[block] = parent
            self._depth[block] = self._depth[parent] + 1
            self._children[parent] += 1
        known = self._evicted.come_back(address, self._requests)
        if known is not None:
            self._class[block] = min(known + 1, CLASSES - 1)

    def touch(self, blocks: Ints, *, hit: bool) -> None:
        """Note a use now of those of ``blocks`` that are findable; ``hit``: they were asked for again, and matched.

        Any other use, such as the end of a sequence that held them, says nothing about when blocks come back.
        """
        blocks = blocks[blocks < len(self._present)]
        blocks = blocks[self._present[blocks]]
        self._uses += 1
        if hit and len(blocks):
            classes = self._class[blocks]
            self.history.end(classes, self._requests - self._used_at[blocks], returned=True)
            self._class[blocks] = np.minimum(classes + 1, CLASSES - 1)
            self._hits[blocks] += 1
            self._lives += len(blocks)
        self._last_used[blocks] = self._uses
        self._used_at[blocks] = self._requests

    def move(self, sources: Ints, targets: Ints) -> None:
        """What was in ``sources[i]`` is in ``targets[i]`` now, which was not findable. Not a use."""
        moved = self._present[sources]
        sources, targets = sources[moved], targets[moved]
        if not len(sources):
            return
        self._grow(int(targets.max()) + 1)
        self._plan.clear()
        for facts in (
            self._parent, self._children, self._depth, self._last_used, self._used_at, self._hits, self._class,
        ):  # fmt: skip
            facts[targets] = facts[sources]
        self._present[sources] = False
        self._present[targets] = True
        where = np.arange(len(self._present))
        where[sources] = targets
        hanging = self._present & (self._parent != NO_PARENT)
        self._parent[hanging] = where[self._parent[hanging]]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._addresses[target], self._addresses[source] = self._addresses[source], None

    # -- who leaves ------------------------------------------------------------------------------------------------

    def remove_coldest(self, n: int, removable: Bools) -> list[int]:
        """Forget up to ``n`` blocks, leaves first, by the policy's order; returns them, the first to leave first.

        A parent becomes a leaf when its last child has left.

        Args:
            removable: by block, whether nobody holds it; for every findable block.
        """
        removed: list[int] = []
        while len(removed) < n:
            if self._plan_lasts <= 0 or not self._plan:
                self._make_plan(n - len(removed), removable)
                if not self._plan:
                    break
            _, last_used, _, block = heapq.heappop(self._plan)
            if self._may_leave(block, removable) and self._last_used[block] == last_used:
                self._remove(block, removable)
                removed.append(block)
        self._forget(removed)
        return removed

    def _make_plan(self, n: int, removable: Bools) -> None:
        """Order the leaves by what is known now. What is used from now on isn't in the plan."""
        for returned, lives in ((True, self._evicted.came_back), (False, self._evicted.given_up)):
            ages, classes = unpacked(lives)
            self.history.end(classes, ages, returned=returned)
            lives.clear()
        known = min(len(removable), len(self._present))
        cached = np.flatnonzero(self._present[:known] & removable[:known])
        self._keys = np.full(len(self._present), np.nan)
        self._keys[cached] = self.policy.sort_keys(self._candidates(cached))
        self._planned_at = self._uses
        self._plan_lasts = max(n, len(cached) // PLANNED_SHARE)
        leaves = cached[self._children[cached] == 0]
        if len(leaves) > self._plan_lasts:
            order = np.lexsort((-self._depth[leaves], self._last_used[leaves], self._keys[leaves]))
            leaves = leaves[order[: self._plan_lasts]]
        columns = (self._keys[leaves], self._last_used[leaves], -self._depth[leaves], leaves)
        self._plan = list(zip(*(column.tolist() for column in columns), strict=True))
        heapq.heapify(self._plan)

    def _may_leave(self, block: int, removable: Bools) -> bool:
        return bool(self._present[block] and self._children[block] == 0 and removable[block])

    def _remove(self, block: int, removable: Bools) -> None:
        self._present[block] = False
        self._plan_lasts -= 1
        parent = int(self._parent[block])
        if parent == NO_PARENT:
            return
        self._children[parent] -= 1
        last_used = int(self._last_used[parent])
        if last_used <= self._planned_at and self._may_leave(parent, removable) and parent < len(self._keys):
            key = float(self._keys[parent])
            if not math.isnan(key):
                heapq.heappush(self._plan, (key, last_used, -int(self._depth[parent]), parent))

    def _candidates(self, blocks: Ints) -> Candidates:
        idle = self._requests - self._used_at[blocks]
        classes = self._class[blocks]

        def worth() -> Floats:
            if self.history.is_due(self._requests):
                self._learn(classes, idle)
            return self.history.worth(classes, idle)

        return Candidates(self._last_used[blocks], idle, self._depth[blocks], self._hits[blocks], worth)

    def _learn(self, classes: Ints, idle: Ints) -> None:
        """Blocks that are cached, and those that had to leave, are lives that go on; what is held isn't waited for."""
        used_at, evicted_classes = self._evicted.uses()
        self.history.learn(
            np.concatenate([classes, evicted_classes]),
            np.concatenate([idle, self._requests - used_at]),
            self._requests,
            per_request=self._lives / max(self._requests, 1),
        )

    def _forget(self, blocks: list[int]) -> None:
        """Go on watching for the addresses of blocks that left."""
        places = np.array(blocks, np.int64)
        facts = zip(blocks, self._used_at[places].tolist(), self._class[places].tolist(), strict=True)
        for block, used_at, of_class in facts:
            self._evicted.add(self._addresses[block], used_at, of_class, self._requests)
            self._addresses[block] = None

    # -- reading ---------------------------------------------------------------------------------------------------

    def was_evicted(self, address: Hashable) -> bool:
        """Whether a block with this address was here, and had to leave; only the latest evictions are remembered."""
        return address in self._evicted

    def hits(self, blocks: Ints) -> Ints:
        """How often each of these findable blocks was matched since it was published."""
        return self._hits[blocks].copy()

    def forest(self) -> dict[int, tuple[Hashable, int | None]]:
        """Address and parent of each findable block."""
        return {
            block: (self._addresses[block], None if self._parent[block] == NO_PARENT else int(self._parent[block]))
            for block in np.flatnonzero(self._present).tolist()
        }

    def check_invariants(self) -> None:
        """Raises AssertionError if the forest is none: wrong child counts, orphans, blocks without an address."""
        present = np.flatnonzero(self._present)
        parents = self._parent[present]
        hanging = parents != NO_PARENT
        assert self._present[parents[hanging]].all(), "a block outlived its parent"
        counts = np.bincount(parents[hanging], minlength=len(self._present))
        assert (counts[present] == self._children[present]).all(), "wrong child count"
        assert (self._depth[present[hanging]] == self._depth[parents[hanging]] + 1).all(), "wrong depth"
        assert (self._depth[present[~hanging]] == 0).all(), "wrong depth"
        assert (self._used_at[present] <= self._requests).all(), "used in the future"
        assert (self._last_used[present] <= self._uses).all(), "used in the future"
        for block, address in enumerate(self._addresses):
            assert (address is not None) == bool(self._present[block]), "addresses and blocks differ"
            assert address is None or address not in self._evicted, "a findable block counts as evicted"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _grow(self, blocks: int) -> None:
        size = len(self._present)
        if blocks <= size:
            return
        more = max(blocks, 2 * size, 64) - size
        self._addresses.extend([None] * more)
        self._present = np.pad(self._present, (0, more))
        self._parent = np.pad(self._parent, (0, more))
        self._children = np.pad(self._children, (0, more))
        self._depth = np.pad(self._depth, (0, more))
        self._last_used = np.pad(self._last_used, (0, more))
        self._used_at = np.pad(self._used_at, (0, more))
        self._hits = np.pad(self._hits, (0, more))
        self._class = np.pad(self._class, (0, more))
