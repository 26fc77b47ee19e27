"""What nobody can beat: the optimum that knows the future, and a cache without bounds."""

from __future__ import annotations

import heapq

from kvos.simulate.trace import Trace

__all__ = ["ceiling_hits", "optimum_hits"]


def ceiling_hits(trace: Trace) -> int:
    """Blocks that were asked for before: the hits of a cache that never evicts."""
    return trace.asked - len(trace.parents)


def optimum_hits(trace: Trace, capacity: int) -> int:
    """Hits of Belady's MIN with room for ``capacity`` blocks: the block whose next use is farthest leaves.

    A block is used whenever one after it is, so its next use is never the later one: of equally far ones the deepest
    goes first, and leaves go before what they stand on. A request's own blocks may leave right after it.
    """
    next_uses = _next_uses(trace)
    expected = [-1] * len(trace.parents)  # next use of a cached block; -1: not cached
    heap: list[tuple[int, int, int]] = []
    cached = hits = 0
    for path, following in zip(trace.paths, next_uses, strict=True):
        unbroken = True
        for block, use in zip(path, following, strict=True):
            here = expected[block] >= 0
            unbroken = unbroken and here
            hits += unbroken
            cached += not here
            expected[block] = use
            heapq.heappush(heap, (-use, -trace.depths[block], block))
        while cached > capacity:
            use, _, block = heapq.heappop(heap)
            if expected[block] == -use:
                expected[block] = -1
                cached -= 1
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """Per request and block: the number of the next request with it; as many as there are requests if none."""
    never = len(trace.paths)
    coming = [never] * len(trace.parents)
    uses = []
    for number in range(never - 1, -1, -1):
        path = trace.paths[number]
        uses.append([coming[block] for block in path])
        for block in path:
            coming[block] = number
    uses.reverse()
    return uses
