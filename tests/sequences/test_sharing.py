"""Who may take over whose blocks: equal prefixes behind equal roots, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvos.sequences import BlockAddress, BlockHasher
from kvos.types import TokenIds
from sequences.bench import ALICE, BOB, KEY, Bench, WeakHasher, root_of, tokens_from


class ConstantHasher(BlockHasher):
    """Every block has the same address."""

    def chain(self, parent: BlockAddress, tokens: TokenIds) -> BlockAddress:
        return BlockAddress(b"the same")


# -- prefixes that are shared ----------------------------------------------------------------------------------------


def test_two_sequences_with_the_same_prompt_share_its_full_blocks() -> None:
    bench = Bench()
    first = bench.computed([*range(20), 100, 101])
    second = bench.open([*range(20), 200])
    assert second.adopt_prefix() == 16
    bench.compute(second)
    assert second.block_table().tolist()[:2] == first.block_table().tolist()[:2]
    assert second.block_table().tolist()[2] != first.block_table().tolist()[2]
    assert bench.manager.counters["tokens_shared"] == 16
    bench.check(first, second)


@pytest.mark.parametrize(("differs_at", "gained"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (23, 16), (24, 24)])
def test_the_longest_common_prefix_of_full_blocks_is_shared(differs_at: int, gained: int) -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 32))
    tokens = tokens_from(0, 32)
    tokens[differs_at] = 999
    other = bench.open(tokens)
    assert other.adopt_prefix() == gained
    bench.check(other)


def test_the_prompt_of_a_released_sequence_is_still_found() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 20)).release()
    later = bench.open(tokens_from(0, 20))
    assert later.adopt_prefix() == 16
    bench.check(later)


def test_a_whole_sequence_of_full_blocks_is_found() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 16))
    other = bench.open(tokens_from(0, 16))
    assert (other.adopt_prefix(), other.num_pending) == (16, 0)
    bench.check(other)


def test_looking_again_gains_nothing() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 20))
    other = bench.open(tokens_from(0, 20))
    other.adopt_prefix()
    before = bench.state(other)
    assert other.adopt_prefix() == 0
    assert bench.state(other) == before


def test_a_partial_tail_is_exchanged_for_a_full_block_with_the_same_beginning() -> None:
    bench = Bench()
    behind = bench.open(tokens_from(0, 24))
    bench.compute(behind, 11)
    bench.computed(tokens_from(0, 24))
    tail = int(behind.block_table()[1])
    assert behind.adopt_prefix() == 13
    assert (behind.num_computed, behind.num_pending) == (24, 0)
    assert tail not in behind.block_table()
    assert bench.manager.allocator.blocks(np.array([tail]))[0].ref_count == 0
    bench.check(behind)


def test_a_truncated_sequence_takes_its_own_block_back() -> None:
    bench = Bench()
    sequence = bench.computed(tokens_from(0, 16))
    table = sequence.block_table().tolist()
    sequence.truncate(11)
    sequence.append(tokens_from(11, 5))
    assert sequence.adopt_prefix() == 5
    assert sequence.block_table().tolist() == table
    bench.check(sequence)


def test_equal_blocks_that_were_computed_at_once_end_up_as_one() -> None:
    bench = Bench()
    first, second = bench.open(tokens_from(0, 20)), bench.open(tokens_from(0, 20))
    plans = [sequence.prepare_write(20) for sequence in (first, second)]
    for sequence, plan in zip((first, second), plans, strict=True):
        bench.fill(sequence, plan)
    duplicates = second.block_table().tolist()[:2]
    first.complete_write(plans[0])
    second.complete_write(plans[1])
    assert second.block_table().tolist()[:2] == first.block_table().tolist()[:2]
    assert bench.manager.counters["blocks_deduplicated"] == 2
    assert [block.ref_count for block in bench.manager.allocator.blocks(np.array(duplicates))] == [0, 0]
    bench.check(first, second)


def test_a_block_shared_after_deduplication_outlives_the_one_who_published_it() -> None:
    bench = Bench()
    first, second = bench.computed(tokens_from(0, 16)), bench.computed(tokens_from(0, 16))
    first.release()
    bench.check(second, bench.occupy(14))


def test_a_shared_block_is_not_written_by_a_sharer_that_turns_back() -> None:
    bench = Bench()
    first = bench.computed(tokens_from(0, 16))
    second = bench.open(tokens_from(0, 16))
    second.adopt_prefix()
    second.truncate(12)
    second.append(tokens_from(500, 4))
    bench.compute(second)
    bench.check(first, second)


def test_a_miss_after_an_eviction_can_be_told_from_a_miss_on_new_text() -> None:
    bench = Bench(max_blocks=4)
    bench.computed(tokens_from(0, 16)).release()
    again, new, short = bench.open(tokens_from(0, 16)), bench.open(tokens_from(500, 16)), bench.open(tokens_from(0, 7))
    assert not again.next_was_evicted()
    bench.occupy(3)  # the second of the two cached blocks has to leave
    assert again.adopt_prefix() == 8
    assert again.next_was_evicted()
    assert not new.next_was_evicted()
    assert not short.next_was_evicted()


# -- prefixes that are not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "numeric_class", "exactness"])
def test_another_root_shares_nothing(part: str) -> None:
    bench = Bench()
    first = bench.computed(tokens_from(0, 16))
    other = bench.open(tokens_from(0, 16), root=replace(root_of(ALICE), **{part: "other"}))
    assert other.adopt_prefix() == 0
    bench.compute(other)
    assert not set(other.block_table().tolist()) & set(first.block_table().tolist())
    bench.check(first, other)


def test_another_tenant_shares_nothing() -> None:
    bench = Bench()
    first = bench.computed(tokens_from(0, 16), owner=ALICE)
    other = bench.open(tokens_from(0, 16), owner=BOB)
    assert other.adopt_prefix() == 0
    bench.compute(other)
    assert not set(other.block_table().tolist()) & set(first.block_table().tolist())
    assert bench.manager.counters["blocks_deduplicated"] == 0
    bench.check(first, other)


@pytest.mark.parametrize("offset", [1, 8, 16])
def test_equal_text_at_another_offset_shares_nothing(offset: int) -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 24))
    other = bench.open([*range(900, 900 + offset), *range(24)])
    assert other.adopt_prefix() == 0
    bench.compute(other)
    assert bench.manager.counters["blocks_deduplicated"] == 0
    bench.check(other)


def test_a_sequence_of_equal_blocks_does_not_share_with_itself() -> None:
    bench = Bench()
    sequence = bench.computed([7] * 32)
    assert len(set(sequence.block_table().tolist())) == 4
    bench.check(sequence)


def test_a_partial_block_is_not_shared() -> None:
    bench = Bench()
    bench.computed(tokens_from(0, 7))
    assert bench.open(tokens_from(0, 7)).adopt_prefix() == 0


# -- addresses that collide ------------------------------------------------------------------------------------------


def test_an_equal_address_with_other_tokens_is_not_taken() -> None:
    bench = Bench(hasher=ConstantHasher(KEY))
    first = bench.computed(tokens_from(0, 8))
    other = bench.open(tokens_from(500, 8))
    assert other.adopt_prefix() == 0
    assert bench.manager.index.collisions == 1
    bench.compute(other)
    bench.check(first, other)


def test_an_equal_address_and_equal_tokens_behind_another_prefix_are_not_taken() -> None:
    bench = Bench(hasher=ConstantHasher(KEY))
    first = bench.computed([7] * 8)
    other = bench.open([7] * 16)
    assert other.adopt_prefix() == 8
    bench.compute(other)
    assert len(set(other.block_table().tolist())) == 2
    bench.check(first, other)


def test_an_equal_address_and_equal_tokens_of_another_tenant_are_not_taken() -> None:
    bench = Bench(hasher=ConstantHasher(KEY))
    first = bench.computed(tokens_from(0, 8), owner=ALICE)
    other = bench.open(tokens_from(0, 8), owner=BOB)
    assert other.adopt_prefix() == 0
    bench.compute(other)
    bench.check(first, other)


def test_behind_a_block_that_could_not_be_published_nothing_is() -> None:
    bench = Bench(hasher=ConstantHasher(KEY))
    first = bench.computed(tokens_from(0, 8))
    other = bench.computed(tokens_from(500, 24))
    assert len(bench.manager.index) == 1
    child = other.fork()
    bench.check(first, other, child)


def test_many_sequences_with_colliding_addresses_all_keep_their_own_kv() -> None:
    bench = Bench(max_blocks=100, blocks_per_segment=10, hasher=WeakHasher(KEY))
    sequences = []
    for first in range(12):
        sequence = bench.open(tokens_from(first % 5, 20))
        sequence.adopt_prefix()
        bench.compute(sequence)
        sequences.append(sequence)
    assert bench.manager.index.collisions > 0
    bench.check(*sequences)
