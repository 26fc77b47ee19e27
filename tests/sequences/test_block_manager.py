"""Free blocks, then growth, then reclaimed ones, then an error that says who holds the rest."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.errors import InvalidInputError, OutOfBlocksError
from kvos.policy import LRU
from kvos.storage import BlockCounts, BlockStatus
from kvos.types import BlockIds
from sequences.bench import ALICE, BOB, Bench, tokens_from
from sequences.kv_values import all_stored, tenants_in


def tenants_of(bench: Bench, blocks: BlockIds) -> set[int]:
    """Whose bytes a holder of ``blocks`` could read."""
    return set().union(*(tenants_in(stored) for stored in all_stored(bench.pool, blocks)))


# -- where blocks come from ------------------------------------------------------------------------------------------


def test_the_pool_grows_by_the_segments_that_are_needed_and_no_more() -> None:
    bench = Bench(max_blocks=16, blocks_per_segment=4)
    bench.manager.allocate(5, ALICE)
    assert (bench.pool.num_blocks, len(bench.pool.segments)) == (8, 2)
    assert bench.manager.counters["segments_added"] == 2


def test_the_pool_grows_before_anything_cached_is_given_up() -> None:
    bench = Bench(max_blocks=8, blocks_per_segment=4)
    bench.computed(tokens_from(0, 32)).release()
    bench.manager.allocate(4, ALICE)
    assert (len(bench.manager.index), bench.pool.num_blocks) == (4, 8)


def test_cached_blocks_are_reclaimed_only_as_far_as_needed_and_leaves_first() -> None:
    bench = Bench(max_blocks=8, blocks_per_segment=8)
    bench.computed(tokens_from(0, 32)).release()
    bench.manager.allocate(6, ALICE)
    assert bench.manager.counters["blocks_reclaimed"] == 2
    assert sorted(entry.depth for entry in bench.manager.index.entries()) == [0, 1]
    assert bench.manager.allocator.counts() == BlockCounts(free=0, active=6, cached=2, reserved=0)


def test_the_prefix_that_was_used_longest_ago_is_reclaimed_first() -> None:
    bench = Bench(max_blocks=4)
    old, recent = bench.computed(tokens_from(0, 16)), bench.computed(tokens_from(100, 16))
    recent.release()
    old.release()  # the release is the last use: now the other one is older
    bench.manager.allocate(2, ALICE)
    assert bench.open(tokens_from(0, 16)).adopt_prefix() == 16
    assert bench.open(tokens_from(100, 16)).adopt_prefix() == 0


def test_a_match_is_a_use_too() -> None:
    bench = Bench(max_blocks=4, policy=LRU())
    first, second = bench.computed(tokens_from(0, 16)), bench.computed(tokens_from(100, 16))
    first.release()
    second.release()
    again = bench.open(tokens_from(0, 16))
    again.adopt_prefix()
    again.release()
    bench.manager.allocate(2, ALICE)
    assert bench.open(tokens_from(0, 16)).adopt_prefix() == 16


def test_blocks_that_somebody_holds_are_never_reclaimed() -> None:
    bench = Bench(max_blocks=4)
    kept = bench.computed(tokens_from(0, 16))
    bench.computed(tokens_from(100, 16)).release()
    bench.check(kept, bench.occupy(2))
    with pytest.raises(OutOfBlocksError):
        bench.manager.allocate(1, ALICE)


# -- running out -----------------------------------------------------------------------------------------------------


def test_out_of_blocks_says_how_many_were_asked_free_cached_and_held_and_by_whom() -> None:
    bench = Bench(max_blocks=8)
    bench.computed(tokens_from(100, 8)).release()
    sequences = [
        bench.computed(tokens_from(200, 3), label="small"),
        bench.computed(tokens_from(300, 24), label="large"),
        bench.open(label="empty"),
    ]
    bench.manager.reserve(1, ALICE)
    before = bench.state(*sequences)
    with pytest.raises(OutOfBlocksError) as caught:
        bench.manager.allocate(4, ALICE)
    error = caught.value
    assert (error.asked, error.free, error.cached, error.held) == (4, 2, 1, 5)
    assert error.holders == (("large", 3), ("small", 1))
    assert str(error) == (
        "out of KV blocks: asked for 4, 2 free, 1 cached, 5 held (large: 3, small: 1). "
        "Close or truncate a session, or give the cache more memory (cache_bytes)."
    )
    assert bench.state(*sequences) == before


def test_a_reservation_runs_out_in_the_same_words() -> None:
    bench = Bench(max_blocks=4)
    holder = bench.computed(tokens_from(0, 16), label="holder")
    with pytest.raises(OutOfBlocksError, match=r"asked for 3, 2 free, 0 cached, 2 held \(holder: 2\)"):
        bench.manager.reserve(3, ALICE)
    bench.check(holder)


def test_sequences_with_one_label_are_counted_together_and_a_shared_block_for_each_holder() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 20), label="agent")
    children = [parent.fork(label="agent"), parent.fork(label="child")]
    assert bench.manager.holders() == (("agent", 6), ("child", 3))
    bench.check(parent, *children)


def test_at_most_ten_holders_are_named_the_largest_first() -> None:
    bench = Bench(max_blocks=100)
    sequences = [bench.computed(tokens_from(100 * i, 8 * i), label=f"s{i}") for i in range(1, 12)]
    assert bench.manager.holders() == tuple((f"s{i}", i) for i in range(11, 1, -1))
    bench.check(*sequences)


def test_a_released_sequence_is_no_holder() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 8), label="gone").release()
    assert bench.manager.holders() == ()


def test_a_cached_prefix_stays_while_a_transfer_uses_what_hangs_below_it() -> None:
    bench = Bench(max_blocks=4)
    sequence = bench.computed(tokens_from(0, 32), label="agent")
    last = sequence.block_table()[-1:].copy()
    bench.manager.allocator.begin_use(last)
    sequence.release()
    with pytest.raises(OutOfBlocksError, match="asked for 1, 0 free, 3 cached, 1 held"):
        bench.manager.allocate(1, ALICE)
    bench.check()
    bench.manager.allocator.end_use(last)
    assert len(bench.manager.allocate(4, ALICE)) == 4


# -- reservations ----------------------------------------------------------------------------------------------------


def test_a_claim_takes_from_the_reservation_first_and_the_rest_from_the_pool() -> None:
    bench = Bench(max_blocks=8)
    reservation = bench.manager.reserve(2, ALICE)
    bench.manager.allocate(4, ALICE)
    blocks = bench.manager.claim(reservation, 3)
    assert len(set(blocks.tolist())) == 3
    assert bench.manager.allocator.reserved(reservation) == 0
    assert bench.manager.allocator.counts() == BlockCounts(free=1, active=7, cached=0, reserved=0)


def test_a_reservation_keeps_its_promise_when_the_pool_is_full() -> None:
    bench = Bench(max_blocks=4)
    reservation = bench.manager.reserve(2, ALICE)
    bench.manager.allocate(2, ALICE)
    assert len(bench.manager.claim(reservation, 2)) == 2


def test_a_claim_that_the_pool_cannot_complete_leaves_the_reservation_alone() -> None:
    bench = Bench(max_blocks=4)
    reservation = bench.manager.reserve(2, ALICE)
    bench.manager.allocate(2, ALICE)
    before = bench.state()
    with pytest.raises(OutOfBlocksError):
        bench.manager.claim(reservation, 3)
    assert bench.state() == before
    assert bench.manager.allocator.reserved(reservation) == 2


def test_a_cancelled_reservation_promises_nothing_and_a_claim_allocates() -> None:
    bench = Bench(max_blocks=4)
    reservation = bench.manager.reserve(2, ALICE)
    bench.manager.cancel(reservation)
    bench.manager.cancel(reservation)
    assert bench.manager.allocator.num_free == 4
    assert len(bench.manager.claim(reservation, 3)) == 3


def test_a_reservation_may_reclaim() -> None:
    bench = Bench(max_blocks=4)
    bench.computed(tokens_from(0, 32)).release()
    bench.manager.reserve(3, ALICE)
    assert bench.manager.allocator.counts() == BlockCounts(free=0, active=0, cached=1, reserved=3)


@pytest.mark.parametrize("n", [-1, -5])
def test_a_negative_count_is_refused(n: int) -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 8))
    reservation = bench.manager.reserve(1, ALICE)
    before = bench.state()
    with pytest.raises(InvalidInputError):
        bench.manager.allocate(n, ALICE)
    with pytest.raises(InvalidInputError):
        bench.manager.reserve(n, ALICE)
    with pytest.raises(InvalidInputError):
        bench.manager.claim(reservation, n)
    assert bench.state() == before


# -- tenants ---------------------------------------------------------------------------------------------------------


def test_an_allocated_block_holds_no_other_tenants_bytes() -> None:
    bench = Bench(max_blocks=4)
    bench.computed(tokens_from(0, 12)).release()
    assert tenants_of(bench, np.arange(4)) == {ALICE}
    blocks = bench.manager.allocate(3, BOB)
    assert tenants_of(bench, blocks) == set()
    assert bench.manager.counters["blocks_scrubbed"] == 1  # the full block stayed cached and was not needed
    bench.manager.allocate(1, BOB)
    assert tenants_of(bench, np.arange(4)) == set()


def test_a_claimed_block_holds_no_other_tenants_bytes() -> None:
    bench = Bench(max_blocks=4)
    bench.computed(tokens_from(0, 5)).release()
    reservation = bench.manager.reserve(4, BOB)
    assert tenants_of(bench, bench.manager.claim(reservation, 4)) == set()


def test_a_block_goes_from_tenant_to_tenant_and_back_scrubbed_each_time() -> None:
    bench = Bench(max_blocks=1)
    for turn, owner in enumerate([ALICE, BOB, ALICE, BOB]):
        sequence = bench.computed(tokens_from(0, 5), owner=owner)
        assert tenants_of(bench, sequence.block_table()) == {owner}
        assert bench.manager.counters["blocks_scrubbed"] == turn
        sequence.release()


def test_a_reserved_block_that_was_given_back_unwritten_is_still_scrubbed_for_another_tenant() -> None:
    bench = Bench(max_blocks=1)
    bench.computed(tokens_from(0, 5)).release()
    bench.manager.cancel(bench.manager.reserve(1, BOB))
    assert tenants_of(bench, bench.manager.allocate(1, BOB)) == set()


def test_an_idle_moment_scrubs_free_blocks_and_leaves_held_and_cached_ones() -> None:
    bench = Bench(max_blocks=8)
    kept = bench.computed(tokens_from(0, 12))
    cached = bench.computed(tokens_from(100, 8))
    gone = bench.computed(tokens_from(200, 4))
    freed = gone.block_table().copy()
    cached.release()
    gone.release()
    assert bench.manager.scrub_some() == 1
    assert bench.manager.scrub_some() == 0
    assert tenants_of(bench, freed) == set()
    again = bench.open(tokens_from(100, 8))
    assert again.adopt_prefix() == 8
    bench.check(kept, again)


def test_an_idle_moment_scrubs_a_bounded_number() -> None:
    bench = Bench(max_blocks=100, blocks_per_segment=100)
    bench.manager.allocator.release(bench.manager.allocate(100, ALICE))
    assert [bench.manager.scrub_some() for _ in range(3)] == [64, 36, 0]


# -- contradictions are found ----------------------------------------------------------------------------------------


def test_check_invariants_finds_a_block_that_is_counted_more_often_than_tables_hold_it() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 4))
    bench.manager.allocator.retain(sequence.block_table())
    with pytest.raises(AssertionError, match="counts 2 holders, 1 tables hold it"):
        bench.manager.check_invariants()


def test_check_invariants_finds_a_published_block_that_the_index_does_not_know() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 4))
    bench.manager.allocator.publish(sequence.block_table())
    with pytest.raises(AssertionError, match="index and flag differ"):
        bench.manager.check_invariants()


def test_a_status_is_what_the_table_of_the_design_says() -> None:
    bench = Bench(max_blocks=4)
    sequence = bench.computed(tokens_from(0, 8))
    block = int(sequence.block_table()[0])
    assert bench.status(block) is BlockStatus.ACTIVE
    sequence.release()
    assert bench.status(block) is BlockStatus.CACHED
    bench.manager.reserve(4, ALICE)
    assert bench.status(block) is BlockStatus.RESERVED


@pytest.mark.parametrize("reserved", [0, 2])
def test_blocks_that_cannot_be_scrubbed_are_free_again_and_nobodys(
    reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(max_blocks=8, blocks_per_segment=8)
    bench.computed(tokens_from(0, 64)).release()  # of Alice, in every block
    reservation = bench.manager.reserve(reserved, BOB)

    def fails(_: BlockIds) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(bench.pool, "scrub", fails)
        with pytest.raises(MemoryError):
            bench.manager.claim(reservation, 4)
    bench.manager.cancel(reservation)
    bench.manager.check_invariants()
    blocks = bench.manager.allocate(8, BOB)
    assert tenants_of(bench, blocks) <= {BOB}
