"""The allocator against a naive model of it: lists and dictionaries, one block at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvos.errors import (
    BlockStateError,
    DoubleReleaseError,
    KvosError,
    OutOfBlocksError,
    ReleaseFreeBlockError,
    SharedBlockWriteError,
    UseAfterFreeError,
)
from kvos.storage import BlockAllocator, BlockStatus, Reservation
from kvos.types import OwnerId
from storage.allocator_state import full_state, ids

FREE, ACTIVE, CACHED, RESERVED = BlockStatus
MOST_BLOCKS = 24

picks = st.lists(st.integers(0, MOST_BLOCKS - 1), max_size=5)
owners = st.sampled_from([OwnerId(1), OwnerId(2)])
counts = st.integers(0, 6)


@dataclass
class Block:
    """What the model knows of a block; its status follows from the rest."""

    holders: int = 0
    uses: int = 0
    published: bool = False
    filled: int = 0
    content_of: OwnerId | None = None
    promised: bool = False

    @property
    def status(self) -> BlockStatus:
        if self.promised:
            return RESERVED
        if self.holders or self.uses:
            return ACTIVE
        return CACHED if self.published else FREE


@dataclass
class Model:
    blocks: list[Block] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    promises: dict[Reservation, list[int]] = field(default_factory=dict)

    def with_status(self, *wanted: BlockStatus) -> list[int]:
        return [i for i, block in enumerate(self.blocks) if block.status in wanted]

    def give(self, block: int, owner: OwnerId) -> bool:
        """Hand out a block; returns whether it has to be scrubbed first."""
        old = self.blocks[block].content_of
        self.blocks[block] = Block(holders=1, content_of=owner)
        return old is not None and old != owner

    def settle(self, block: int) -> None:
        if self.blocks[block].status is FREE and block not in self.free:
            self.blocks[block].filled = 0
            self.free.append(block)


class AllocatorMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(3)
        self.model = Model([Block() for _ in range(3)], [0, 1, 2])

    def expect(self, error: type[KvosError] | None) -> pytest.RaisesExc[KvosError]:
        assert error is not None
        return pytest.raises(error, check=lambda raised: type(raised) is error)

    def choose(self, numbers: list[int], *wanted: BlockStatus) -> list[int]:
        """Block ids from drawn numbers, among those with a wanted status (all of them if none has it)."""
        among = self.model.with_status(*wanted) or list(range(len(self.model.blocks)))
        return [among[number % len(among)] for number in numbers]

    # -- taking ------------------------------------------------------------------------------------------------------

    @rule(blocks=st.integers(0, 6))
    def grow(self, blocks: int) -> None:
        first = len(self.model.blocks)
        blocks = min(blocks, MOST_BLOCKS - first)
        self.allocator.grow(blocks)
        self.model.blocks += [Block() for _ in range(blocks)]
        self.model.free += range(first, first + blocks)

    @rule(n=counts, owner=owners)
    def allocate(self, n: int, owner: OwnerId) -> None:
        if n > len(self.model.free):
            with self.expect(OutOfBlocksError):
                self.allocator.allocate(n, owner)
            return
        allocation = self.allocator.allocate(n, owner)
        taken, self.model.free = self.model.free[:n], self.model.free[n:]
        assert allocation.blocks.tolist() == taken
        assert allocation.to_scrub.tolist() == [block for block in taken if self.model.give(block, owner)]

    @rule(target=reservations, n=counts, owner=owners)
    def reserve(self, n: int, owner: OwnerId) -> Reservation:
        n = min(n, len(self.model.free))
        reservation = self.allocator.reserve(n, owner)
        taken, self.model.free = self.model.free[:n], self.model.free[n:]
        self.model.promises[reservation] = taken
        for block in taken:
            self.model.blocks[block].promised = True
        return reservation

    @rule(reservation=reservations, n=counts)
    def claim(self, reservation: Reservation, n: int) -> None:
        promised = self.model.promises.get(reservation, [])
        if reservation not in self.model.promises or n > len(promised):
            with self.expect(BlockStateError):
                self.allocator.claim(reservation, n)
            return
        allocation = self.allocator.claim(reservation, n)
        taken, self.model.promises[reservation] = promised[:n], promised[n:]
        assert allocation.blocks.tolist() == taken
        owner = reservation.owner
        assert allocation.to_scrub.tolist() == [block for block in taken if self.model.give(block, owner)]

    @rule(reservation=consumes(reservations), again=st.booleans())
    def cancel(self, reservation: Reservation, again: bool) -> None:
        self.allocator.cancel(reservation)
        if again:
            self.allocator.cancel(reservation)
        for block in self.model.promises.pop(reservation):
            self.model.blocks[block].promised = False
            self.model.settle(block)

    # -- holding -----------------------------------------------------------------------------------------------------

    @rule(numbers=picks, any_state=st.booleans(), use=st.booleans())
    def retain_or_use(self, numbers: list[int], any_state: bool, use: bool) -> None:
        chosen = self.choose(numbers, *BlockStatus) if any_state else self.choose(numbers, ACTIVE, CACHED)
        call = self.allocator.begin_use if use else self.allocator.retain
        if {self.model.blocks[block].status for block in chosen} & {FREE, RESERVED}:
            with self.expect(UseAfterFreeError):
                call(ids(*chosen))
            return
        call(ids(*chosen))
        for block in chosen:
            if use:
                self.model.blocks[block].uses += 1
            else:
                self.model.blocks[block].holders += 1

    @rule(numbers=picks, any_state=st.booleans())
    def release(self, numbers: list[int], any_state: bool) -> None:
        chosen = self.choose(numbers, *BlockStatus) if any_state else self.choose(numbers, ACTIVE)
        if any(self.model.blocks[block].status is FREE for block in chosen):
            with self.expect(ReleaseFreeBlockError):
                self.allocator.release(ids(*chosen))
        elif any(times > self.model.blocks[block].holders for block, times in Counter(chosen).items()):
            with self.expect(DoubleReleaseError):
                self.allocator.release(ids(*chosen))
        else:
            self.allocator.release(ids(*chosen))
            for block in chosen:
                self.model.blocks[block].holders -= 1
            for block in chosen:
                self.model.settle(block)

    @rule(numbers=picks)
    def end_use(self, numbers: list[int]) -> None:
        among = [i for i, block in enumerate(self.model.blocks) if block.uses] or [0]
        chosen = [among[number % len(among)] for number in numbers]
        if any(times > self.model.blocks[block].uses for block, times in Counter(chosen).items()):
            with self.expect(DoubleReleaseError):
                self.allocator.end_use(ids(*chosen))
            return
        self.allocator.end_use(ids(*chosen))
        for block in chosen:
            self.model.blocks[block].uses -= 1
        for block in chosen:
            self.model.settle(block)

    # -- content -----------------------------------------------------------------------------------------------------

    @rule(numbers=picks, any_state=st.booleans())
    def publish(self, numbers: list[int], any_state: bool) -> None:
        chosen = self.choose(numbers, *BlockStatus) if any_state else self.choose(numbers, ACTIVE)
        if {self.model.blocks[block].status for block in chosen} & {FREE, RESERVED}:
            with self.expect(UseAfterFreeError):
                self.allocator.publish(ids(*chosen))
            return
        self.allocator.publish(ids(*chosen))
        for block in chosen:
            self.model.blocks[block].published = True

    @rule(numbers=picks, any_state=st.booleans())
    def reclaim(self, numbers: list[int], any_state: bool) -> None:
        chosen = self.choose(numbers, *BlockStatus) if any_state else self.choose(numbers, CACHED)
        if any(self.model.blocks[block].status is not CACHED for block in chosen):
            with self.expect(BlockStateError):
                self.allocator.reclaim(ids(*chosen))
            return
        self.allocator.reclaim(ids(*chosen))
        for block in chosen:
            self.model.blocks[block].published = False
            self.model.settle(block)

    @rule(number=st.integers(0, MOST_BLOCKS - 1), slots=st.integers(0, 8))
    def fill(self, number: int, slots: int) -> None:
        held = self.model.with_status(ACTIVE)
        if held:
            block = held[number % len(held)]
            self.allocator.set_filled(ids(block), slots)
            self.model.blocks[block].filled = slots

    @rule(numbers=picks)
    def check_writable(self, numbers: list[int]) -> None:
        chosen = self.choose(numbers, *BlockStatus)
        blocks = [self.model.blocks[block] for block in chosen]
        alone = [b.holders == 1 and b.uses == 0 and not b.published for b in blocks]
        assert self.allocator.writable(ids(*chosen)).tolist() == alone
        if {block.status for block in blocks} & {FREE, RESERVED}:
            with self.expect(UseAfterFreeError):
                self.allocator.check_writable(ids(*chosen))
        elif not all(alone):
            with self.expect(SharedBlockWriteError):
                self.allocator.check_writable(ids(*chosen))
        else:
            self.allocator.check_writable(ids(*chosen))

    @rule(limit=st.integers(0, 6))
    def scrub(self, limit: int) -> None:
        blocks = self.allocator.dirty_free(limit)
        dirty = {block for block in self.model.free if self.model.blocks[block].content_of is not None}
        assert set(blocks.tolist()) <= dirty
        assert len(blocks) == min(limit, len(dirty))
        self.allocator.mark_scrubbed(blocks)
        for block in blocks:
            self.model.blocks[block].content_of = None

    # -- after each step ---------------------------------------------------------------------------------------------

    @invariant()
    def state_equals_the_models(self) -> None:
        self.allocator.check_invariants()
        state = full_state(self.allocator)
        blocks = self.model.blocks
        assert state["free queue"] == self.model.free
        assert state["_status"] == [block.status for block in blocks]
        assert state["_ref_count"] == [block.holders for block in blocks]
        assert state["_busy"] == [block.uses for block in blocks]
        assert state["_published"] == [block.published for block in blocks]
        assert state["_filled"] == [block.filled for block in blocks]
        assert state["_dirty"] == [block.content_of is not None for block in blocks]
        for reservation, promised in self.model.promises.items():
            assert self.allocator.reserved(reservation) == len(promised)

    @invariant()
    def counts_equal_the_models(self) -> None:
        counts = self.allocator.counts()
        by_status = Counter(block.status for block in self.model.blocks)
        found = (counts.free, counts.active, counts.cached, counts.reserved)
        assert found == tuple(by_status[status] for status in BlockStatus)
        assert counts.held == by_status[ACTIVE] + by_status[RESERVED]
        assert counts.total == self.allocator.num_blocks == len(self.model.blocks)
        assert self.allocator.num_free == by_status[FREE]
        owned = self.allocator.blocks(np.arange(counts.total))
        for seen, block in zip(owned, self.model.blocks, strict=True):
            assert block.content_of is None or seen.owner == block.content_of


TestAllocatorMachine = AllocatorMachine.TestCase
