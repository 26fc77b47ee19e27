"""Runs of free blocks, and a block's state that moves to another block."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.errors import AllocateNonFreeBlockError, BlockStateError, InvalidInputError, UseAfterFreeError
from kvos.storage import BlockAllocator, BlockStatus
from kvos.types import OwnerId
from storage.allocator_state import ids

ALICE, BOB = OwnerId(1), OwnerId(2)


def with_free(num_blocks: int, *free: int) -> BlockAllocator:
    allocator = BlockAllocator(num_blocks)
    allocator.allocate(num_blocks, ALICE)
    allocator.release(ids(*free))
    return allocator


def test_free_runs_go_by_id_whatever_the_order_of_release() -> None:
    assert with_free(10, 9, 4, 2, 3, 0).free_runs().tolist() == [1, 3, 1]
    assert with_free(4).free_runs().tolist() == []


def test_the_tightest_run_is_found_and_none_crosses_a_segment() -> None:
    allocator = with_free(12, 0, 2, 3, 4, 5, 8, 9)
    assert [allocator.find_free_run(n) for n in (1, 2, 3, 4, 5)] == [0, 8, 2, 2, None]
    assert [allocator.find_free_run(n, 4) for n in (1, 2, 3)] == [0, 2, None]
    with pytest.raises(InvalidInputError):
        allocator.find_free_run(0)


def test_a_move_takes_everything_along_and_frees_the_source() -> None:
    allocator = with_free(6, 4, 5)
    allocator.retain(ids(1))
    allocator.set_filled(ids(1), 3)
    allocator.publish(ids(2))
    allocator.release(ids(2))
    allocator.move(ids(1, 2), ids(5, 4))
    held, cached, *left = allocator.blocks(ids(5, 4, 1, 2))
    assert (held.status, held.ref_count, held.filled, held.owner) == (BlockStatus.ACTIVE, 2, 3, ALICE)
    assert (cached.status, cached.published) == (BlockStatus.CACHED, True)
    assert [block.status for block in left] == [BlockStatus.FREE] * 2
    allocator.check_invariants()
    assert allocator.allocate(2, BOB).to_scrub.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("sources", "targets", "error"),
    [
        ((0,), (1,), AllocateNonFreeBlockError),
        ((4,), (5,), UseAfterFreeError),
        ((3,), (5,), BlockStateError),
        ((0, 0), (4, 5), InvalidInputError),
        ((0, 1), (4, 4), InvalidInputError),
        ((0, 1), (4,), InvalidInputError),
        ((0,), (0,), InvalidInputError),
    ],
)
def test_a_refused_move_changes_nothing(
    sources: tuple[int, ...], targets: tuple[int, ...], error: type[Exception]
) -> None:
    allocator = with_free(6, 4, 5)
    allocator.begin_use(ids(3))
    before = allocator.blocks(np.arange(6))
    with pytest.raises(error):
        allocator.move(ids(*sources), ids(*targets))
    assert allocator.blocks(np.arange(6)) == before
    allocator.check_invariants()
