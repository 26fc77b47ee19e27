"""Blocks for sequences: the pool, the allocator and the prefix index as one thing that can run out.

Knows which blocks can be reclaimed and who holds the others; knows no single sequence's tokens. Engine thread only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvos.counters import Counters
from kvos.errors import BlockStateError, OutOfBlocksError
from kvos.policy import EvictionPolicy
from kvos.sequences.hashing import Hasher
from kvos.sequences.prefix_index import PrefixIndex
from kvos.storage import Allocation, BlockAllocator, BlockPool, Reservation
from kvos.storage.allocator import runs_of
from kvos.types import BlockIds, OwnerId, SequenceId

__all__ = ["BlockManager", "Holder"]

_logger = logging.getLogger(__name__)

SCRUB_BATCH = 64
"""Blocks overwritten per idle moment: a few milliseconds, so that a new request never waits for long."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence, as far as its blocks go.

    Attributes:
        id: whose blocks they are.
        label: what an error calls it.
        table: its blocks, in order; a window that the next change ends.
        moved: told ``where``, an array over all blocks: block ``b`` is at ``where[b]`` now.
        pinned: whether a step uses the table now, so that no block in it may be moved.
    """

    id: SequenceId
    label: str
    table: Callable[[], BlockIds]
    moved: Callable[[BlockIds], None]
    pinned: Callable[[], bool]


class BlockManager:
    """Hands out blocks: free ones, then a new segment of the pool, then reclaimed ``CACHED`` ones.

    Args:
        pool: owns the tensors; grown from here.
        hasher: makes the content addresses under which blocks are shared.
        policy: which cached block leaves first; the default one if None.
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
        self.index = PrefixIndex(policy)
        self._holders: dict[SequenceId, Holder] = {}
        self.relief: Callable[[int], None] = lambda _: None
        """Called when ``n`` blocks can't be had; gives back what somebody holds without using it, if it can."""

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

    @property
    def num_available(self) -> int:
        """Blocks that could be had without anybody giving up what it holds."""
        counts = self.allocator.counts()
        return counts.free + counts.cached + self.pool.max_blocks - counts.total

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
            self.relief(n)
            missing = n - self.allocator.num_free
            if missing > self.allocator.counts().cached:
                raise self._out_of_blocks(n)
            if missing <= 0:
                return
        removed = self.index.remove_coldest(missing, self.allocator.cached())
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

    # -- moving --------------------------------------------------------------------------------------------------

    def num_runs(self, table: BlockIds) -> int:
        """Pieces of neighbouring blocks that ``table`` consists of; a run ends where its segment does."""
        return len(runs_of(table, self.pool.blocks_per_segment)[0])

    def movable(self, blocks: BlockIds) -> bool:
        """Whether no transfer and no step uses any of ``blocks``."""
        return not self.allocator.any_busy(blocks) and len(self._pinned(blocks)) == 0

    def _pinned(self, blocks: BlockIds) -> BlockIds:
        pinned = [holder.table() for holder in self._holders.values() if holder.pinned()]
        return blocks[np.isin(blocks, np.concatenate(pinned))] if pinned else blocks[:0]

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """Move content and state of held or cached blocks to free ones, for all holders and for the index at once.

        Nothing but content of free blocks has changed if it raises.

        Raises:
            BlockStateError: a source is busy, or a sequence that holds it has an open write.
            InvalidInputError, UseAfterFreeError, AllocateNonFreeBlockError: as ``BlockAllocator.move``.
        """
        self.allocator.check_movable(sources, targets)
        pinned = self._pinned(sources)
        if len(pinned):
            raise BlockStateError(f"blocks {pinned.tolist()} are in the table of an open write and cannot be moved")
        try:
            self.pool.copy_blocks(sources, targets)
        except BaseException:
            self.allocator.spoil(targets)
            raise
        self.allocator.move(sources, targets)
        self.index.move(sources, targets)
        where = np.arange(self.allocator.num_blocks, dtype=np.int64)
        where[sources] = targets
        for holder in self._holders.values():
            holder.moved(where)

    def compact(self, sequence: SequenceId) -> int:
        """Move the blocks of a sequence next to each other, as far as free room allows; returns how many moved.

        0, and nothing changed, if that would not leave fewer runs. Never grows the pool, never reclaims.

        Raises:
            BlockStateError, torch.OutOfMemoryError: as ``move``.
        """
        table = self._holders[sequence].table().copy()
        wanted = self._neighbours(table)
        if self.num_runs(wanted) >= self.num_runs(table):
            return 0
        moving = wanted != table
        self.move(table[moving], wanted[moving])
        moved = int(moving.sum())
        self.counters.add("compactions")
        self.counters.add("blocks_compacted", moved)
        return moved

    def _neighbours(self, table: BlockIds) -> BlockIds:
        """Where the blocks of ``table`` would be in fewer runs: free places, or their own where a run is long enough.

        One free run for all that is left if there is one, the tightest; else the longest, and again for the rest.
        """
        per_segment = self.pool.blocks_per_segment
        starts, lengths = self.allocator.free_spans(per_segment)
        firsts, own = runs_of(table, per_segment)
        wanted = table.copy()
        at = 0
        while at < len(table):
            run = int(np.searchsorted(firsts, at, side="right")) - 1
            here = int(firsts[run] + own[run]) - at
            left = min(len(table) - at, per_segment)
            fits = np.flatnonzero(lengths >= left)
            best = int(fits[np.argmin(lengths[fits])]) if len(fits) else int(np.argmax(lengths)) if len(lengths) else -1
            there = min(left, int(lengths[best])) if best >= 0 else 0
            if here >= there:
                at += here
                continue
            wanted[at : at + there] = np.arange(starts[best], starts[best] + there)
            starts[best] += there
            lengths[best] -= there
            at += there
        return wanted

    # -- who holds what ------------------------------------------------------------------------------------------

    def register(self, holder: Holder) -> None:
        """Make a sequence known as a holder of blocks."""
        self._holders[holder.id] = holder

    def unregister(self, sequence: SequenceId) -> None:
        self._holders.pop(sequence, None)

    def tables(self) -> Iterator[tuple[SequenceId, BlockIds]]:
        """The block table of every holder, read-only and good until the next change."""
        return ((holder.id, holder.table()) for holder in self._holders.values())

    def holders(self, largest: int = 10) -> tuple[tuple[str, int], ...]:
        """``(label, blocks)``, the largest first; a shared block counts for each of its holders."""
        held: Counter[str] = Counter()
        for holder in self._holders.values():
            held[holder.label] += len(holder.table())
        return tuple((label, blocks) for label, blocks in held.most_common(largest) if blocks)

    def check_invariants(self) -> None:
        """Raises AssertionError if tables, counts and index contradict each other."""
        self.allocator.check_invariants()
        self.index.check_invariants()
        assert self.allocator.num_blocks == self.pool.num_blocks, "allocator and pool differ in size"
        holders: Counter[int] = Counter()
        for holder in self._holders.values():
            holders.update(int(block) for block in holder.table())
        everything = self.allocator.blocks(np.arange(self.allocator.num_blocks))
        for block in everything:
            held = holders[block.id]
            assert block.ref_count == held, f"block {block.id} counts {block.ref_count} holders, {held} tables hold it"
            findable = self.index.entry_of(block.id) is not None
            assert block.published == findable, f"block {block.id}: index and flag differ"
