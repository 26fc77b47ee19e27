"""What every tier promises, asked of each."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvos.tiers.base import BlockRequest, Loaded, Stored, Tier
from tiers.tier_suite import (
    BLOCK_BYTES,
    FAST_FOLDER,
    TIERS,
    TierFactory,
    check_invariants,
    content_of,
    found,
    key_of,
    load,
    other_parents,
    request,
    store,
)

HIT, MISS, DAMAGED = Loaded.HIT, Loaded.MISS, Loaded.DAMAGED


@pytest.fixture(params=TIERS.values(), ids=TIERS.keys())
def factory(request: pytest.FixtureRequest) -> TierFactory:
    return request.param


@pytest.fixture
def tier(factory: TierFactory, tmp_path: Path) -> Iterator[Tier]:
    """Room for four blocks."""
    made = factory(4, tmp_path)
    yield made
    check_invariants(made)
    made.close()


def test_stored_blocks_load_bit_equal(tier: Tier) -> None:
    assert store(tier, 0, 1, 2) == [Stored.STORED] * 3
    assert found(tier, 2, 0, 1) == [HIT] * 3


def test_unknown_key_is_a_miss(tier: Tier) -> None:
    store(tier, 0)
    assert found(tier, 7) == [MISS]


def test_an_empty_batch_is_nothing(tier: Tier) -> None:
    assert load(tier, request([]))[0] == []
    assert tier.contains([]) == []
    tier.drop([])


def test_wrong_tokens_are_damage_once_and_then_a_miss(tier: Tier) -> None:
    store(tier, 0)
    assert load(tier, request([0], version=1))[0] == [DAMAGED]
    assert found(tier, 0) == [MISS]
    assert tier.usage().counters["damaged"] == 1
    assert tier.usage().blocks == 0


def test_wrong_parent_is_damage_once_and_then_a_miss(tier: Tier) -> None:
    store(tier, 0)
    assert load(tier, other_parents(request([0])))[0] == [DAMAGED]
    assert found(tier, 0) == [MISS]
    assert store(tier, 0) == [Stored.STORED]
    assert found(tier, 0) == [HIT]


def test_storing_again_says_present(tier: Tier) -> None:
    store(tier, 0)
    assert store(tier, 0, 1) == [Stored.PRESENT, Stored.STORED]
    assert store(tier, 2, 2) == [Stored.STORED, Stored.PRESENT]
    assert found(tier, 0, 1, 2) == [HIT] * 3


def test_the_least_recently_used_leaves_first(tier: Tier) -> None:
    for number in range(4):
        store(tier, number)
    assert found(tier, 0) == [HIT]
    store(tier, 4)
    assert tier.contains([key_of(number) for number in range(5)]) == [True, False, True, True, True]
    assert found(tier, 0, 1, 2, 3, 4) == [HIT, MISS, HIT, HIT, HIT]
    assert tier.usage().counters["evicted"] == 1


def test_storing_again_is_a_use(tier: Tier) -> None:
    for number in (0, 1, 2, 3, 0, 4):
        store(tier, number)
    assert found(tier, 0, 1) == [HIT, MISS]


def test_capacity_is_never_exceeded(tier: Tier) -> None:
    for number in range(20):
        store(tier, number)
        usage = tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes
        assert usage.blocks == min(number + 1, 4)
        assert usage.used_bytes >= usage.blocks * BLOCK_BYTES
    assert found(tier, 19) == [HIT]


def test_of_a_batch_larger_than_the_tier_as_much_is_there_as_fits(tier: Tier) -> None:
    """Its end where rows push each other out, its beginning where room is found for the batch as a whole."""
    results = store(tier, *range(10))
    held = tier.contains([key_of(number) for number in range(10)])
    assert held in ([False] * 6 + [True] * 4, [True] * 4 + [False] * 6)
    assert found(tier, *range(10)) == [HIT if there else MISS for there in held]
    assert [result for result, there in zip(results, held, strict=True) if there] == [Stored.STORED] * 4
    assert tier.usage().used_bytes <= tier.usage().capacity_bytes


def test_a_block_that_is_said_to_be_there_was_not_pushed_out_by_its_own_batch(tier: Tier) -> None:
    store(tier, 0, 1, 2, 3)
    assert store(tier, 4, 5, 6, 7, 0)[-1] in (Stored.STORED, Stored.PRESENT)
    assert found(tier, 5, 6, 0) == [HIT] * 3
    assert tier.usage().blocks == 4


def test_a_block_larger_than_the_tier_finds_no_room(factory: TierFactory, tmp_path: Path) -> None:
    small = factory(0, tmp_path)
    assert store(small, 0) == [Stored.NO_ROOM]
    assert found(small, 0) == [MISS]
    assert small.usage().blocks == 0
    small.close()


def test_drop_forgets(tier: Tier) -> None:
    store(tier, 0, 1)
    tier.drop([key_of(0), key_of(9)])
    assert found(tier, 0, 1) == [MISS, HIT]
    assert store(tier, 0) == [Stored.STORED]
    assert found(tier, 0) == [HIT]


def test_contains_agrees_with_load(tier: Tier) -> None:
    store(tier, 0, 1)
    tier.drop([key_of(0)])
    assert tier.contains([key_of(0), key_of(1), key_of(2)]) == [False, True, False]


def test_results_are_per_row_in_a_mixed_batch(tier: Tier) -> None:
    store(tier, 0, 1, 2)
    right, wrong = request([0, 9, 1, 2, 2, 0]), request([0, 9, 1, 2, 2, 0], version=1)
    tokens = right.tokens.copy()
    tokens[4] = wrong.tokens[4]  # block 2 is asked for rightly and then, in the same batch, wrongly
    parents = (*right.parents[:2], key_of(-5), *right.parents[3:])
    results, out = load(tier, BlockRequest(right.keys, parents, tokens))
    assert results == [HIT, MISS, DAMAGED, HIT, DAMAGED, HIT]
    for row, number in ((0, 0), (3, 2), (5, 0)):
        np.testing.assert_array_equal(out[row], content_of(number))


def test_close_is_idempotent(tier: Tier) -> None:
    store(tier, 0)
    tier.close()
    tier.close()


def test_threads_see_whole_blocks(tier: Tier) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(40):
                numbers = random.integers(0, 8, 3).tolist()
                store(tier, *numbers)
                wrong.extend(result for result in found(tier, *numbers) if result not in (HIT, MISS))
                tier.drop([key_of(numbers[0])])
                tier.usage()
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
VERSIONS = st.integers(0, 1)


class TierMachine(RuleBasedStateMachine):
    """A tier beside a dictionary of what it may hold: it may lose blocks, and never makes one up."""

    def __init__(self, factory: TierFactory) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST_FOLDER)
        self.tier = factory(4, Path(self.folder.name))
        self.version_of: dict[int, int] = {}

    @rule(numbers=NUMBERS, version=VERSIONS)
    def store(self, numbers: list[int], version: int) -> None:
        for number, result in zip(numbers, store(self.tier, *numbers, version=version), strict=True):
            assert result in (Stored.STORED, Stored.PRESENT, Stored.NO_ROOM)
            if result is Stored.STORED:
                self.version_of[number] = version
            assert number in self.version_of or result is Stored.NO_ROOM

    @rule(numbers=NUMBERS, version=VERSIONS)
    def load(self, numbers: list[int], version: int) -> None:
        before = dict(self.version_of)
        for number, result in zip(numbers, found(self.tier, *numbers, version=version), strict=True):
            assert result in (HIT, MISS, DAMAGED)
            known = before.get(number)
            if result is HIT:
                assert known == version
            else:
                assert result is MISS or known == 1 - version
                self.version_of.pop(number, None)  # once it is gone, it stays away

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        self.tier.drop([key_of(number) for number in numbers])
        for number in numbers:
            self.version_of.pop(number, None)

    @invariant()
    def agrees(self) -> None:
        usage = self.tier.usage()
        held = self.tier.contains([key_of(number) for number in range(10)])
        assert sum(held) == usage.blocks
        assert all(number in self.version_of for number, there in enumerate(held) if there)
        assert usage.used_bytes <= usage.capacity_bytes
        check_invariants(self.tier)

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


def test_no_history_makes_a_tier_give_wrong_bytes(factory: TierFactory) -> None:
    run_state_machine_as_test(lambda: TierMachine(factory))
