"""Forks share every block and copy the tail on the first write, whichever side writes."""

from __future__ import annotations

import pytest

from kvos.sequences import SequenceCache
from kvos.storage import BlockStatus
from sequences.bench import Bench, tokens_from


def write_more(bench: Bench, sequence: SequenceCache, first: int, n: int) -> None:
    sequence.append(tokens_from(first, n))
    bench.compute(sequence)


def test_a_fork_has_the_same_tokens_and_blocks_and_takes_none() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 20))
    parent.append(tokens_from(20, 3))
    free = bench.manager.allocator.num_free
    child = parent.fork(label="child")
    assert child.tokens().tolist() == parent.tokens().tolist()
    assert child.block_table().tolist() == parent.block_table().tolist()
    assert (child.num_computed, child.num_pending, child.label) == (20, 3, "child")
    assert bench.manager.allocator.num_free == free
    assert bench.manager.counters["blocks_copied"] == 0
    bench.check(parent, child)


@pytest.mark.parametrize("child_first", [True, False])
def test_both_sides_go_on_without_seeing_each_other(child_first: bool) -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 20))
    child = parent.fork()
    order = [(child, 500), (parent, 600)]
    for sequence, first in order if child_first else reversed(order):
        write_more(bench, sequence, first, 9)
    assert child.block_table().tolist()[:2] == parent.block_table().tolist()[:2]
    assert not set(child.block_table().tolist()[2:]) & set(parent.block_table().tolist()[2:])
    bench.check(parent, child)


def test_only_the_first_writer_copies_and_only_the_tail() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 20))
    tail = int(parent.block_table()[-1])
    child = parent.fork()
    write_more(bench, parent, 600, 1)
    assert (bench.manager.counters["blocks_copied"], int(child.block_table()[-1])) == (1, tail)
    write_more(bench, child, 500, 1)
    assert (bench.manager.counters["blocks_copied"], int(child.block_table()[-1])) == (1, tail)
    bench.check(parent, child)


def test_of_n_sharers_all_but_the_last_copy() -> None:
    bench = Bench(max_blocks=32)
    parent = bench.computed(tokens_from(0, 12))
    children = [parent.fork() for _ in range(4)]
    for i, sequence in enumerate([*children, parent]):
        write_more(bench, sequence, 100 * (i + 1), 2)
    assert bench.manager.counters["blocks_copied"] == 4
    bench.check(parent, *children)


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 16))
    child = parent.fork()
    write_more(bench, child, 500, 3)
    write_more(bench, parent, 600, 3)
    assert bench.manager.counters["blocks_copied"] == 0
    bench.check(parent, child)


def test_a_shared_tail_belongs_to_the_last_holder_alone() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 12))
    child = parent.fork()
    parent.release()
    write_more(bench, child, 500, 3)
    assert bench.manager.counters["blocks_copied"] == 0
    bench.check(child)


def test_a_block_lives_until_its_last_holder_has_left() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 4))
    block = int(parent.block_table()[0])
    children = [parent.fork(), parent.fork()]
    parent.release()
    children[0].release()
    assert bench.status(block) is BlockStatus.ACTIVE
    bench.check(children[1])
    children[1].release()
    assert bench.status(block) is BlockStatus.FREE
    bench.check()


def test_a_fork_of_a_fork_is_a_fork() -> None:
    bench = Bench()
    sequences = [bench.computed(tokens_from(0, 5))]
    for i in range(4):
        child = sequences[-1].fork()
        write_more(bench, child, 100 * (i + 1), 5)
        sequences.append(child)
    bench.check(*sequences)


def test_a_truncated_fork_leaves_its_parent_whole() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 20))
    child = parent.fork()
    child.truncate(10)
    write_more(bench, child, 500, 10)
    bench.check(parent, child)


def test_a_truncated_parent_copies_before_it_rewrites_what_its_child_holds() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 14))
    child = parent.fork()
    parent.truncate(10)
    write_more(bench, parent, 600, 2)
    bench.check(parent, child)
    assert bench.manager.counters["blocks_copied"] == 1


def test_a_tail_that_a_transfer_reads_is_copied_before_a_write() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 12))
    tail = sequence.block_table()[-1:].copy()
    bench.manager.allocator.begin_use(tail)
    write_more(bench, sequence, 12, 2)
    assert int(sequence.block_table()[-1]) != int(tail[0])
    assert bench.status(int(tail[0])) is BlockStatus.ACTIVE
    bench.manager.allocator.end_use(tail)
    assert bench.status(int(tail[0])) is BlockStatus.FREE
    bench.check(sequence)


def test_a_copied_tail_counts_its_filled_slots() -> None:
    bench = Bench()
    parent = bench.computed(tokens_from(0, 13))
    child = parent.fork()
    child.append(tokens_from(13, 1))
    child.abandon_write(child.prepare_write(1))
    copy = bench.manager.allocator.blocks(child.block_table()[-1:])[0]
    assert (copy.filled, copy.ref_count) == (5, 1)


def test_pending_tokens_of_a_fork_are_its_own() -> None:
    bench = Bench()
    parent = bench.open(tokens_from(0, 5))
    child = parent.fork()
    child.append(tokens_from(50, 2))
    assert (parent.num_tokens, child.num_tokens) == (5, 7)
    child.truncate(1)
    assert parent.tokens().tolist() == [0, 1, 2, 3, 4]


def test_whoever_shares_the_tail_may_leave_to_make_room_for_its_copy() -> None:
    bench = Bench(max_blocks=4)
    parent = bench.computed(tokens_from(0, 12))
    child = parent.fork()
    other = bench.occupy(2)

    def leave(_: int) -> None:
        parent.swap_out()
        other.swap_out()

    bench.manager.relief = leave
    write_more(bench, child, 500, 1)
    assert (child.num_computed, len(child.block_table())) == (13, 2)
    bench.check(parent, child, other)
