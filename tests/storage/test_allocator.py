"""The life of a block: free, held, cached, reserved, and back."""

from __future__ import annotations

import numpy as np

from kvos.storage import BlockAllocator, BlockCounts, BlockStatus, CacheBlock
from kvos.types import BlockId, OwnerId
from storage.allocator_state import ids

ALICE, BOB = OwnerId(1), OwnerId(2)


def statuses(allocator: BlockAllocator) -> list[BlockStatus]:
    return [block.status for block in allocator.blocks(np.arange(allocator.num_blocks))]


# -- allocate, retain, release ---------------------------------------------------------------------------------------


def test_every_block_starts_free() -> None:
    allocator = BlockAllocator(3)
    assert statuses(allocator) == [BlockStatus.FREE] * 3
    assert allocator.counts() == BlockCounts(free=3, active=0, cached=0, reserved=0)


def test_allocated_blocks_are_distinct_active_and_held_once() -> None:
    allocator = BlockAllocator(5)
    blocks = allocator.allocate(3, ALICE).blocks
    assert len(set(blocks.tolist())) == 3
    assert allocator.blocks(blocks[:1]) == (
        CacheBlock(BlockId(int(blocks[0])), BlockStatus.ACTIVE, 1, 0, 0, False, ALICE),
    )
    assert allocator.counts() == BlockCounts(free=2, active=3, cached=0, reserved=0)


def test_allocating_nothing_changes_nothing() -> None:
    allocator = BlockAllocator(2)
    assert allocator.allocate(0, ALICE).blocks.tolist() == []
    assert allocator.num_free == 2


def test_the_block_that_was_freed_first_is_given_out_first() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(4, ALICE)
    allocator.release(ids(2))
    allocator.release(ids(0, 3))
    assert allocator.allocate(3, ALICE).blocks.tolist() == [2, 0, 3]


def test_a_block_is_free_after_as_many_releases_as_holders() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.retain(block)
    allocator.retain(block)
    for left in (2, 1):
        allocator.release(block)
        assert (statuses(allocator), allocator.blocks(block)[0].ref_count) == ([BlockStatus.ACTIVE], left)
    allocator.release(block)
    assert statuses(allocator) == [BlockStatus.FREE]


def test_one_release_may_name_a_block_once_per_holder() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.retain(block)
    allocator.release(np.concatenate([block, block]))
    assert allocator.num_free == 1
    allocator.check_invariants()


def test_one_retain_may_name_a_block_twice() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.retain(np.concatenate([block, block]))
    assert allocator.blocks(block)[0].ref_count == 3


def test_a_freed_block_forgets_how_many_slots_were_filled() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.set_filled(block, 7)
    assert allocator.blocks(block)[0].filled == 7
    allocator.release(block)
    assert allocator.blocks(block)[0].filled == 0


def test_growth_adds_free_blocks_behind_the_last_id_and_keeps_the_others() -> None:
    allocator = BlockAllocator(2)
    held = allocator.allocate(2, ALICE).blocks
    allocator.grow(3)
    assert allocator.num_blocks == 5
    assert [block.ref_count for block in allocator.blocks(held)] == [1, 1]
    assert allocator.allocate(3, ALICE).blocks.tolist() == [2, 3, 4]


def test_a_snapshot_does_not_follow_later_changes() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    snapshot = allocator.blocks(block)[0]
    allocator.release(block)
    assert (snapshot.status, snapshot.ref_count) == (BlockStatus.ACTIVE, 1)


# -- published blocks ------------------------------------------------------------------------------------------------


def test_a_published_block_that_nobody_holds_is_cached_with_its_content() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate(1, ALICE).blocks
    allocator.set_filled(block, 8)
    allocator.publish(block)
    allocator.release(block)
    assert allocator.blocks(block)[0] == CacheBlock(BlockId(0), BlockStatus.CACHED, 0, 0, 8, True, ALICE)
    assert allocator.cached()[0]
    assert not allocator.cached()[1]


def test_a_cached_block_is_not_given_out() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate(1, ALICE).blocks
    allocator.publish(block)
    allocator.release(block)
    assert allocator.num_free == 1
    assert allocator.allocate(1, ALICE).blocks.tolist() == [1]


def test_retaining_a_cached_block_makes_it_active_again() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.publish(block)
    allocator.release(block)
    allocator.retain(block)
    assert statuses(allocator) == [BlockStatus.ACTIVE]
    allocator.check_invariants()


def test_a_reclaimed_block_is_free_and_no_longer_published() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.publish(block)
    allocator.release(block)
    allocator.reclaim(block)
    assert allocator.blocks(block)[0] == CacheBlock(BlockId(0), BlockStatus.FREE, 0, 0, 0, False, ALICE)


def test_a_reclaim_that_names_a_block_twice_frees_it_once() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.publish(block)
    allocator.release(block)
    allocator.reclaim(np.concatenate([block, block]))
    assert allocator.num_free == 1
    allocator.check_invariants()


# -- writable --------------------------------------------------------------------------------------------------------


def test_a_block_is_writable_only_while_one_table_holds_it_nothing_reads_it_and_it_is_unpublished() -> None:
    allocator = BlockAllocator(5)
    blocks = allocator.allocate(4, ALICE).blocks
    alone, shared, busy, published = (blocks[i : i + 1] for i in range(4))
    allocator.retain(shared)
    allocator.begin_use(busy)
    allocator.publish(published)
    assert allocator.writable(np.arange(5)).tolist() == [True, False, False, False, False]
    allocator.check_writable(alone)


