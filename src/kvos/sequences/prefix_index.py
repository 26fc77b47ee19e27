"""From content to block: a tree of published blocks, found by address and confirmed on token ids.

Knows addresses, tokens and block ids; knows no tensors and no reference counts. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvos.policy import EvictionOrder, EvictionPolicy, ExpectedReturn
from kvos.sequences.hashing import BlockAddress
from kvos.types import BlockIds, TokenIds

__all__ = ["IndexEntry", "PrefixIndex"]


@dataclass(slots=True, eq=False)
class IndexEntry:
    """One published block.

    ``parent`` is the entry of the block before it, or None for the first block of a root; a child keeps its parent
    in the index, so whatever is found is found from its root without a gap.
    """

    address: BlockAddress
    root: BlockAddress
    parent: IndexEntry | None
    tokens: TokenIds
    block: int
    depth: int


class PrefixIndex:
    """Published blocks of all roots. The blocks themselves belong to the allocator.

    Args:
        policy: which of them leaves first.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self._entries: dict[BlockAddress, IndexEntry] = {}
        self._by_block: dict[int, IndexEntry] = {}
        self._order = EvictionOrder(ExpectedReturn() if policy is None else policy)
        self.collisions = 0
        """Addresses that were equal while the tokens were not; each was treated as a miss."""

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(
        self, root: BlockAddress, parent: IndexEntry | None, address: BlockAddress, tokens: TokenIds
    ) -> IndexEntry | None:
        """The entry at ``address`` if it really holds ``tokens`` behind ``parent``, else None. Not a use."""
        entry = self._entries.get(address)
        if entry is None:
            return None
        if not self._confirmed(entry, root, parent, tokens):
            self.collisions += 1
            return None
        return entry

    @staticmethod
    def _confirmed(entry: IndexEntry, root: BlockAddress, parent: IndexEntry | None, tokens: TokenIds) -> bool:
        return entry.parent is parent and entry.root == root and np.array_equal(entry.tokens, tokens)

    def begin_request(self) -> None:
        """Time goes on, for the eviction policy: it is counted in requests."""
        self._order.begin_request()

    def touch(self, blocks: BlockIds, *, hit: bool) -> None:
        """Note a use now of those of ``blocks`` that are published; ``hit`` also counts a match."""
        self._order.touch(blocks, hit=hit)

    def hits(self, entries: Sequence[IndexEntry]) -> npt.NDArray[np.int64]:
        """How often each of these published entries was matched."""
        return self._order.hits(np.array([entry.block for entry in entries], np.int64))

    def insert(
        self, root: BlockAddress, parent: IndexEntry | None, address: BlockAddress, tokens: TokenIds, block: int
    ) -> IndexEntry | None:
        """Publish ``block``; None if the address is taken by other content, in which case nothing changed."""
        if address in self._entries:
            return None
        depth = 0 if parent is None else parent.depth + 1
        entry = IndexEntry(address, root, parent, tokens.copy(), block, depth)
        self._entries[address] = entry
        self._by_block[block] = entry
        self._order.insert(block, None if parent is None else parent.block, address)
        return entry

    def was_evicted(self, address: BlockAddress) -> bool:
        """Whether a block with this address was here, and had to leave; only the latest evictions are remembered."""
        return self._order.was_evicted(address)

    def entry_of(self, block: int) -> IndexEntry | None:
        """The entry that ``block`` is published under."""
        return self._by_block.get(block)

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """What was published in ``sources[i]`` is in ``targets[i]`` now; no target is published. Not a use."""
        self._order.move(sources, targets)
        moved = zip(sources.tolist(), targets.tolist(), strict=True)
        found = [(self._by_block.pop(source, None), target) for source, target in moved]
        for entry, target in found:
            if entry is not None:
                entry.block = target
                self._by_block[target] = entry

    def remove_coldest(self, n: int, removable: npt.NDArray[np.bool_]) -> list[int]:
        """Unpublish up to ``n`` blocks, leaves first, by the policy's order; returns their ids.

        ``removable`` says of each block whether nobody holds it. A parent becomes a leaf when its last child has left.
        """
        removed = self._order.remove_coldest(n, removable)
        for block in removed:
            del self._entries[self._by_block.pop(block).address]
        return removed

    def entries(self) -> Iterator[IndexEntry]:
        return iter(self._entries.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the tree is not one: wrong child counts, orphans, a block under two addresses."""
        self._order.check_invariants()
        for address, entry in self._entries.items():
            assert entry.address == address
            assert self._by_block[entry.block] is entry, "a block is published twice"
            if entry.parent is not None:
                assert self._entries.get(entry.parent.address) is entry.parent, "an entry outlived its parent"
                assert entry.depth == entry.parent.depth + 1
                assert entry.root == entry.parent.root
        assert len(self._by_block) == len(self._entries)
        found = {
            block: (e.address, None if e.parent is None else e.parent.block) for block, e in self._by_block.items()
        }
        assert self._order.forest() == found, "the index and what is known of uses differ"
