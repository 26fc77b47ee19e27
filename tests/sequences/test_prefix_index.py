"""The tree of published blocks: found by address, confirmed on tokens, removed from its leaves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvos.policy import LRU, Candidates, EvictionPolicy
from kvos.sequences import BlockAddress, IndexEntry, PrefixIndex
from kvos.types import BlockIds, TokenIds

ROOT, OTHER_ROOT = BlockAddress(b"root"), BlockAddress(b"other root")
A, B, C = (BlockAddress(letter) for letter in (b"a", b"b", b"c"))


def toks(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def insert(
    index: PrefixIndex, block: int, parent: IndexEntry | None = None, *, root: BlockAddress = ROOT
) -> IndexEntry:
    """Block ``block`` with token ``block``, under an address made of the block's number."""
    entry = index.insert(root, parent, BlockAddress(bytes([block])), toks(block), block)
    assert entry is not None
    return entry


def find(index: PrefixIndex, entry: IndexEntry) -> IndexEntry | None:
    return index.lookup(entry.root, entry.parent, entry.address, entry.tokens)


EVERYTHING = np.ones(256, np.bool_)


def blocks_of(*entries: IndexEntry) -> BlockIds:
    return np.array([entry.block for entry in entries])


# -- finding ---------------------------------------------------------------------------------------------------------


def test_an_entry_is_found_by_address_with_equal_tokens_parent_and_root() -> None:
    index = PrefixIndex()
    first = insert(index, 1)
    second = insert(index, 2, first)
    assert index.lookup(ROOT, None, first.address, toks(1)) is first
    assert index.lookup(ROOT, first, second.address, toks(2)) is second
    assert index.collisions == 0


def test_an_unknown_address_is_a_miss_and_no_collision() -> None:
    index = PrefixIndex()
    assert index.lookup(ROOT, None, A, toks(1)) is None
    assert index.collisions == 0


@pytest.mark.parametrize("tokens", [toks(1, 3), toks(1), toks(1, 2, 3), toks(2, 1)])
def test_an_equal_address_with_other_tokens_is_a_miss_and_counted(tokens: TokenIds) -> None:
    index = PrefixIndex()
    index.insert(ROOT, None, A, toks(1, 2), 0)
    assert index.lookup(ROOT, None, A, tokens) is None
    assert index.collisions == 1


def test_an_equal_address_behind_another_parent_is_a_miss_and_counted() -> None:
    index = PrefixIndex()
    first, other = insert(index, 1), insert(index, 2)
    index.insert(ROOT, first, A, toks(7), 5)
    assert index.lookup(ROOT, other, A, toks(7)) is None
    assert index.lookup(ROOT, None, A, toks(7)) is None
    assert index.collisions == 2


def test_an_equal_address_behind_another_root_is_a_miss_and_counted() -> None:
    index = PrefixIndex()
    index.insert(ROOT, None, A, toks(7), 5)
    assert index.lookup(OTHER_ROOT, None, A, toks(7)) is None
    assert index.collisions == 1


def test_the_index_keeps_its_own_copy_of_the_tokens() -> None:
    index = PrefixIndex()
    tokens = toks(1, 2)
    index.insert(ROOT, None, A, tokens, 0)
    tokens[0] = 9
    assert index.lookup(ROOT, None, A, toks(1, 2)) is not None


def test_a_block_leads_to_its_entry() -> None:
    index = PrefixIndex()
    entry = insert(index, 4)
    assert index.entry_of(4) is entry
    assert index.entry_of(5) is None


def test_depth_counts_the_blocks_before() -> None:
    index = PrefixIndex()
    first = insert(index, 1)
    second = insert(index, 2, first)
    assert (first.depth, second.depth, insert(index, 3, second).depth) == (0, 1, 2)


# -- publishing ------------------------------------------------------------------------------------------------------


def test_a_taken_address_refuses_a_second_block_and_nothing_changes() -> None:
    index = PrefixIndex()
    first = insert(index, 1)
    kept = index.insert(ROOT, first, A, toks(7), 5)
    assert index.insert(ROOT, first, A, toks(8), 6) is None
    assert (len(index), index.entry_of(6)) == (2, None)
    assert index.lookup(ROOT, first, A, toks(7)) is kept
    index.check_invariants()


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_leaves_leave_before_their_parents_however_old_the_parents_are() -> None:
    index = PrefixIndex(LRU())
    first = insert(index, 1)
    second = insert(index, 2, first)
    third = insert(index, 3, second)
    index.touch(blocks_of(third), hit=True)
    assert index.remove_coldest(2, EVERYTHING) == [3, 2]
    assert find(index, first) is first
    index.check_invariants()