def test_a_block_is_writable_again_when_the_other_holder_has_left() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.retain(block)
    allocator.release(block)
    allocator.check_writable(block)


# -- use by transfers and steps --------------------------------------------------------------------------------------


def test_a_block_in_use_stays_active_without_a_holder() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.begin_use(block)
    allocator.release(block)
    assert statuses(allocator) == [BlockStatus.ACTIVE]
    assert allocator.num_free == 0
    allocator.end_use(block)
    assert statuses(allocator) == [BlockStatus.FREE]


def test_a_cached_block_is_active_while_it_is_in_use() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.publish(block)
    allocator.release(block)
    allocator.begin_use(block)
    assert statuses(allocator) == [BlockStatus.ACTIVE]
    allocator.end_use(block)
    assert statuses(allocator) == [BlockStatus.CACHED]


def test_a_block_is_in_use_until_the_last_use_ends() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate(1, ALICE).blocks
    allocator.begin_use(np.concatenate([block, block]))
    allocator.release(block)
    allocator.end_use(block)
    assert allocator.blocks(block)[0].busy == 1
    allocator.end_use(block)
    assert allocator.num_free == 1


# -- reservations ----------------------------------------------------------------------------------------------------


def test_reserved_blocks_are_not_given_to_others() -> None:
    allocator = BlockAllocator(3)
    reservation = allocator.reserve(2, ALICE)
    assert allocator.counts() == BlockCounts(free=1, active=0, cached=0, reserved=2)
    assert allocator.counts().held == 2
    assert allocator.allocate(1, BOB).blocks.tolist() == [2]
    assert allocator.reserved(reservation) == 2


def test_claimed_blocks_are_held_by_the_owner_of_the_reservation() -> None:
    allocator = BlockAllocator(3)
    reservation = allocator.reserve(3, ALICE)
    blocks = allocator.claim(reservation, 2).blocks
    assert [(b.status, b.ref_count, b.owner) for b in allocator.blocks(blocks)] == [(BlockStatus.ACTIVE, 1, ALICE)] * 2
    assert allocator.reserved(reservation) == 1


def test_cancel_gives_back_only_what_was_not_claimed() -> None:
    allocator = BlockAllocator(3)
    reservation = allocator.reserve(3, ALICE)
    claimed = allocator.claim(reservation, 1).blocks
    allocator.cancel(reservation)
    assert allocator.counts() == BlockCounts(free=2, active=1, cached=0, reserved=0)
    assert allocator.blocks(claimed)[0].status is BlockStatus.ACTIVE
    assert allocator.reserved(reservation) == 0


def test_cancel_may_be_repeated() -> None:
    allocator = BlockAllocator(2)
    reservation = allocator.reserve(2, ALICE)
    allocator.cancel(reservation)
    allocator.cancel(reservation)
    assert allocator.num_free == 2
    allocator.check_invariants()


def test_two_reservations_promise_different_blocks() -> None:
    allocator = BlockAllocator(4)
    first, second = allocator.reserve(2, ALICE), allocator.reserve(2, ALICE)
    assert first != second
    claimed = [*allocator.claim(first, 2).blocks.tolist(), *allocator.claim(second, 2).blocks.tolist()]
    assert sorted(claimed) == [0, 1, 2, 3]


# -- scrubbing -------------------------------------------------------------------------------------------------------


def test_a_fresh_block_needs_no_scrubbing() -> None:
    assert BlockAllocator(2).allocate(2, ALICE).to_scrub.tolist() == []


def test_another_owners_block_must_be_scrubbed() -> None:
    allocator = BlockAllocator(2)
    allocator.release(allocator.allocate(1, ALICE).blocks)
    allocation = allocator.allocate(2, BOB)
    assert sorted(allocation.blocks.tolist()) == [0, 1]
    assert allocation.to_scrub.tolist() == [0]


def test_ones_own_block_needs_no_scrubbing() -> None:
    allocator = BlockAllocator(1)
    allocator.release(allocator.allocate(1, ALICE).blocks)
    assert allocator.allocate(1, ALICE).to_scrub.tolist() == []


def test_a_block_that_was_scrubbed_in_the_background_need_not_be_scrubbed_again() -> None:
    allocator = BlockAllocator(1)
    allocator.release(allocator.allocate(1, ALICE).blocks)
    assert allocator.dirty_free(10).tolist() == [0]
    allocator.mark_scrubbed(ids(0))
    assert allocator.dirty_free(10).tolist() == []
    assert allocator.allocate(1, BOB).to_scrub.tolist() == []


def test_claimed_blocks_of_another_owner_must_be_scrubbed_too() -> None:
    allocator = BlockAllocator(1)
    allocator.release(allocator.allocate(1, ALICE).blocks)
    assert allocator.claim(allocator.reserve(1, BOB), 1).to_scrub.tolist() == [0]


def test_only_free_blocks_are_scrubbed_in_the_background() -> None:
    allocator = BlockAllocator(4)
    free, cached, held, reserved = (allocator.allocate(1, ALICE).blocks for _ in range(4))
    allocator.publish(cached)
    allocator.release(np.concatenate([reserved, free, cached]))
    allocator.reserve(1, ALICE)
    assert allocator.blocks(reserved)[0].status is BlockStatus.RESERVED
    assert allocator.blocks(held)[0].status is BlockStatus.ACTIVE
    assert allocator.dirty_free(10).tolist() == free.tolist()


def test_the_background_scrub_is_bounded() -> None:
    allocator = BlockAllocator(5)
    allocator.release(allocator.allocate(5, ALICE).blocks)
    assert len(allocator.dirty_free(2)) == 2
