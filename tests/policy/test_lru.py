"""The yardstick: oldest first, and of equally old blocks the deeper one."""

from __future__ import annotations

from kvos.policy import LRU, EvictionCandidate


def order(*candidates: EvictionCandidate) -> list[EvictionCandidate]:
    return sorted(candidates, key=LRU().sort_key)


def test_what_was_used_longest_ago_leaves_first() -> None:
    old, recent = EvictionCandidate(last_used=3, depth=0, hits=9), EvictionCandidate(last_used=4, depth=5, hits=0)
    assert order(recent, old) == [old, recent]


def test_of_blocks_used_at_the_same_time_the_deeper_leaves_first() -> None:
    prefix, end = EvictionCandidate(last_used=3, depth=1, hits=0), EvictionCandidate(last_used=3, depth=2, hits=0)
    assert order(prefix, end) == [end, prefix]


def test_hits_do_not_count() -> None:
    assert LRU().sort_key(EvictionCandidate(1, 1, 0)) == LRU().sort_key(EvictionCandidate(1, 1, 99))
