"""One sequence of tokens over a table of blocks: append, fork, truncate; which token sits where.

::

    tokens          a b c d e f g h i j        num_tokens   = 10
    computed        x x x x x x x x . .        num_computed =  8 (their KV is in the blocks)
    block table     [ 7        |  2     ]      block_size   =  4, table covers num_computed
                      a b c d    e f g h

Knows tokens, positions, blocks and addresses; knows no tensors, roles or prompts. Engine thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from kvos.errors import BlockStateError, InvalidInputError, UseAfterFreeError
from kvos.sequences.block_manager import BlockManager, Holder
from kvos.sequences.hashing import BlockAddress, PrefixRoot
from kvos.sequences.int_vector import IntVector
from kvos.sequences.prefix_index import IndexEntry
from kvos.storage import Reservation
from kvos.types import BlockIds, OwnerId, SequenceId, SlotIds, TokenIds, TokenPositions

__all__ = ["SequenceCache", "SlotContent", "WritePlan"]

_sequence_ids = count(1)

DEFAULT_OWNER = OwnerId(0)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the KV of the next tokens goes: from ``prepare_write`` to ``complete_write`` or ``abandon_write``.

    Attributes:
        start: index of the first token.
        slots: ``[tokens]``, one slot per token.
    """

    start: int
    slots: SlotIds

    @property
    def end(self) -> int:
        return self.start + len(self.slots)


@dataclass(frozen=True, slots=True)
class SlotContent:
    """What a slot holds, seen from one sequence."""

    index: int
    token: int
    position: int


