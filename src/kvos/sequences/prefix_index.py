"""From content to block: a tree of published blocks, found by address and confirmed on token ids.

Knows addresses, tokens and block ids; knows no tensors and no reference counts. Engine thread only.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvos.policy import EvictionCandidate, EvictionPolicy
from kvos.sequences.hashing import BlockAddress
from kvos.types import BlockIds, TokenIds

__all__ = ["IndexEntry", "PrefixIndex"]

REMEMBERED_EVICTIONS = 65_536
"""Addresses of reclaimed blocks that are kept to explain later misses: 32 bytes each, a few megabytes in all."""


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
    last_used: int
    hits: int = 0
    children: int = field(default=0)


class PrefixIndex:
    """Published blocks of all roots. The blocks themselves belong to the allocator."""

    def __init__(self) -> None:
        self._entries: dict[BlockAddress, IndexEntry] = {}
        self._by_block: dict[int, IndexEntry] = {}
        self._evicted: OrderedDict[BlockAddress, None] = OrderedDict()
        self._clock = 0
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

    def touch(self, entries: Iterable[IndexEntry], *, hit: bool) -> None:
        """Note a use of ``entries`` now; ``hit`` also counts a match."""
        self._clock += 1
        for entry in entries:
            entry.last_used = self._clock
            entry.hits += hit

    def insert(
        self, root: BlockAddress, parent: IndexEntry | None, address: BlockAddress, tokens: TokenIds, block: int
    ) -> IndexEntry | None:
        """Publish ``block``; None if the address is taken by other content, in which case nothing changed."""
        if address in self._entries:
            return None
        self._clock += 1
        depth = 0 if parent is None else parent.depth + 1
        entry = IndexEntry(address, root, parent, tokens.copy(), block, depth, self._clock)
        self._entries[address] = entry
        self._evicted.pop(address, None)
        self._by_block[block] = entry
        if parent is not None:
            parent.children += 1
        return entry

    def was_evicted(self, address: BlockAddress) -> bool:
        """Whether a block with this address was here, and had to leave; only the latest evictions are remembered."""
        return address in self._evicted

    def entry_of(self, block: int) -> IndexEntry | None:
        """The entry that ``block`` is published under."""
        return self._by_block.get(block)

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """What was published in ``sources[i]`` is in ``targets[i]`` now; no target is published. Not a use."""
        moved = zip(sources.tolist(), targets.tolist(), strict=True)
        found = [(self._by_block.pop(source, None), target) for source, target in moved]
        for entry, target in found:
            if entry is not None:
                entry.block = target
                self._by_block[target] = entry

    def remove_coldest(self, n: int, policy: EvictionPolicy, removable: Callable[[int], bool]) -> list[int]:
        """Unpublish up to ``n`` blocks, leaves first, by the policy's order; returns their ids.

        ``removable`` says whether nobody holds a block. A parent becomes a leaf when its last child has left.
        """
        heap = [
            (policy.sort_key(self._candidate(entry)), entry.block)
            for entry in self._entries.values()
            if entry.children == 0 and removable(entry.block)
        ]
        heapq.heapify(heap)
        removed: list[int] = []
        while heap and len(removed) < n:
            entry = self._by_block[heapq.heappop(heap)[1]]
            self._remove_leaf(entry)
            removed.append(entry.block)
            parent = entry.parent
            if parent is not None and parent.children == 0 and removable(parent.block):
                heapq.heappush(heap, (policy.sort_key(self._candidate(parent)), parent.block))
        return removed

    def _remove_leaf(self, entry: IndexEntry) -> None:
        del self._entries[entry.address]
        del self._by_block[entry.block]
        if entry.parent is not None:
            entry.parent.children -= 1
        self._evicted[entry.address] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    @staticmethod
    def _candidate(entry: IndexEntry) -> EvictionCandidate:
        return EvictionCandidate(entry.last_used, entry.depth, entry.hits)

    def entries(self) -> Iterator[IndexEntry]:
        return iter(self._entries.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the tree is not one: wrong child counts, orphans, a block under two addresses."""
        children: dict[BlockAddress, int] = {}
        for address, entry in self._entries.items():
            assert entry.address == address
            assert self._by_block[entry.block] is entry, "a block is published twice"
            if entry.parent is not None:
                assert self._entries.get(entry.parent.address) is entry.parent, "an entry outlived its parent"
                assert entry.depth == entry.parent.depth + 1
                assert entry.root == entry.parent.root
                children[entry.parent.address] = children.get(entry.parent.address, 0) + 1
        for address, entry in self._entries.items():
            assert entry.children == children.get(address, 0), "wrong child count"
        assert len(self._by_block) == len(self._entries)
