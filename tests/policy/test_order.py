"""Who leaves first, against a model that searches; what is learned on the way, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvos.policy import LRU, POLICIES, Candidates, EvictionOrder, EvictionPolicy, ExpectedReturn
from kvos.policy.base import Bools, Floats, Ints

POOL = 12


class FewestHits(EvictionPolicy):
    def sort_keys(self, candidates: Candidates) -> Floats:
        return candidates.hits.astype(np.float64)


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def free_but(*held: int) -> Bools:
    return ~np.isin(np.arange(POOL), held)


def remove(order: EvictionOrder, n: int, *held: int) -> list[int]:
    return order.remove_coldest(n, free_but(*held))


# -- order -----------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    parent: int | None
    depth: int
    used: int
    name: int
    children: set[int] = field(default_factory=set)


class LRUMachine(RuleBasedStateMachine):
    """Random uses, moves and evictions, with some blocks held; LRU by looking at every leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(LRU())
        self.blocks: dict[int, Block] = {}
        self.gone: set[int] = set()
        self.uses = self.names = 0

    @rule(choice=st.integers(0, 99), again=st.booleans())
    def insert(self, choice: int, again: bool) -> None:
        free = [block for block in range(POOL) if block not in self.blocks]
        if not free:
            return
        block = free[choice % len(free)]
        parents = [None, *self.blocks]
        parent = parents[choice % len(parents)]
        name = min(self.gone) if again and self.gone else self.names
        self.names += 1
        self.uses += 1
        self.gone.discard(name)
        self.order.insert(block, parent, name)
        self.blocks[block] = Block(parent, 0 if parent is None else self.blocks[parent].depth + 1, self.uses, name)
        if parent is not None:
            self.blocks[parent].children.add(block)

    @rule(blocks=st.sets(st.integers(0, POOL - 1)), hit=st.booleans())
    def touch(self, blocks: set[int], hit: bool) -> None:
        self.order.begin_request()
        self.order.touch(ints(*blocks), hit=hit)
        self.uses += 1
        for block in blocks & self.blocks.keys():
            self.blocks[block].used = self.uses

    @rule(n=st.integers(1, 4), held=st.sets(st.integers(0, POOL - 1), max_size=4))
    def evict(self, n: int, held: set[int]) -> None:
        expected = []
        for _ in range(n):
            leaves = [block for block, facts in self.blocks.items() if not facts.children and block not in held]
            if not leaves:
                break
            coldest = min(leaves, key=lambda block: (self.blocks[block].used, -self.blocks[block].depth, block))
            expected.append(coldest)
            facts = self.blocks.pop(coldest)
            self.gone.add(facts.name)
            if facts.parent is not None:
                self.blocks[facts.parent].children.discard(coldest)
        assert remove(self.order, n, *held) == expected

    @rule(choice=st.integers(0, 99))
    def move(self, choice: int) -> None:
        free = [block for block in range(POOL) if block not in self.blocks]
        if not free or not self.blocks:
            return
        source, target = list(self.blocks)[choice % len(self.blocks)], free[choice % len(free)]
        self.order.move(ints(source), ints(target))
        moved = self.blocks[target] = self.blocks.pop(source)
        for child in moved.children:
            self.blocks[child].parent = target
        if moved.parent is not None:
            self.blocks[moved.parent].children ^= {source, target}

    @invariant()
    def both_agree(self) -> None:
        self.order.check_invariants()
        assert self.order.forest() == {block: (facts.name, facts.parent) for block, facts in self.blocks.items()}
        assert all(self.order.was_evicted(name) == (name in self.gone) for name in range(self.names))


TestLRUMachine = LRUMachine.TestCase


def test_the_policy_decides_among_leaves_and_not_beyond_them() -> None:
    order = EvictionOrder(FewestHits())
    order.insert(0, None, "a")
    order.insert(1, 0, "ab")
    order.insert(2, None, "c")
    order.touch(ints(1), hit=True)
    order.touch(ints(1, 2), hit=True)
    # a was never hit, but ab stands on it
    assert remove(order, 3) == [2, 1, 0]


