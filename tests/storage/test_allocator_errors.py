"""Each violation of a block's life has its own error, and none of them changes anything."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.errors import (
    AllocateNonFreeBlockError,
    BlockStateError,
    DoubleReleaseError,
    InvalidInputError,
    OutOfBlocksError,
    ReleaseFreeBlockError,
    SharedBlockWriteError,
    UseAfterFreeError,
)
from kvos.storage import BlockAllocator
from kvos.types import OwnerId
from storage.allocator_state import ids, raises_and_changes_nothing

ALICE = OwnerId(1)
HELD, SHARED, BUSY, CACHED, PUBLISHED, RESERVED, FREE = range(7)


@pytest.fixture
def allocator() -> BlockAllocator:
    """One block in each state, by the names above, and one more free block."""
    allocator = BlockAllocator(8)
    allocator.allocate(5, ALICE)
    allocator.retain(ids(SHARED))
    allocator.begin_use(ids(BUSY))
    allocator.publish(ids(CACHED, PUBLISHED))
    allocator.release(ids(CACHED))
    allocator.reserve(1, ALICE)
    allocator.check_invariants()
    return allocator


# -- releasing -------------------------------------------------------------------------------------------------------


def test_releasing_a_free_block(allocator: BlockAllocator) -> None:
    with raises_and_changes_nothing(allocator, ReleaseFreeBlockError, match=r"\[6\]"):
        allocator.release(ids(HELD, FREE))


def test_releasing_a_block_again_after_its_last_holder_left(allocator: BlockAllocator) -> None:
    allocator.release(ids(HELD))
    with raises_and_changes_nothing(allocator, ReleaseFreeBlockError, match=r"\[0\]"):
        allocator.release(ids(HELD))


@pytest.mark.parametrize("block", [CACHED, RESERVED])
def test_releasing_a_block_that_no_table_holds(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, DoubleReleaseError, match=rf"\[{block}\]"):
        allocator.release(ids(HELD, block))


def test_naming_a_block_more_often_than_it_is_held(allocator: BlockAllocator) -> None:
    with raises_and_changes_nothing(allocator, DoubleReleaseError, match=r"\[1\]"):
        allocator.release(ids(SHARED, HELD, SHARED, SHARED))


def test_releasing_a_busy_block_that_its_holder_has_left_already(allocator: BlockAllocator) -> None:
    allocator.release(ids(BUSY))
    with raises_and_changes_nothing(allocator, DoubleReleaseError, match=r"\[2\]"):
        allocator.release(ids(BUSY))


def test_ending_a_use_that_did_not_begin(allocator: BlockAllocator) -> None:
    with raises_and_changes_nothing(allocator, DoubleReleaseError, match=r"\[0\]"):
        allocator.end_use(ids(BUSY, HELD))


def test_ending_a_use_twice_in_one_call(allocator: BlockAllocator) -> None:
    with raises_and_changes_nothing(allocator, DoubleReleaseError, match=r"\[2\]"):
        allocator.end_use(ids(BUSY, BUSY))


# -- using what is not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [FREE, RESERVED])
def test_retaining_a_block_that_nobody_wrote(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, UseAfterFreeError, match=rf"\[{block}\]"):
        allocator.retain(ids(HELD, block))


@pytest.mark.parametrize("block", [FREE, RESERVED])
def test_beginning_to_use_a_block_that_nobody_wrote(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, UseAfterFreeError, match=rf"\[{block}\]"):
        allocator.begin_use(ids(HELD, block))


@pytest.mark.parametrize("block", [FREE, RESERVED])
def test_publishing_a_block_that_nobody_wrote(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, UseAfterFreeError, match=rf"\[{block}\]"):
        allocator.publish(ids(HELD, block))


@pytest.mark.parametrize("block", [FREE, RESERVED])
def test_reading_or_writing_after_free(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, UseAfterFreeError, match=rf"\[{block}\]"):
        allocator.check_readable(ids(HELD, block))
    with raises_and_changes_nothing(allocator, UseAfterFreeError, match=rf"\[{block}\]"):
        allocator.check_writable(ids(HELD, block))


@pytest.mark.parametrize("block", [SHARED, BUSY, PUBLISHED, CACHED])
def test_writing_to_a_block_that_others_may_read(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, SharedBlockWriteError, match=rf"\[{block}\]"):
        allocator.check_writable(ids(HELD, block))


@pytest.mark.parametrize("block", [HELD, SHARED, BUSY, PUBLISHED, RESERVED, FREE])
def test_reclaiming_a_block_that_is_not_cached(allocator: BlockAllocator, block: int) -> None:
    with raises_and_changes_nothing(allocator, BlockStateError, match=rf"\[{block}\]"):
        allocator.reclaim(ids(CACHED, block))


# -- asking for too many ---------------------------------------------------------------------------------------------


def test_asking_for_more_blocks_than_are_free(allocator: BlockAllocator) -> None:
    with raises_and_changes_nothing(allocator, OutOfBlocksError, match="asked for 3, 2 free, 1 cached, 5 held"):
        allocator.allocate(3, ALICE)
    with raises_and_changes_nothing(allocator, OutOfBlocksError):
        allocator.reserve(3, ALICE)


def test_asking_for_fewer_than_no_blocks(allocator: BlockAllocator) -> None:
    reservation = allocator.reserve(1, ALICE)
    with raises_and_changes_nothing(allocator, InvalidInputError, match="-1"):
        allocator.allocate(-1, ALICE)
    with raises_and_changes_nothing(allocator, InvalidInputError, match="-1"):
        allocator.reserve(-1, ALICE)
    with raises_and_changes_nothing(allocator, InvalidInputError, match="-1"):
        allocator.claim(reservation, -1)


def test_claiming_more_than_was_reserved(allocator: BlockAllocator) -> None:
    reservation = allocator.reserve(2, ALICE)
    allocator.claim(reservation, 1)
    with raises_and_changes_nothing(allocator, BlockStateError, match="holds 1 blocks, 2 were claimed"):
        allocator.claim(reservation, 2)


def test_claiming_from_a_cancelled_reservation(allocator: BlockAllocator) -> None:
    reservation = allocator.reserve(2, ALICE)
    allocator.cancel(reservation)
    with raises_and_changes_nothing(allocator, BlockStateError, match="holds 0 blocks"):
        allocator.claim(reservation, 1)


def test_a_block_in_the_free_queue_that_is_not_free_is_not_given_out() -> None:
    allocator = BlockAllocator(3)
    held = allocator.allocate(1, ALICE).blocks
    allocator._free.push(held)  # the fault: two lists that contradict each other
    before = allocator._free.to_array().tolist()
    with pytest.raises(AllocateNonFreeBlockError, match=r"\[0\]"):
        allocator.allocate(3, ALICE)
    assert allocator._free.to_array().tolist() == before
    assert [block.ref_count for block in allocator.blocks(np.arange(3))] == [1, 0, 0]


# -- contradictions are found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "block", "value"),
    [
        ("_status", HELD, 0),
        ("_status", FREE, 1),
        ("_ref_count", HELD, 0),
        ("_ref_count", HELD, -1),
        ("_ref_count", CACHED, 1),
        ("_ref_count", FREE, 1),
        ("_busy", FREE, 1),
        ("_busy", HELD, -1),
        ("_published", CACHED, 0),
        ("_published", FREE, 1),
        ("_published", RESERVED, 1),
        ("_filled", FREE, 3),
        ("_status", RESERVED, 1),
        ("_status", HELD, 3),
    ],
)
def test_check_invariants_finds_a_count_that_contradicts_its_state(
    allocator: BlockAllocator, array: str, block: int, value: int
) -> None:
    getattr(allocator, array)[block] = value
    with pytest.raises(AssertionError):
        allocator.check_invariants()


def test_check_invariants_finds_a_block_that_is_free_twice(allocator: BlockAllocator) -> None:
    allocator._free.push(ids(FREE))
    with pytest.raises(AssertionError, match="twice"):
        allocator.check_invariants()
