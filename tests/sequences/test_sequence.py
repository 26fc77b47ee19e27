"""Tokens, positions and slots of one sequence; truncating and releasing it."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.errors import InvalidInputError, UseAfterFreeError
from kvos.sequences import SequenceCache, SlotContent
from kvos.storage import BlockStatus
from sequences.bench import ALICE, Bench, root_of, tokens_from

# -- tokens and positions --------------------------------------------------------------------------------------------


def test_appended_tokens_are_pending_and_take_no_block() -> None:
    bench = Bench()
    sequence = bench.open([5, 6, 7])
    assert (sequence.num_tokens, sequence.num_computed, sequence.num_pending) == (3, 0, 3)
    assert sequence.block_table().tolist() == []
    assert bench.pool.num_blocks == 0


def test_a_position_is_the_index_in_the_sequence() -> None:
    sequence = Bench().open(tokens_from(50, 6))
    assert sequence.positions().tolist() == [0, 1, 2, 3, 4, 5]
    assert sequence.positions(4).tolist() == [4, 5]
    assert sequence.positions(2, 4).tolist() == [2, 3]


def test_tokens_can_be_read_in_part_and_not_written() -> None:
    sequence = Bench().open(tokens_from(50, 6))
    assert sequence.tokens(2, 4).tolist() == [52, 53]
    with pytest.raises(ValueError, match="read-only"):
        sequence.tokens()[0] = 1


def test_the_revision_changes_whenever_the_tokens_do() -> None:
    sequence = Bench().open([1, 2])
    revisions = [sequence.revision]
    sequence.append(tokens_from(3, 2))
    revisions.append(sequence.revision)
    sequence.truncate(3)
    revisions.append(sequence.revision)
    assert len(set(revisions)) == 3


def test_computing_does_not_change_the_revision() -> None:
    bench = Bench()
    sequence = bench.open([1, 2])
    before = sequence.revision
    bench.compute(sequence)
    assert sequence.revision == before


def test_a_sequence_without_a_label_is_called_by_its_number() -> None:
    sequence = Bench().open()
    assert sequence.label == f"sequence {sequence.id}"


# -- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_block_times_block_size_plus_offset() -> None:
    bench = Bench()
    bench.manager.allocate(3, ALICE)
    sequence = bench.computed(tokens_from(0, 11))
    assert sequence.block_table().tolist() == [3, 4]
    assert sequence.slots().tolist() == [24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34]
    assert sequence.slots(7, 9).tolist() == [31, 32]


def test_blocks_need_not_be_neighbours_or_in_order() -> None:
    bench = Bench()
    taken = bench.manager.allocate(4, ALICE)
    for block in (2, 0):
        bench.manager.allocator.release(taken[block : block + 1])
    sequence = bench.open(tokens_from(0, 16))
    bench.pool.max_blocks = 4  # no growth: the two free blocks it is, the first freed first
    bench.compute(sequence)
    assert sequence.block_table().tolist() == [2, 0]
    assert sequence.slots(6, 10).tolist() == [22, 23, 0, 1]


@pytest.mark.parametrize(("start", "end"), [(0, 12), (-1, 3), (5, 4), (12, None)])
def test_only_computed_tokens_have_slots(start: int, end: int | None) -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 11))
    sequence.append(tokens_from(11, 5))
    with pytest.raises(InvalidInputError, match="11 are computed"):
        sequence.slots(start, end)


def test_a_slot_says_which_token_at_which_position_it_holds() -> None:
    bench = Bench()
    bench.manager.allocate(2, ALICE)
    sequence = bench.computed(tokens_from(70, 11))
    assert sequence.slot_content(16) == SlotContent(index=0, token=70, position=0)
    assert sequence.slot_content(26) == SlotContent(index=10, token=80, position=10)


@pytest.mark.parametrize("slot", [15, 27, 31, 32, 1000])
def test_a_slot_that_the_sequence_does_not_use_holds_nothing_of_it(slot: int) -> None:
    bench = Bench()
    bench.manager.allocate(2, ALICE)
    assert bench.computed(tokens_from(70, 11)).slot_content(slot) is None


# -- blocks ----------------------------------------------------------------------------------------------------------


def test_new_tokens_fill_the_tail_block_before_they_take_a_new_one() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 5))
    first = sequence.block_table().tolist()
    sequence.append(tokens_from(5, 3))
    bench.compute(sequence)
    assert sequence.block_table().tolist() == first
    sequence.append(tokens_from(8, 1))
    bench.compute(sequence)
    assert sequence.block_table().tolist()[:1] == first
    assert len(sequence.block_table()) == 2
    bench.check(sequence)


@pytest.mark.parametrize(
    ("computed", "more", "blocks"), [(0, 1, 1), (0, 8, 1), (0, 9, 2), (5, 3, 0), (5, 4, 1), (8, 17, 3)]
)
def test_blocks_needed_counts_what_the_next_tokens_take(computed: int, more: int, blocks: int) -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, computed))
    assert sequence.blocks_needed(more) == blocks


def test_chunks_of_any_size_give_the_same_kv() -> None:
    bench = Bench(max_blocks=32)
    sequences = [bench.open(tokens_from(1000 * size, 30)) for size in (1, 3, 8, 11, 30)]
    for sequence, size in zip(sequences, (1, 3, 8, 11, 30), strict=True):
        while sequence.num_pending:
            bench.compute(sequence, min(size, sequence.num_pending))
    bench.check(*sequences)


def test_filled_slots_are_counted_per_block() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 19))
    assert [block.filled for block in bench.manager.allocator.blocks(sequence.block_table())] == [8, 8, 3]


# -- truncate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "blocks"), [(20, 3), (17, 3), (16, 2), (9, 2), (8, 1), (1, 1), (0, 0)])
def test_truncate_keeps_the_blocks_of_the_tokens_that_stay(keep: int, blocks: int) -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    table = sequence.block_table().tolist()
    sequence.truncate(keep)
    assert (sequence.num_tokens, sequence.num_computed) == (keep, keep)
    assert sequence.block_table().tolist() == table[:blocks]
    bench.check(sequence)


def test_truncate_drops_pending_tokens_without_touching_blocks() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 10))
    sequence.append(tokens_from(10, 5))
    table = sequence.block_table().tolist()
    sequence.truncate(12)
    assert (sequence.num_computed, sequence.num_pending) == (10, 2)
    assert sequence.block_table().tolist() == table


def test_an_unpublished_block_is_free_when_truncate_gives_it_back_and_a_published_one_is_cached() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    _, full, partial = sequence.block_table().tolist()
    sequence.truncate(8)
    assert bench.status(full) is BlockStatus.CACHED
    assert bench.status(partial) is BlockStatus.FREE


def test_other_tokens_after_a_truncate_are_written_and_found_under_their_own_address() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    sequence.truncate(12)
    sequence.append(tokens_from(500, 8))
    bench.compute(sequence)
    bench.check(sequence)
    rewritten = [*range(12), *range(500, 504)]
    other = bench.open(rewritten)
    assert other.adopt_prefix() == 16
    bench.check(sequence, other)


def test_what_was_published_before_a_truncate_is_still_found_after_the_rewrite() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 16))
    sequence.truncate(12)
    sequence.append(tokens_from(500, 4))
    bench.compute(sequence)
    other = bench.open(tokens_from(0, 16))
    assert other.adopt_prefix() == 16
    bench.check(sequence, other)


def test_a_tail_of_its_own_is_rewritten_in_place() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 14))
    table = sequence.block_table().tolist()
    sequence.truncate(10)
    sequence.append(tokens_from(500, 3))
    bench.compute(sequence)
    assert sequence.block_table().tolist() == table
    assert bench.manager.counters["blocks_copied"] == 0
    bench.check(sequence)


@pytest.mark.parametrize("keep", [-1, 21])
def test_truncating_to_an_impossible_length_is_refused(keep: int) -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20), label="agent 7")
    before = bench.state(sequence)
    with pytest.raises(InvalidInputError, match=f"agent 7 to {keep} tokens; it has 20"):
        sequence.truncate(keep)
    assert bench.state(sequence) == before


# -- release ---------------------------------------------------------------------------------------------------------


def test_release_leaves_full_blocks_cached_and_the_tail_free() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    first, second, tail = sequence.block_table().tolist()
    sequence.release()
    assert [bench.status(block) for block in (first, second, tail)] == [
        BlockStatus.CACHED,
        BlockStatus.CACHED,
        BlockStatus.FREE,
    ]
    bench.check()


def test_release_may_be_repeated() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    sequence.release()
    before = bench.state()
    sequence.release()
    assert bench.state() == before


def test_a_released_sequence_refuses_every_change() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20), label="agent 7")
    sequence.release()
    before = bench.state()
    for change in (
        lambda: sequence.append(tokens_from(0, 1)),
        lambda: sequence.truncate(0),
        sequence.fork,
        sequence.adopt_prefix,
        lambda: sequence.prepare_write(1),
    ):
        with pytest.raises(UseAfterFreeError, match="agent 7 was released"):
            change()
    assert bench.state() == before
    assert bench.manager.holders() == ()


def test_two_sequences_have_different_numbers() -> None:
    bench = Bench()
    first, second = (SequenceCache(bench.manager, root_of(ALICE)) for _ in range(2))
    assert first.id != second.id


def test_check_invariants_finds_a_table_that_does_not_fit_the_tokens() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    sequence._num_computed = 8
    with pytest.raises(AssertionError, match="table and computed tokens differ"):
        sequence.check_invariants()


def test_check_invariants_finds_a_block_that_is_published_with_other_tokens() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 20))
    sequence._tokens[3] = 99
    with pytest.raises(AssertionError, match="published with other tokens"):
        sequence.check_invariants()
    assert np.array_equal(sequence.tokens(2, 5), [2, 99, 4])