class SequenceCache:
    """A block table, its tokens, and how far they are computed.

    Args:
        manager: gives and takes the blocks.
        root: what must agree before blocks are shared with another sequence.
        owner: tag under which blocks are written; one per tenant.
        label: what an out-of-blocks error calls this sequence.
    """

    def __init__(
        self, manager: BlockManager, root: PrefixRoot, *, owner: OwnerId = DEFAULT_OWNER, label: str = ""
    ) -> None:
        self.id = SequenceId(next(_sequence_ids))
        self.root = root
        self.owner = owner
        self.label = label or f"sequence {self.id}"
        self._manager = manager
        self._root_address = manager.hasher.root(root)
        self._tokens = IntVector(np.int32)
        self._table = IntVector(np.int64)
        self._addresses: list[BlockAddress] = []
        self._num_computed = 0
        self._revision = 0
        self._plan: WritePlan | None = None
        self._released = False
        manager.register(Holder(self.id, self.label, self._table.view, self._blocks_moved, self._is_writing))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        return self._manager.block_size

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_computed(self) -> int:
        """Tokens from the front whose KV is in the blocks."""
        return self._num_computed

    @property
    def num_pending(self) -> int:
        """Tokens that the model has not seen yet."""
        return self.num_tokens - self._num_computed

    @property
    def revision(self) -> int:
        """Changes whenever the tokens do; what was derived from the tokens is good for one revision."""
        return self._revision

    def tokens(self, start: int = 0, end: int | None = None) -> TokenIds:
        """Read-only window on the token ids."""
        return self._tokens.view(start, end)

    def positions(self, start: int = 0, end: int | None = None) -> TokenPositions:
        """What RoPE sees for tokens ``start`` to ``end``: the index in the sequence."""
        return np.arange(start, self.num_tokens if end is None else end, dtype=np.int64)

    def block_table(self) -> BlockIds:
        """Read-only window on the blocks, in order."""
        return self._table.view()

    def slots(self, start: int = 0, end: int | None = None) -> SlotIds:
        """Slot ids of computed tokens ``start`` to ``end``.

        Raises:
            InvalidInputError: some of them have no slot yet.
        """
        end = self._num_computed if end is None else end
        if not 0 <= start <= end <= self._num_computed:
            raise InvalidInputError(f"tokens {start} to {end} have no slots: {self._num_computed} are computed")
        return self._slots(start, end)

    def _slots(self, start: int, end: int) -> SlotIds:
        size = self._manager.block_size
        index = np.arange(start, end, dtype=np.int64)
        slots: SlotIds = self._table.view()[index // size] * size + index % size
        return slots

    def slot_content(self, slot: int) -> SlotContent | None:
        """Which token, at which position, is in ``slot``; None if this sequence has nothing there."""
        block, offset = divmod(slot, self._manager.block_size)
        places = np.flatnonzero(self._table.view() == block)
        if len(places) == 0:
            return None
        index = int(places[0]) * self._manager.block_size + offset
        if index >= self._num_computed:
            return None
        return SlotContent(index, self._tokens[index], int(self.positions(index, index + 1)[0]))

    # -- tokens --------------------------------------------------------------------------------------------------

    def append(self, tokens: TokenIds) -> None:
        """Add tokens at the end; nothing is computed or allocated yet."""
        self._check_usable()
        self._tokens.extend(tokens)
        self._revision += 1

    def truncate(self, num_tokens: int) -> None:
        """Forget every token from ``num_tokens`` on, and give back the blocks that only they used.

        Raises:
            InvalidInputError: negative, or longer than the sequence.
            BlockStateError: a plan is open.
        """
        self._check_no_open_write()
        if not 0 <= num_tokens <= self.num_tokens:
            raise InvalidInputError(f"cannot truncate {self.label} to {num_tokens} tokens; it has {self.num_tokens}")
        self._tokens.truncate(num_tokens)
        del self._addresses[num_tokens // self._manager.block_size :]
        self._num_computed = min(self._num_computed, num_tokens)
        self._trim_table()
        self._revision += 1

    def fork(self, *, label: str = "") -> SequenceCache:
        """A sequence with the same tokens and the same blocks; copies nothing, but a shared tail on its next write.

        Raises:
            BlockStateError: a plan is open; its blocks are about to be written.
        """
        self._check_no_open_write()
        child = SequenceCache(self._manager, self.root, owner=self.owner, label=label)
        child._tokens.extend(self._tokens.view())
        child._addresses = list(self._addresses)
        child._num_computed = self._num_computed
        self._manager.allocator.retain(self._table.view())
        child._table.extend(self._table.view())
        return child

    def release(self) -> None:
        """Give back every block; full ones stay findable. Idempotent; afterwards every change raises."""
        if self._released:
            return
        self._plan = None
        self._touch_entries()
        self._num_computed = 0
        self._trim_table()
        self._tokens.truncate(0)
        self._manager.unregister(self.id)
        self._released = True

    def swap_out(self) -> None:
        """Give back every block and keep the tokens: they are pending again. Full blocks stay findable.

        Raises:
            BlockStateError: a plan is open.
        """
        self._check_no_open_write()
        self._touch_entries()
        self._num_computed = 0
        self._trim_table()

    # -- sharing -------------------------------------------------------------------------------------------------

    def adopt_prefix(self) -> int:
        """Take over published blocks that hold the next tokens; returns how many tokens that gained.

        A partial tail is exchanged for a full block with the same beginning.

        Raises:
            BlockStateError: a plan is open.
        """
        self._check_no_open_write()
        size = self._manager.block_size
        first = self._num_computed // size
        found = self._find_published(first)
        if not found:
            return 0
        blocks = np.array([entry.block for entry in found], np.int64)
        self._manager.allocator.retain(blocks)
        gained = (first + len(found)) * size - self._num_computed
        self._num_computed = first * size
        self._trim_table()
        self._table.extend(blocks)
        self._num_computed += len(found) * size
        self._manager.index.touch(blocks, hit=True)
        self._manager.counters.add("tokens_shared", gained)
        return gained

    def next_was_evicted(self) -> bool:
        """Whether the block behind the computed tokens was published once and has been reclaimed."""
        following = self._num_computed // self._manager.block_size
        if (following + 1) * self._manager.block_size > self.num_tokens:
            return False
        return self._manager.index.was_evicted(self._address(following))

    def addresses(self, first: int, end: int) -> list[BlockAddress]:
        """Content addresses of the blocks before ``end`` from the one before ``first``: the root's, if that is none.

        Raises:
            InvalidInputError: not all tokens of these blocks are known.
        """
        if not 0 <= first <= end <= self.num_tokens // self._manager.block_size:
            raise InvalidInputError(f"{self.label} has no full blocks {first} to {end}")
        return [self._root_address if i < 0 else self._address(i) for i in range(first - 1, end)]

    def published(self, end: int | None = None) -> list[IndexEntry]:
        """Index entries of this sequence's leading full blocks, as far as they are published."""
        entries: list[IndexEntry] = []
        for block in self._table.view(0, end):
            entry = self._manager.index.entry_of(int(block))
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _find_published(self, first: int) -> list[IndexEntry]:
        size = self._manager.block_size
        index = self._manager.index
        found: list[IndexEntry] = []
        if not self._parent_published(first):
            return found
        parent = index.entry_of(self._table[first - 1]) if first else None
        for i in range(first, self.num_tokens // size):
            tokens = self._tokens.view(i * size, (i + 1) * size)
            entry = index.lookup(self._root_address, parent, self._address(i), tokens)
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def _parent_published(self, i: int) -> bool:
        """Whether block ``i`` may hang below its predecessor in the index."""
        return i == 0 or self._manager.index.entry_of(self._table[i - 1]) is not None

    def _address(self, i: int) -> BlockAddress:
        """Content address of block ``i``, whose tokens are all known."""
        size = self._manager.block_size
        while len(self._addresses) <= i:
            done = len(self._addresses)
            parent = self._addresses[-1] if done else self._root_address
            tokens = self._tokens.view(done * size, (done + 1) * size)
            self._addresses.append(self._manager.hasher.chain(parent, tokens))
        return self._addresses[i]

    # -- writing -------------------------------------------------------------------------------------------------

    def blocks_needed(self, n: int) -> int:
        """Blocks that writing the next ``n`` tokens will take, a copy of a shared tail included."""
        end = self._manager.pool.layout.blocks_for(self._num_computed + n)
        return end - len(self._table) + int(n > 0 and self._must_copy_tail())

    def prepare_write(self, n: int, reservation: Reservation | None = None) -> WritePlan:
        """Make room for the KV of the next ``n`` pending tokens: copy a shared tail, take new blocks.

        Raises:
            InvalidInputError: fewer than ``n`` tokens are pending.
            BlockStateError: a plan is open already.
            OutOfBlocksError: nothing changed.
        """
        self._check_no_open_write()
        if not 0 < n <= self.num_pending:
            raise InvalidInputError(f"cannot write {n} tokens of {self.label}; {self.num_pending} are pending")
        needed = self.blocks_needed(n)
        if needed:
            self._take_blocks(needed, reservation)
        plan = WritePlan(self._num_computed, self._slots(self._num_computed, self._num_computed + n))
        self._manager.allocator.check_writable(np.unique(plan.slots // self._manager.block_size))
        self._plan = plan
        return plan

    def _take_blocks(self, needed: int, reservation: Reservation | None) -> None:
        copies_tail = self._must_copy_tail()  # asked before: to make room, whoever shares the tail may leave
        if reservation is None:
            blocks = self._manager.allocate(needed, self.owner)
        else:
            blocks = self._manager.claim(reservation, needed)
        if copies_tail:
            try:
                self._copy_tail(int(blocks[0]))
            except BaseException:  # no memory for the copy: nobody holds the new blocks
                self._manager.allocator.release(blocks)
                raise
            blocks = blocks[1:]
        self._table.extend(blocks)

    def _must_copy_tail(self) -> bool:
        if self._num_computed % self._manager.block_size == 0:
            return False
        return not self._manager.allocator.writable(self._table.view()[-1:])[0]

    def _copy_tail(self, target: int) -> None:
        size = self._manager.block_size
        last = len(self._table) - 1
        source = self._table[last]
        offsets = np.arange(self._num_computed % size, dtype=np.int64)
        self._manager.pool.copy_slots(source * size + offsets, target * size + offsets)
        self._manager.allocator.set_filled(np.array([target]), len(offsets))
        self._table[last] = target
        self._manager.allocator.release(np.array([source]))
        self._manager.counters.add("blocks_copied")

    def complete_write(self, plan: WritePlan) -> None:
        """The KV of ``plan`` is in its slots: count the tokens as computed and publish the blocks they filled."""
        self._end_plan(plan)
        first = self._num_computed // self._manager.block_size
        self._num_computed = plan.end
        self._set_filled(first)
        self._publish(first)

    def abandon_write(self, plan: WritePlan) -> None:
        """The KV of ``plan`` was not written: give the new blocks back."""
        self._end_plan(plan)
        self._trim_table()

    def _end_plan(self, plan: WritePlan) -> None:
        self._check_usable()
        if self._plan is not plan:
            raise BlockStateError(f"{self.label} has no such open write")
        self._plan = None

    def _set_filled(self, first: int) -> None:
        size = self._manager.block_size
        blocks = self._table.view()[first:]
        starts = np.arange(first, len(self._table)) * size
        self._manager.allocator.set_filled(blocks, np.minimum(self._num_computed - starts, size))

    def _publish(self, first: int) -> None:
        """Publish full blocks from ``first`` on; where the content exists already, hold the existing block instead."""
        size = self._manager.block_size
        index, allocator = self._manager.index, self._manager.allocator
        for i in range(first, self._num_computed // size):
            if not self._parent_published(i):
                return
            parent = index.entry_of(self._table[i - 1]) if i else None
            tokens = self._tokens.view(i * size, (i + 1) * size)
            block = self._table[i]
            existing = index.lookup(self._root_address, parent, self._address(i), tokens)
            if existing is None:
                if index.insert(self._root_address, parent, self._address(i), tokens, block) is None:
                    return
                allocator.publish(np.array([block]))
            elif existing.block != block:
                allocator.retain(np.array([existing.block]))
                self._table[i] = existing.block
                allocator.release(np.array([block]))
                self._manager.counters.add("blocks_deduplicated")

    # -- inside --------------------------------------------------------------------------------------------------

    def _trim_table(self) -> None:
        keep = self._manager.pool.layout.blocks_for(self._num_computed)
        if keep < len(self._table):
            surplus = self._table.view(keep).copy()
            self._table.truncate(keep)
            self._manager.allocator.release(surplus)

    def _is_writing(self) -> bool:
        return self._plan is not None

    def _blocks_moved(self, where: BlockIds) -> None:
        """Block ``b`` is at ``where[b]`` now."""
        old = self._table.view()
        new = where[old]
        for i in np.flatnonzero(new != old).tolist():
            self._table[i] = int(new[i])

    def _touch_entries(self) -> None:
        self._manager.index.touch(self._table.view(), hit=False)

    def _check_usable(self) -> None:
        if self._released:
            raise UseAfterFreeError(f"{self.label} was released")

    def _check_no_open_write(self) -> None:
        self._check_usable()
        if self._plan is not None:
            raise BlockStateError(f"{self.label} has an open write; complete or abandon it first")

    def check_invariants(self) -> None:
        """Raises AssertionError if table, tokens and index contradict each other."""
        size = self._manager.block_size
        table = self._table.view()
        assert 0 <= self._num_computed <= self.num_tokens
        covered = self._num_computed if self._plan is None else self._plan.end
        assert len(table) == self._manager.pool.layout.blocks_for(covered), "table and computed tokens differ"
        assert len(np.unique(table)) == len(table), "a block stands twice in one table"
        blocks = self._manager.allocator.blocks(table)
        for i, block in enumerate(blocks):
            assert block.ref_count > 0, f"block {block.id} is in a table but held by none"
            wanted = min(size, self._num_computed - i * size)
            assert block.filled >= wanted, f"block {block.id} has {block.filled} slots filled, {wanted} needed"
            if block.ref_count == 1 and not block.published and self._plan is None:
                assert block.filled == wanted or i == len(blocks) - 1
            entry = self._manager.index.entry_of(block.id)
            if entry is not None:
                shared = self.tokens(i * size, i * size + wanted)
                assert np.array_equal(entry.tokens[:wanted], shared), f"block {block.id} is published with other tokens"
                assert entry.depth == i, f"block {block.id} is published at another depth"
                assert entry.root == self._root_address, f"block {block.id} is published under another root"
