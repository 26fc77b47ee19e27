"""Which blocks are free, who holds the others: bookkeeping over integers, no tensors.

::

                 allocate                release, published
       FREE -----------------> ACTIVE ---------------------> CACHED
      |    ^                  ^  |   ^                        |  |
      |    |                  |  |   +------- retain ---------+  |
      |    +------------------|--+                               |
      |    |  release, not    |                                  |
      |    |  published       | claim                            |
      |    +------------------|---------------- reclaim ---------+
      v reserve               |
     RESERVED ----------------+          cancel: RESERVED to FREE

Every call checks its whole batch first and changes nothing if it raises. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvos.errors import (
    AllocateNonFreeBlockError,
    BlockStateError,
    DoubleReleaseError,
    InvalidInputError,
    OutOfBlocksError,
    ReleaseFreeBlockError,
    SharedBlockWriteError,
    UseAfterFreeError,
)
from kvos.storage.block import BlockStatus, CacheBlock
from kvos.storage.free_queue import FreeQueue
from kvos.types import BlockId, BlockIds, OwnerId

__all__ = ["Allocation", "BlockAllocator", "BlockCounts", "Reservation", "runs_of"]

_FREE, _ACTIVE, _CACHED, _RESERVED = (int(status) for status in BlockStatus)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks handed out, each with a reference count of one.

    ``to_scrub`` names those that still hold another owner's content: the caller overwrites them before it uses them.
    """

    blocks: BlockIds
    to_scrub: BlockIds


