"""Blocks for sequences: the pool, the allocator and the prefix index as one thing that can run out.

Knows which blocks can be reclaimed and who holds the others; knows no single sequence's tokens. Engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvos.counters import Counters
from kvos.errors import OutOfBlocksError
from kvos.policy import LRU, EvictionPolicy
from kvos.sequences.hashing import Hasher
from kvos.sequences.prefix_index import PrefixIndex
from kvos.storage import Allocation, BlockAllocator, BlockPool, Reservation
from kvos.types import BlockIds, OwnerId, SequenceId

__all__ = ["BlockManager"]

_logger = logging.getLogger(__name__)

RECLAIM_SHARE = 64
"""A full pool reclaims at least one in so many of its blocks at once, if as many are cached."""

SCRUB_BATCH = 64
"""Blocks overwritten per idle moment: a few milliseconds, so that a new request never waits for long."""


class BlockManager:
    """Hands out blocks: free ones, then a new segment of the pool, then reclaimed ``CACHED`` ones.

    Args:
        pool: owns the tensors; grown from here.
        hasher: makes the content addresses under which blocks are shared.
        policy: which cached block leaves first.
        counters: where allocations, reclaims and scrubs are counted.
    """

    def __init__(
        self,
        pool: BlockPool,
        hasher: Hasher,
        *,
        policy: EvictionPolicy | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.pool = pool
        self.hasher = hasher
        self.counters = Counters() if counters is None else counters
        self.allocator = BlockAllocator(pool.num_blocks)
        self.index = PrefixIndex()
        self._policy = LRU() if policy is None else policy
        self._tables: dict[SequenceId, tuple[str, Callable[[], BlockIds]]] = {}

    @property
    def block_size(self) -> int:
        return self.pool.layout.block_size

    def allocate(self, n: int, owner: OwnerId) -> BlockIds:
        """``n`` blocks held once each, with no other owner's content in them.

        Raises:
            OutOfBlocksError: with the counts and the holders; nothing was allocated.
        """
        self._make_room(n)
        return self._clean(self.allocator.allocate(n, owner))

    def reserve(self, n: int, owner: OwnerId) -> Reservation:
        """Promise ``n`` blocks to a request. Raises as ``allocate``."""
        self._make_room(n)
        return self.allocator.reserve(n, owner)

    def claim(self, reservation: Reservation, n: int) -> BlockIds:
        """``n`` blocks: from the reservation as far as it reaches, then as ``allocate``.

        If blocks cannot be scrubbed, none are held, and what came from the reservation is no longer promised.
        """
        promised = min(n, self.allocator.reserved(reservation))
        rest = self.allocate(n - promised, reservation.owner)
        if promised == 0:
            return rest
        try:
            blocks = self._clean(self.allocator.claim(reservation, promised))
        except BaseException:
            self.allocator.release(rest)
            raise
        return np.concatenate([blocks, rest])

    def cancel(self, reservation: Reservation) -> None:
        """Give back what is left of a reservation. Idempotent."""
        self.allocator.cancel(reservation)

    def scrub_some(self) -> int:
        """Overwrite a few free blocks that hold old content; returns how many. For idle moments."""
        blocks = self.allocator.dirty_free(SCRUB_BATCH)
        self._scrub(blocks)
        self.allocator.mark_scrubbed(blocks)
        return len(blocks)

    def _clean(self, allocation: Allocation) -> BlockIds:
        """The blocks of ``allocation`` without another owner's content; if that fails, they are free again."""
        try:
            self._scrub(allocation.to_scrub)
        except BaseException:
            self.allocator.give_back(allocation)
            raise
        self.counters.add("blocks_allocated", len(allocation.blocks))
        return allocation.blocks

    def _scrub(self, blocks: BlockIds) -> None:
        if len(blocks):
            self.pool.scrub(blocks)
            self.counters.add("blocks_scrubbed", len(blocks))

    # -- running out ---------------------------------------------------------------------------------------------

    def _make_room(self, n: int) -> None:
        while self.allocator.num_free < n and self._grow():
            pass
        missing = n - self.allocator.num_free
        if missing <= 0:
            return
        if missing > self.allocator.counts().cached:
            raise self._out_of_blocks(n)
        # Finding the coldest looks at every entry, so a large pool reclaims some more at once.
        wanted = max(missing, min(self.allocator.counts().cached, self.pool.max_blocks // RECLAIM_SHARE))
        removed = self.index.remove_coldest(wanted, self._policy, self.allocator.is_cached)
        self.allocator.reclaim(np.array(removed, np.int64))
        self.counters.add("blocks_reclaimed", len(removed))
        if len(removed) < missing:  # a CACHED block stays while a transfer uses one that hangs below it
            raise self._out_of_blocks(n)

    def _out_of_blocks(self, asked: int) -> OutOfBlocksError:
        counts = self.allocator.counts()
        return OutOfBlocksError(asked, counts.free, counts.cached, counts.held, self.holders())

    def _grow(self) -> bool:
        """Add a segment; False if the pool is at its limit, or the machine has no memory for one now."""
        try:
            added = self.pool.grow()
        except (RuntimeError, MemoryError) as error:
            _logger.warning("no memory for another segment of KV blocks, going on with what there is: %s", error)
            return False
        if added:
            self.allocator.grow(added)
            self.counters.add("segments_added", 1)
        return added > 0

    # -- who holds what ------------------------------------------------------------------------------------------

    def register(self, sequence: SequenceId, label: str, table: Callable[[], BlockIds]) -> None:
        """Make a sequence known as a holder; ``label`` is what an error calls it, ``table`` returns its blocks."""
        self._tables[sequence] = (label, table)

    def unregister(self, sequence: SequenceId) -> None:
        self._tables.pop(sequence, None)

    def holders(self, largest: int = 10) -> tuple[tuple[str, int], ...]:
        """``(label, blocks)``, the largest first; a shared block counts for each of its holders."""
        held: Counter[str] = Counter()
        for label, table in self._tables.values():
            held[label] += len(table())
        return tuple((label, blocks) for label, blocks in held.most_common(largest) if blocks)

    def check_invariants(self) -> None:
        """Raises AssertionError if tables, counts and index contradict each other."""
        self.allocator.check_invariants()
        self.index.check_invariants()
        assert self.allocator.num_blocks == self.pool.num_blocks, "allocator and pool differ in size"
        holders: Counter[int] = Counter()
        for _, table in self._tables.values():
            holders.update(int(block) for block in table())
        everything = self.allocator.blocks(np.arange(self.allocator.num_blocks))
        for block in everything:
            held = holders[block.id]
            assert block.ref_count == held, f"block {block.id} counts {block.ref_count} holders, {held} tables hold it"
            findable = self.index.entry_of(block.id) is not None
            assert block.published == findable, f"block {block.id}: index and flag differ"