def test_of_equal_keys_the_oldest_leaves_first_then_the_deepest() -> None:
    order = EvictionOrder(FewestHits())
    order.insert(0, None, "a")
    order.insert(1, 0, "ab")
    order.insert(2, None, "c")
    order.insert(3, None, "d")
    order.touch(ints(0, 1, 2), hit=False)
    assert remove(order, 4) == [3, 1, 0, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_held_when_the_order_is_made_and_let_go_later_can_leave(policy: str) -> None:
    order = EvictionOrder(POLICIES[policy]())
    for block in range(3):
        order.insert(block, None, block)
    assert remove(order, 3, 0, 2) == [1]
    assert remove(order, 3, 2) == [0]
    assert remove(order, 3) == [2]
    assert remove(order, 3) == []


def test_in_a_large_pool_a_use_after_the_order_was_made_still_counts() -> None:
    order = EvictionOrder(LRU())
    for block in range(640):
        order.insert(block, None, block)
    everything = np.ones(640, np.bool_)
    assert order.remove_coldest(1, everything) == [0]  # the next nine are known now
    order.touch(ints(1, 2), hit=True)
    order.insert(0, None, 1000)
    assert order.remove_coldest(9, everything) == [3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_block_that_was_replaced_since_the_order_was_made_is_another_one() -> None:
    order = EvictionOrder(LRU())
    for block in range(640):
        order.insert(block, None, block)
    everything = np.ones(640, np.bool_)
    assert order.remove_coldest(2, everything) == [0, 1]
    order.insert(1, None, 1001)
    order.insert(0, 1, 1000)  # behind block 1, in a place of the order that was made
    assert order.remove_coldest(700, everything)[-2:] == [0, 1]


# -- learning --------------------------------------------------------------------------------------------------------


def returned_at(order: EvictionOrder, of_class: int, age: int) -> float:
    return float(order.history.returned[of_class, order.history.bucket(ints(age))[0]])


def requests(order: EvictionOrder, n: int) -> None:
    for _ in range(n):
        order.begin_request()


def test_a_hit_is_a_return_at_its_age_and_the_next_one_is_of_the_next_class() -> None:
    order = EvictionOrder(ExpectedReturn())
    order.insert(0, None, "a")
    for age in (3, 5, 7, 7):
        requests(order, age)
        order.touch(ints(0), hit=True)
    assert [returned_at(order, *life) for life in ((0, 3), (1, 5), (2, 7))] == [1, 1, 2]
    assert order.history.returned.sum() == 4


def test_another_use_begins_a_life_anew_and_teaches_nothing() -> None:
    order = EvictionOrder(ExpectedReturn())
    order.insert(0, None, "a")
    requests(order, 100)
    order.touch(ints(0), hit=False)
    requests(order, 2)
    order.touch(ints(0), hit=True)
    assert (returned_at(order, 0, 2), order.history.returned.sum()) == (1, 1)


def test_what_comes_back_after_it_was_evicted_is_a_return_too() -> None:
    order = EvictionOrder(ExpectedReturn())
    order.insert(0, None, "a")
    requests(order, 4)
    remove(order, 1)
    requests(order, 6)
    assert order.was_evicted("a")
    order.insert(5, None, "a")
    assert not order.was_evicted("a")
    remove(order, 1)  # what came back is counted when the next order is made
    assert (returned_at(order, 0, 10), order.history.returned.sum()) == (1, 1)


def test_what_never_comes_back_is_lost_when_nobody_watches_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.policy.evicted.REMEMBERED_EVICTIONS", 2)
    order = EvictionOrder(ExpectedReturn())
    for number in range(5):
        order.begin_request()
        order.insert(0, None, number)
        remove(order, 1)
    assert order.history.lost.sum() == 2  # of three, the last is counted when the next order is made
    assert [order.was_evicted(number) for number in range(5)] == [False, False, False, True, True]


def test_before_anything_returned_the_order_is_that_of_lru() -> None:
    order = EvictionOrder(ExpectedReturn())
    for block in range(4):
        order.begin_request()
        order.insert(block, None, block)
    order.touch(ints(1), hit=False)
    assert remove(order, 4) == [0, 2, 3, 1]


def test_what_came_back_before_outlives_what_never_did() -> None:
    order = EvictionOrder(ExpectedReturn())
    for turn in range(40):  # block 0 comes back every other request, the others never
        order.begin_request()
        if turn == 0:
            order.insert(0, None, "comes back")
        elif turn % 2 == 0:
            order.touch(ints(0), hit=True)
        else:
            order.insert(1 + turn % 4, None, turn)
            remove(order, 1, 0)
    order.insert(7, None, "new, and younger")
    assert remove(order, 1) == [7]
