"""From prepare to complete or abandon: what is taken, what becomes visible, and when."""

from __future__ import annotations

import pytest

from kvos.errors import BlockStateError, InvalidInputError, OutOfBlocksError
from kvos.storage import BlockCounts
from sequences.bench import ALICE, Bench, tokens_from


def test_a_plan_names_one_slot_per_token_behind_the_computed_ones() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 6))
    sequence.append(tokens_from(6, 10))
    plan = sequence.prepare_write(5)
    table = sequence.block_table().tolist()
    assert (plan.start, plan.end) == (6, 11)
    assert plan.slots.tolist() == [table[0] * 8 + 6, table[0] * 8 + 7, table[1] * 8, table[1] * 8 + 1, table[1] * 8 + 2]


def test_tokens_of_an_open_plan_are_not_computed_yet() -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 10))
    plan = sequence.prepare_write(10)
    assert (sequence.num_computed, sequence.num_pending) == (0, 10)
    with pytest.raises(InvalidInputError):
        sequence.slots(0, 1)
    bench.fill(sequence, plan)
    sequence.complete_write(plan)
    assert (sequence.num_computed, sequence.num_pending) == (10, 0)
    bench.check(sequence)


def test_a_block_is_found_only_when_its_write_is_complete() -> None:
    bench = Bench()
    writer, reader = bench.open(tokens_from(0, 10)), bench.open(tokens_from(0, 10))
    plan = writer.prepare_write(10)
    assert (reader.adopt_prefix(), len(bench.manager.index)) == (0, 0)
    bench.fill(writer, plan)
    assert reader.adopt_prefix() == 0
    writer.complete_write(plan)
    assert reader.adopt_prefix() == 8
    bench.check(writer, reader)


def test_a_partly_filled_block_is_not_published() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 7))
    assert len(bench.manager.index) == 0


def test_a_block_that_was_filled_in_several_writes_is_published_by_the_last() -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 8))
    for done in range(8):
        assert len(bench.manager.index) == 0, done
        bench.compute(sequence, 1)
    assert len(bench.manager.index) == 1


def test_abandon_gives_the_new_blocks_back_and_counts_nothing_as_computed() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 6))
    sequence.append(tokens_from(6, 20))
    before = bench.state(sequence)
    plan = sequence.prepare_write(20)
    sequence.abandon_write(plan)
    counts = bench.manager.allocator.counts()
    assert (counts.active, sequence.num_computed, sequence.num_pending) == (1, 6, 20)
    assert bench.state(sequence)[2:] == before[2:]
    bench.check(sequence)


def test_after_an_abandoned_write_the_same_tokens_can_be_written() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 6))
    sequence.append(tokens_from(6, 20))
    sequence.abandon_write(sequence.prepare_write(20))
    bench.compute(sequence)
    bench.check(sequence)


def test_an_abandoned_write_on_a_shared_tail_keeps_what_was_computed() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 6))
    child = parent.fork()
    child.append(tokens_from(6, 4))
    child.abandon_write(child.prepare_write(4))
    bench.check(parent, child)


@pytest.mark.parametrize("n", [-1, 0, 4])
def test_writing_no_tokens_or_more_than_are_pending_is_refused(n: int) -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 3))
    before = bench.state(sequence)
    with pytest.raises(InvalidInputError, match=f"cannot write {n} tokens.*3 are pending"):
        sequence.prepare_write(n)
    assert bench.state(sequence) == before


def test_while_a_plan_is_open_nothing_else_may_change_the_table() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 16))
    sequence = bench.open(tokens_from(0, 16), label="agent 7")
    plan = sequence.prepare_write(12)
    before = bench.state(sequence)
    for change in (
        lambda: sequence.prepare_write(1),
        lambda: sequence.truncate(4),
        sequence.fork,
        sequence.adopt_prefix,
    ):
        with pytest.raises(BlockStateError, match="agent 7 has an open write"):
            change()
    assert bench.state(sequence) == before
    bench.fill(sequence, plan)
    sequence.complete_write(plan)
    bench.check(sequence)


def test_tokens_may_be_appended_while_a_plan_is_open() -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 3))
    plan = sequence.prepare_write(3)
    sequence.append(tokens_from(3, 2))
    bench.fill(sequence, plan)
    sequence.complete_write(plan)
    assert (sequence.num_computed, sequence.num_pending) == (3, 2)
    bench.check(sequence)


def test_a_plan_ends_once() -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 3))
    plan = sequence.prepare_write(3)
    sequence.complete_write(plan)
    for end in (sequence.complete_write, sequence.abandon_write):
        with pytest.raises(BlockStateError, match="no such open write"):
            end(plan)
    assert sequence.num_computed == 3


def test_another_sequences_plan_is_refused() -> None:
    bench = Bench()
    first, second = bench.open(tokens_from(0, 3)), bench.open(tokens_from(9, 3))
    plan = first.prepare_write(3)
    second.prepare_write(3)
    with pytest.raises(BlockStateError, match="no such open write"):
        second.complete_write(plan)


def test_release_with_an_open_plan_gives_every_block_back() -> None:
    bench = Bench(max_blocks=4)
    sequence = bench.computed(tokens_from(0, 6))
    sequence.append(tokens_from(6, 20))
    sequence.prepare_write(20)
    sequence.release()
    assert bench.manager.allocator.counts() == BlockCounts(free=4, active=0, cached=0, reserved=0)
    bench.check()


def test_out_of_blocks_changes_nothing() -> None:
    bench = Bench(max_blocks=4)
    parent = bench.computed(tokens_from(0, 20))
    child = parent.fork()
    child.append(tokens_from(20, 9))
    before = bench.state(parent, child)
    with pytest.raises(OutOfBlocksError, match="asked for 2, 1 free"):
        child.prepare_write(9)
    assert bench.state(parent, child) == before
    bench.compute(child, 4)  # what fits still works: one block for the copy of the tail
    bench.check(parent, child)


# -- reservations ----------------------------------------------------------------------------------------------------


def test_a_write_takes_its_blocks_from_the_reservation() -> None:
    bench = Bench(max_blocks=4)
    reservation = bench.manager.reserve(3, ALICE)
    bench.occupy(1)
    sequence = bench.open(tokens_from(0, 20))
    bench.compute(sequence, 9, reservation)
    assert bench.manager.allocator.reserved(reservation) == 1
    bench.compute(sequence, 11, reservation)
    assert bench.manager.allocator.reserved(reservation) == 0
    bench.check(sequence)


def test_a_write_into_the_tail_leaves_the_reservation_alone() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 5))
    sequence.append(tokens_from(5, 3))
    reservation = bench.manager.reserve(2, ALICE)
    bench.compute(sequence, 3, reservation)
    assert bench.manager.allocator.reserved(reservation) == 2


def test_the_copy_of_a_shared_tail_comes_from_the_reservation_too() -> None:
    bench = Bench(max_blocks=4)
    parent = bench.computed(tokens_from(0, 5))
    child = parent.fork()
    child.append(tokens_from(50, 9))
    assert child.blocks_needed(9) == 2
    reservation = bench.manager.reserve(2, ALICE)
    bench.occupy(1)
    bench.compute(child, 9, reservation)
    assert bench.manager.allocator.reserved(reservation) == 0
    bench.check(parent, child)


def test_a_reservation_that_is_too_small_is_completed_from_the_pool() -> None:
    bench = Bench()
    sequence = bench.open(tokens_from(0, 30))
    reservation = bench.manager.reserve(1, ALICE)
    bench.compute(sequence, 30, reservation)
    assert bench.manager.allocator.reserved(reservation) == 0
    bench.check(sequence)
