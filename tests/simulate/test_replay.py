"""Hits of small traces, counted by hand and by brute force."""

from __future__ import annotations

import random
from functools import cache

import pytest

from kvos.policy import LRU, POLICIES
from kvos.simulate import Trace, simulate
from kvos.simulate.belady import ceiling_hits, optimum_hits
from kvos.simulate.replay import Replay

BRANCHES = [[1, 2], [1, 3], [1, 2]]


def lru_hits(requests: list[list[int]], capacity: int) -> int:
    return Replay(Trace.of(requests), capacity, LRU()).run()


def random_requests(seed: int, count: int, longest: int = 6) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(2) for _ in range(source.randrange(longest + 1))] for _ in range(count)]


def test_equal_ids_are_one_block_only_after_equal_ids() -> None:
    trace = Trace.of([[7, 8], [8], [7, 8]])
    assert trace.paths == ((0, 1), (2,), (0, 1))
    assert trace.parents == (-1, 0, -1)


def test_lru_evicts_the_leaf_that_was_used_longest_ago() -> None:
    # 1-2 in; 1 hits, 2 leaves for 3; 1 hits, 3 leaves for 2
    assert lru_hits(BRANCHES, 2) == 2
    assert lru_hits(BRANCHES, 3) == 3


def test_a_prefix_stays_while_a_block_after_it_is_cached() -> None:
    # 1-2-3, then 4 takes the place of 3, the deepest of the oldest: 1-2 hit afterwards
    assert lru_hits([[1, 2, 3], [4], [1, 2]], 3) == 2


def test_a_hole_in_the_prefix_ends_the_hits() -> None:
    # 2 takes the place of 1's end; [9, 1] shares no prefix with [1]
    assert lru_hits([[1], [9, 1], [1]], 3) == 1


def test_of_a_request_larger_than_the_pool_the_beginning_is_kept() -> None:
    for policy in POLICIES.values():
        assert Replay(Trace.of([[1, 2, 3, 4], [1, 2, 3, 4]]), 3, policy()).run() == 3


def test_the_optimum_keeps_what_comes_back_first() -> None:
    # a b c a b: LRU with two places hits nothing, the optimum drops c at once and hits a and b
    requests = [[1], [2], [3], [1], [2]]
    assert lru_hits(requests, 2) == 0
    assert optimum_hits(Trace.of(requests), 2) == 2
    assert optimum_hits(Trace.of(requests), 1) == 1


def test_a_cache_without_bounds_hits_what_was_asked_before() -> None:
    trace = Trace.of([*BRANCHES, [2]])
    assert ceiling_hits(trace) == 3
    assert optimum_hits(trace, 100) == 3


def best_possible(trace: Trace, capacity: int) -> int:
    """Try every set of blocks, closed under parents, that a cache could keep after each request."""

    def closed(blocks: frozenset[int]) -> bool:
        return all(trace.parents[block] < 0 or trace.parents[block] in blocks for block in blocks)

    @cache
    def best(time: int, cached: frozenset[int]) -> int:
        if time == len(trace.paths):
            return 0
        path = trace.paths[time]
        here = cached | set(path)
        keepable = {here}
        for _ in range(max(len(here) - capacity, 0)):
            keepable = {kept - {block} for kept in keepable for block in kept if closed(kept - {block})}
        return len(cached & set(path)) + max(best(time + 1, kept) for kept in keepable)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_the_best_of_all_choices(seed: int) -> None:
    trace = Trace.of(random_requests(seed, 9, longest=3))
    for capacity in (1, 2, 4):
        assert optimum_hits(trace, capacity) == best_possible(trace, capacity)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("capacity", [1, 3, 10])
def test_a_pool_stays_a_tree_within_its_size_and_below_the_optimum(name: str, capacity: int) -> None:
    trace = Trace.of(random_requests(3, 200))
    replay = Replay(trace, capacity, POLICIES[name]())
    hits = 0
    for path in trace.paths:
        hits += replay.request(path)
        replay.check_invariants()
    assert hits <= optimum_hits(trace, capacity) <= ceiling_hits(trace)


def test_lru_through_a_heap_equals_lru_by_search() -> None:
    trace = Trace.of(random_requests(5, 300))
    cached: dict[int, int] = {}
    hits = 0
    for time, path in enumerate(trace.paths):
        hits += sum(block in cached for block in path)
        cached |= dict.fromkeys(path, time)
        while len(cached) > 7:
            del cached[min(cached, key=lambda block: (cached[block], -trace.depths[block]))]
    assert Replay(trace, 7, LRU()).run() == hits


def test_expected_return_learns_to_keep_what_comes_back_later() -> None:
    # 50 blocks come back every 100 requests, between them blocks that never do: LRU always drops what returns
    requests = [[turn % 100 if turn % 2 else 1000 + turn] for turn in range(6000)]
    report = simulate(Trace.of(requests), [60])
    assert report.rows[0].lru == 0
    assert report.rows[0].policy > 0.35
    assert report.rows[0].optimum == report.ceiling