@dataclass(frozen=True, slots=True)
class Reservation:
    """A promise of blocks; redeem with ``claim``, give back with ``cancel``."""

    id: int
    owner: OwnerId


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by status; they add up to the pool."""

    free: int
    active: int
    cached: int
    reserved: int

    @property
    def total(self) -> int:
        return self.free + self.active + self.cached + self.reserved

    @property
    def held(self) -> int:
        """Blocks that watermarks count: ``ACTIVE + RESERVED``."""
        return self.active + self.reserved


NOBODY = OwnerId(0)
"""The owner of blocks that were never handed out; no tenant has this number."""


def runs_of(blocks: BlockIds, blocks_per_segment: int | None = None) -> tuple[npt.NDArray[np.int64], BlockIds]:
    """Maximal runs ``b, b + 1, ...`` in ``blocks``, in order: index of each one's first block, and its length.

    With ``blocks_per_segment`` a run ends where its segment does.
    """
    if len(blocks) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.diff(blocks) != 1
    if blocks_per_segment is not None:
        ends |= np.diff(blocks // blocks_per_segment) != 0
    firsts = np.concatenate([[0], np.flatnonzero(ends) + 1]).astype(np.int64)
    return firsts, np.diff(firsts, append=len(blocks))


def _check_count(n: int) -> None:
    if n < 0:
        raise InvalidInputError(f"asked for {n} blocks; a count cannot be negative")


class BlockAllocator:
    """Free queue, reference counts and states of ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._status = np.zeros(0, np.uint8)
        self._ref_count = np.zeros(0, np.int32)
        self._busy = np.zeros(0, np.int32)
        self._filled = np.zeros(0, np.int32)
        self._published = np.zeros(0, np.bool_)
        self._owner = np.zeros(0, np.int64)
        self._dirty = np.zeros(0, np.bool_)
        self._free = FreeQueue()
        self._reservations: dict[int, BlockIds] = {}
        self._reservation_ids = count(1)
        self.grow(num_blocks)

    # -- size ----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._status)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, blocks: int) -> None:
        """Add ``blocks`` free blocks behind the last id."""
        first = self.num_blocks
        for name in ("_status", "_ref_count", "_busy", "_filled", "_published", "_owner", "_dirty"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(blocks, old.dtype)]))
        self._free.push(np.arange(first, first + blocks, dtype=np.int64))

    def counts(self) -> BlockCounts:
        by_status = np.bincount(self._status, minlength=len(BlockStatus))
        return BlockCounts(*(int(by_status[s]) for s in (_FREE, _ACTIVE, _CACHED, _RESERVED)))

    def blocks(self, ids: BlockIds) -> tuple[CacheBlock, ...]:
        """Snapshots of ``ids``, in their order."""
        return tuple(
            CacheBlock(
                BlockId(int(b)),
                BlockStatus(int(self._status[b])),
                int(self._ref_count[b]),
                int(self._busy[b]),
                int(self._filled[b]),
                bool(self._published[b]),
                OwnerId(int(self._owner[b])),
            )
            for b in ids
        )

    # -- taking and giving back ----------------------------------------------------------------------------------

    def allocate(self, n: int, owner: OwnerId) -> Allocation:
        """Take ``n`` blocks from the free queue for ``owner``; reference count 1 each.

        Raises:
            InvalidInputError: ``n`` is negative.
            OutOfBlocksError: fewer than ``n`` are free.
            AllocateNonFreeBlockError: the free queue holds a block that is not ``FREE``.
        """
        return self._activate(self._take_free(n), owner)

    def give_back(self, allocation: Allocation) -> None:
        """Undo an allocation whose blocks could not be scrubbed: they are nobody's, so whoever is next scrubs first."""
        self.release(allocation.blocks)
        self._owner[allocation.to_scrub] = NOBODY

    def reserve(self, n: int, owner: OwnerId) -> Reservation:
        """Promise ``n`` free blocks to a request. Raises as ``allocate``."""
        reservation = Reservation(next(self._reservation_ids), owner)
        blocks = self._take_free(n)
        self._status[blocks] = _RESERVED
        self._reservations[reservation.id] = blocks
        return reservation

    def reserved(self, reservation: Reservation) -> int:
        """Blocks that ``reservation`` still holds."""
        return len(self._reservations.get(reservation.id, ()))

    def claim(self, reservation: Reservation, n: int) -> Allocation:
        """Turn ``n`` reserved blocks into held ones.

        Raises:
            InvalidInputError: ``n`` is negative.
            BlockStateError: the reservation holds fewer than ``n`` blocks.
        """
        _check_count(n)
        blocks = self._reservations.get(reservation.id)
        if blocks is None or len(blocks) < n:
            left = 0 if blocks is None else len(blocks)
            raise BlockStateError(f"reservation {reservation.id} holds {left} blocks, {n} were claimed")
        self._reservations[reservation.id] = blocks[n:]
        return self._activate(blocks[:n], reservation.owner)

    def cancel(self, reservation: Reservation) -> None:
        """Give back what is left of a reservation. Idempotent."""
        blocks = self._reservations.pop(reservation.id, None)
        if blocks is not None:
            self._to_free(blocks)

    def retain(self, ids: BlockIds) -> None:
        """One more holder for each of ``ids``; ``CACHED`` blocks become ``ACTIVE``.

        Raises:
            UseAfterFreeError: a block is free or only reserved.
        """
        self.check_readable(ids)
        np.add.at(self._ref_count, ids, 1)
        self._status[ids] = _ACTIVE

    def release(self, ids: BlockIds) -> None:
        """One holder less for each of ``ids``. The last one leaves the block ``CACHED`` if published, else ``FREE``.

        Raises:
            ReleaseFreeBlockError: a block is in the free queue.
            DoubleReleaseError: a block would be released more often than it is held.
        """
        if len(ids) == 0:
            return
        free = ids[self._status[ids] == _FREE]
        if len(free):
            raise ReleaseFreeBlockError(f"blocks {free.tolist()} are free already; each is released once per holder")
        unique, times = np.unique(ids, return_counts=True)
        over = unique[self._ref_count[unique] < times]
        if len(over):
            raise DoubleReleaseError(f"blocks {over.tolist()} are released more often than they are held")
        self._ref_count[unique] -= times.astype(np.int32)
        self._settle(ids)

    def begin_use(self, ids: BlockIds) -> None:
        """A transfer or a step uses ``ids`` now; they stay ``ACTIVE`` until ``end_use``."""
        self.check_readable(ids)
        np.add.at(self._busy, ids, 1)
        self._status[ids] = _ACTIVE

    def end_use(self, ids: BlockIds) -> None:
        """The pair of ``begin_use``.

        Raises:
            DoubleReleaseError: ended more often than begun.
        """
        unique, times = np.unique(ids, return_counts=True)
        over = unique[self._busy[unique] < times]
        if len(over):
            raise DoubleReleaseError(f"use of blocks {over.tolist()} ended more often than it began")
        self._busy[unique] -= times.astype(np.int32)
        self._settle(ids)

    # -- content -------------------------------------------------------------------------------------------------

    def set_filled(self, ids: BlockIds, slots: npt.ArrayLike) -> None:
        """Record how many slots of each block hold tokens."""
        self._filled[ids] = slots

    def publish(self, ids: BlockIds) -> None:
        """Mark held blocks as findable by content: they are not written again, and released to ``CACHED``."""
        self.check_readable(ids)
        self._published[ids] = True

    def reclaim(self, ids: BlockIds) -> None:
        """Turn ``CACHED`` blocks into ``FREE`` ones; their entries must be gone from every index.

        Raises:
            BlockStateError: a block is not ``CACHED``.
        """
        wrong = ids[self._status[ids] != _CACHED]
        if len(wrong):
            raise BlockStateError(f"blocks {wrong.tolist()} are not CACHED and cannot be reclaimed")
        self._published[ids] = False
        self._to_free(ids)

    def check_readable(self, ids: BlockIds) -> None:
        """Raises UseAfterFreeError if a block holds nothing that may be read."""
        status = self._status[ids]
        gone = ids[(status == _FREE) | (status == _RESERVED)]
        if len(gone):
            raise UseAfterFreeError(f"blocks {gone.tolist()} are not held by anybody")

    def writable(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Per block: exactly one table holds it, nothing reads it, and it is not published."""
        alone: npt.NDArray[np.bool_] = (self._ref_count[ids] == 1) & (self._busy[ids] == 0) & ~self._published[ids]
        return alone

    def check_writable(self, ids: BlockIds) -> None:
        """Raises UseAfterFreeError or SharedBlockWriteError if a block may not be written."""
        if self.writable(ids).all():
            return
        self.check_readable(ids)
        shared = ids[~self.writable(ids)]
        raise SharedBlockWriteError(f"blocks {shared.tolist()} are shared, busy or published; copy before writing")

    def cached(self) -> npt.NDArray[np.bool_]:
        """By block, whether it is ``CACHED``."""
        cached: npt.NDArray[np.bool_] = self._status == _CACHED
        return cached

    # -- moving --------------------------------------------------------------------------------------------------

    def free_spans(self, blocks_per_segment: int | None = None) -> tuple[BlockIds, npt.NDArray[np.int64]]:
        """Runs of ``FREE`` blocks by id: the first block of each, and its length. O(pool)."""
        free = np.flatnonzero(self._status == _FREE)
        firsts, lengths = runs_of(free, blocks_per_segment)
        return free[firsts], lengths

    def free_runs(self) -> npt.NDArray[np.int64]:
        """Lengths of the runs of ``FREE`` blocks, by id: how scattered the free room is."""
        return self.free_spans()[1]

    def find_free_run(self, n: int, blocks_per_segment: int | None = None) -> BlockId | None:
        """First block of the tightest run of at least ``n`` ``FREE`` blocks, inside one segment if they have a size.

        Raises:
            InvalidInputError: ``n`` is less than 1.
        """
        if n < 1:
            raise InvalidInputError(f"a run has at least one block, not {n}")
        starts, lengths = self.free_spans(blocks_per_segment)
        fits = np.flatnonzero(lengths >= n)
        return BlockId(int(starts[fits[np.argmin(lengths[fits])]])) if len(fits) else None

    def any_busy(self, ids: BlockIds) -> bool:
        """Whether a transfer or a step uses one of ``ids``."""
        return bool((self._busy[ids] > 0).any())

    def check_movable(self, sources: BlockIds, targets: BlockIds) -> None:
        """Raises as ``move`` does; changes nothing."""
        everything = np.concatenate([sources, targets])
        if len(sources) != len(targets) or len(np.unique(everything)) != len(everything):
            raise InvalidInputError("a move needs one target per source, and names every block once")
        self.check_readable(sources)
        busy = sources[self._busy[sources] > 0]
        if len(busy):
            raise BlockStateError(f"blocks {busy.tolist()} are in use by a transfer or a step and cannot be moved")
        taken = targets[self._status[targets] != _FREE]
        if len(taken):
            raise AllocateNonFreeBlockError(f"blocks {taken.tolist()} are not FREE; nothing can be moved there")

    def move(self, sources: BlockIds, targets: BlockIds) -> None:
        """``targets[i]`` takes over all that is known of ``sources[i]``, which becomes ``FREE`` with old content.

        The caller copied the whole blocks, and re-points whatever names the sources.

        Raises:
            InvalidInputError: not one target per source, or a block is named twice.
            UseAfterFreeError: a source is free or only reserved.
            BlockStateError: a source is busy.
            AllocateNonFreeBlockError: a target is not ``FREE``.
        """
        self.check_movable(sources, targets)
        self._free.remove(targets)
        for state in (self._status, self._ref_count, self._filled, self._published, self._owner, self._dirty):
            state[targets] = state[sources]
        self._ref_count[sources] = 0
        self._published[sources] = False
        self._to_free(sources)

    def spoil(self, ids: BlockIds) -> None:
        """Free blocks ``ids`` hold anybody's content now: whoever takes them next scrubs them first."""
        self._owner[ids] = NOBODY
        self._dirty[ids] = True

    # -- scrubbing -----------------------------------------------------------------------------------------------

    def dirty_free(self, limit: int) -> BlockIds:
        """Up to ``limit`` free blocks that still hold somebody's content."""
        return np.flatnonzero(self._dirty & (self._status == _FREE))[:limit]

    def mark_scrubbed(self, ids: BlockIds) -> None:
        """The content of free blocks ``ids`` was overwritten."""
        self._dirty[ids] = False

    # -- inside --------------------------------------------------------------------------------------------------

    def _take_free(self, n: int) -> BlockIds:
        _check_count(n)
        if n > len(self._free):
            counts = self.counts()
            raise OutOfBlocksError(n, counts.free, counts.cached, counts.held)
        blocks = self._free.peek(n)
        wrong = blocks[self._status[blocks] != _FREE]
        if len(wrong):
            raise AllocateNonFreeBlockError(f"blocks {wrong.tolist()} are in the free queue but not FREE")
        self._free.drop(n)
        return blocks

    def _activate(self, blocks: BlockIds, owner: OwnerId) -> Allocation:
        to_scrub = blocks[self._dirty[blocks] & (self._owner[blocks] != owner)]
        self._status[blocks] = _ACTIVE
        self._ref_count[blocks] = 1
        self._filled[blocks] = 0
        self._owner[blocks] = owner
        self._dirty[blocks] = True
        return Allocation(blocks, to_scrub)

    def _settle(self, ids: BlockIds) -> None:
        """Give blocks without holder and without use the status that their content deserves."""
        unheld = ids[(self._ref_count[ids] == 0) & (self._busy[ids] == 0)]
        if len(unheld) == 0:
            return
        published = self._published[unheld]
        self._status[unheld[published]] = _CACHED
        self._to_free(unheld[~published])

    def _to_free(self, ids: BlockIds) -> None:
        # Each once, and in order, so that blocks which were neighbours in a table come back as neighbours.
        _, first = np.unique(ids, return_index=True)
        ids = ids[np.sort(first)]
        self._status[ids] = _FREE
        self._filled[ids] = 0
        self._free.push(ids)

    def check_invariants(self) -> None:
        """Raises AssertionError if the four states do not partition the pool or a count contradicts its state."""
        free = self._free.to_array()
        assert len(np.unique(free)) == len(free), "a block is in the free queue twice"
        assert set(free.tolist()) == set(np.flatnonzero(self._status == _FREE).tolist()), "free queue and status differ"
        reserved = [int(b) for blocks in self._reservations.values() for b in blocks]
        assert len(set(reserved)) == len(reserved), "a block is reserved twice"
        promised = np.flatnonzero(self._status == _RESERVED).tolist()
        assert set(reserved) == set(promised), "reservations and status differ"
        assert (self._ref_count >= 0).all(), "negative reference count"
        assert (self._busy >= 0).all(), "negative use count"
        used = (self._ref_count > 0) | (self._busy > 0)
        assert (used == (self._status == _ACTIVE)).all(), "ACTIVE must mean held or busy"
        assert (self._published | (self._status != _CACHED)).all(), "a CACHED block nobody can find"
        unwritten = (self._status == _FREE) | (self._status == _RESERVED)
        assert not (self._published & unwritten).any(), "a free or reserved block is still findable"
        assert (self._filled[unwritten] == 0).all(), "a free or reserved block has filled slots"
        assert self.counts().total == self.num_blocks
