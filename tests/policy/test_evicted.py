"""Addresses of blocks that left: how they come back, and how many are watched."""

from __future__ import annotations

import pytest

from kvos.policy.evicted import EvictedBlocks, unpacked


def test_what_comes_back_tells_its_class_and_its_age() -> None:
    evicted = EvictedBlocks()
    evicted.add("a", used_at=3, of_class=1, now=5)
    assert "a" in evicted
    assert evicted.come_back("b", now=9) is None
    assert evicted.come_back("a", now=9) == 1
    assert "a" not in evicted
    ages, classes = unpacked(evicted.came_back)
    assert (ages.tolist(), classes.tolist()) == ([6], [1])


def test_the_oldest_is_given_up_for_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.policy.evicted.REMEMBERED_EVICTIONS", 3)
    evicted = EvictedBlocks()
    for number in range(5):
        evicted.add(number, used_at=number, of_class=2, now=10)
    assert [number in evicted for number in range(5)] == [False, False, True, True, True]
    ages, classes = unpacked(evicted.given_up)
    assert (ages.tolist(), classes.tolist()) == ([10, 9], [2, 2])
    used_at, classes = evicted.uses()
    assert (sorted(used_at.tolist()), classes.tolist()) == ([2, 3, 4], [2, 2, 2])


def test_a_place_that_was_left_is_no_reason_to_give_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.policy.evicted.REMEMBERED_EVICTIONS", 3)
    evicted = EvictedBlocks()
    for name in "abc":
        evicted.add(name, used_at=0, of_class=0, now=1)
    evicted.come_back("a", now=2)
    evicted.add("d", used_at=2, of_class=1, now=3)
    assert len(evicted) == 3
    assert not evicted.given_up