def test_the_leaf_that_was_used_longest_ago_leaves_first() -> None:
    index = PrefixIndex(LRU())
    entries = [insert(index, block) for block in (1, 2, 3)]
    index.touch(blocks_of(entries[0]), hit=True)
    assert index.remove_coldest(3, EVERYTHING) == [2, 3, 1]


def test_a_parent_waits_for_its_last_child() -> None:
    index = PrefixIndex(LRU())
    parent = insert(index, 1)
    children = [insert(index, 2, parent), insert(index, 3, parent)]
    index.touch(blocks_of(parent), hit=True)
    other = insert(index, 4)
    index.touch(blocks_of(children[1], other), hit=True)
    assert index.remove_coldest(10, EVERYTHING) == [2, 3, 1, 4]


def test_a_block_that_somebody_holds_stays_and_so_do_its_ancestors() -> None:
    index = PrefixIndex(LRU())
    first = insert(index, 1)
    second = insert(index, 2, first)
    insert(index, 3, second)
    assert index.remove_coldest(3, np.arange(256) != 2) == [3]
    assert find(index, first) is first
    assert find(index, second) is second


def test_a_removed_entry_is_no_longer_found() -> None:
    index = PrefixIndex(LRU())
    entry = insert(index, 1)
    index.remove_coldest(1, EVERYTHING)
    assert find(index, entry) is None
    assert index.entry_of(1) is None
    assert len(index) == 0


def test_an_entry_that_had_to_leave_is_remembered_until_it_comes_back() -> None:
    index = PrefixIndex(LRU())
    entry = insert(index, 1)
    assert not index.was_evicted(entry.address)
    index.remove_coldest(1, EVERYTHING)
    assert index.was_evicted(entry.address)
    insert(index, 1)
    assert not index.was_evicted(entry.address)


def test_asking_for_more_than_there_is_removes_all() -> None:
    index = PrefixIndex(LRU())
    insert(index, 2, insert(index, 1))
    assert index.remove_coldest(9, EVERYTHING) == [2, 1]
    assert index.remove_coldest(1, EVERYTHING) == []


def test_the_policy_decides_the_order_among_leaves() -> None:
    class MostHitsFirst(EvictionPolicy):
        def sort_keys(self, candidates: Candidates) -> npt.NDArray[np.float64]:
            return -candidates.hits.astype(np.float64)

    index = PrefixIndex(MostHitsFirst())
    entries = [insert(index, block) for block in (1, 2, 3)]
    index.touch(blocks_of(entries[1]), hit=True)
    index.touch(blocks_of(entries[1]), hit=True)
    index.touch(blocks_of(entries[2]), hit=True)
    assert index.remove_coldest(2, EVERYTHING) == [2, 3]


def test_only_a_match_counts_as_a_hit() -> None:
    index = PrefixIndex(LRU())
    entry = insert(index, 1)
    index.touch(blocks_of(entry), hit=False)
    index.touch(blocks_of(entry), hit=True)
    assert index.hits([entry]).tolist() == [1]


def test_looking_is_no_use() -> None:
    index = PrefixIndex(LRU())
    older, newer = insert(index, 1), insert(index, 2)
    assert find(index, older) is older
    assert index.remove_coldest(2, EVERYTHING) == [older.block, newer.block]


# -- contradictions are found ----------------------------------------------------------------------------------------


def test_check_invariants_finds_an_orphan() -> None:
    index = PrefixIndex()
    parent = insert(index, 1)
    insert(index, 2, parent)
    del index._entries[parent.address], index._by_block[1]
    with pytest.raises(AssertionError, match="outlived its parent"):
        index.check_invariants()


def test_check_invariants_finds_a_block_that_could_never_leave() -> None:
    index = PrefixIndex()
    insert(index, 1)
    index._order.remove_coldest(1, EVERYTHING)
    with pytest.raises(AssertionError, match="differ"):
        index.check_invariants()


def test_check_invariants_finds_a_block_under_two_addresses() -> None:
    index = PrefixIndex()
    index.insert(ROOT, None, B, toks(1), 5)
    index.insert(ROOT, None, C, toks(2), 5)
    with pytest.raises(AssertionError, match="published twice"):
        index.check_invariants()
