"""Random histories of many sequences over a real pool, against a plain Python model of each.

After every step, every computed slot of every sequence is read from the pool's tensors and compared with the KV that a
run without any sharing would have written there: a hash of the tenant and of the whole prefix, and the position. So a
block that is shared, copied, written or found wrongly shows as a wrong number, whatever the bookkeeping says.

The same machine runs with the other eviction policy, and with a hasher whose addresses nearly all collide.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvos.errors import BlockStateError, OutOfBlocksError, UseAfterFreeError
from kvos.policy import LRU, EvictionPolicy, ExpectedReturn
from kvos.sequences import BlockHasher, BlockManager, Hasher, IndexEntry, SequenceCache, WritePlan
from kvos.storage import BlockPool, BlockStatus, Reservation
from kvos.types import BlockIds, OwnerId
from sequences.bench import ALICE, BOB, KEY, WeakHasher, root_of
from sequences.kv_values import (
    BLOCK_SIZE,
    LAYOUT,
    Codes,
    Run,
    all_stored,
    assert_stored,
    codes_of,
    extend_codes,
    kv_of,
    tenants_in,
)

MAX_BLOCKS, BLOCKS_PER_SEGMENT = 14, 4
MOST_SEQUENCES, MOST_TOKENS = 6, 80
TEXTS = np.zeros((3, MOST_TOKENS), np.int32)  # text 0: all blocks have equal tokens
TEXTS[1, 20:] = np.arange(MOST_TOKENS - 20) % 2  # leaves text 0 in the middle of a block
TEXTS[2] = np.arange(MOST_TOKENS) % BLOCK_SIZE  # all blocks equal, and others than those of text 0
texts = st.integers(0, len(TEXTS) - 1)
lengths = st.integers(1, 30)

Path = tuple[OwnerId, tuple[int, ...]]
"""A published block, seen from outside: whose it is, and all tokens from the start to its end."""


@dataclass(eq=False)
class Expected:
    """What one sequence should be."""

    owner: OwnerId
    tokens: list[int] = field(default_factory=list)
    codes: Codes = field(default_factory=lambda: np.array([], np.int64))
    computed: int = 0
    plan: WritePlan | None = None

    def append(self, tokens: npt.NDArray[np.int32]) -> None:
        self.tokens += tokens.tolist()
        self.codes = extend_codes(self.codes, self.owner, tokens)

    def path(self, blocks: int) -> Path:
        return self.owner, tuple(self.tokens[: blocks * BLOCK_SIZE])


@dataclass(frozen=True, eq=False)
class Transfer:
    """Blocks that something outside reads, and the tokens whose KV it must find in them until it ends."""

    run: Run

    @property
    def blocks(self) -> BlockIds:
        return self.run.blocks


class SequenceMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    reservations = Bundle("reservations")
    transfers = Bundle("transfers")

    exact = True
    """Whether equal addresses mean equal content, so that what is shared can be predicted."""

    def make_hasher(self) -> Hasher:
        return BlockHasher(KEY)

    def make_policy(self) -> EvictionPolicy:
        return ExpectedReturn()

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(LAYOUT, max_blocks=MAX_BLOCKS, blocks_per_segment=BLOCKS_PER_SEGMENT)
        self.manager = BlockManager(self.pool, self.make_hasher(), policy=self.make_policy())
        self.live: dict[SequenceCache, Expected] = {}
        self.promises: dict[Reservation, int] = {}
        self.running: list[Transfer] = []
        self.published: set[Path] = set()
        self.roots = {self.manager.hasher.root(root_of(owner)): owner for owner in (ALICE, BOB)}

    # -- the model's own view of the pool ----------------------------------------------------------------------------

    def holders(self, block: int) -> int:
        return sum(block in sequence.block_table() for sequence in self.live)

    def is_busy(self, block: int) -> bool:
        return any(block in transfer.blocks for transfer in self.running)

    def unavailable(self) -> int:
        """Blocks that neither are free nor may be reclaimed."""
        held = {int(block) for sequence in self.live for block in sequence.block_table()}
        held |= {int(block) for transfer in self.running for block in transfer.blocks}
        return len(held) + sum(self.promises.values())

    def needed(self, sequence: SequenceCache, n: int) -> int:
        """Blocks that the next ``n`` tokens take, a copy of a tail included that others hold, read or can find."""
        computed = self.live[sequence].computed
        new = -(-(computed + n) // BLOCK_SIZE) - -(-computed // BLOCK_SIZE)
        if computed % BLOCK_SIZE == 0:
            return new
        tail = int(sequence.block_table()[-1])
        published = self.manager.index.entry_of(tail) is not None
        return new + (self.holders(tail) > 1 or self.is_busy(tail) or published)

    def snapshot(self) -> list[object]:
        blocks = self.manager.allocator.blocks(np.arange(self.manager.allocator.num_blocks))
        held = [block for block in blocks if block.status is not BlockStatus.FREE]
        tables = [(s.block_table().tolist(), s.tokens().tolist(), s.num_computed) for s in self.live]
        return [held, tables, [(e.address, e.block) for e in self.manager.index.entries()]]

    # -- turns -------------------------------------------------------------------------------------------------------

    @initialize(target=sequences, text=texts, n=lengths)
    def first(self, text: int, n: int) -> SequenceCache:
        return self.start(ALICE, text, n)

    @precondition(lambda self: len(self.live) < MOST_SEQUENCES)
    @rule(target=sequences, owner=st.sampled_from([ALICE, ALICE, BOB]), text=texts, n=lengths)
    def start(self, owner: OwnerId, text: int, n: int) -> SequenceCache:
        sequence = SequenceCache(self.manager, root_of(owner), owner=owner)
        self.live[sequence] = Expected(owner)
        self.append(sequence, text, n)
        self.adopt(sequence)
        self.compute(sequence, n)
        return sequence

    @rule(sequence=sequences, text=texts, n=lengths)
    def append(self, sequence: SequenceCache, text: int, n: int) -> None:
        start = sequence.num_tokens
        tokens = TEXTS[text, start : start + n]
        sequence.append(tokens)
        self.live[sequence].append(tokens)

    @rule(sequence=sequences, text=texts, n=lengths, chunk=lengths, look=st.booleans())
    def take_turn(self, sequence: SequenceCache, text: int, n: int, chunk: int, look: bool) -> None:
        """What a request does: new tokens, what is there already (unless it came at the same time), the rest."""
        self.manager.index.begin_request()
        self.append(sequence, text, n)
        if look:
            self.adopt(sequence)
        while plan := self.prepare(sequence, chunk):
            self.finish(sequence, plan)

    @rule(sequence=sequences, drop=st.integers(1, 12), text=texts, n=lengths)
    def regenerate(self, sequence: SequenceCache, drop: int, text: int, n: int) -> None:
        self.truncate(sequence, drop)
        self.take_turn(sequence, text, n, chunk=5, look=False)

    # -- writing -----------------------------------------------------------------------------------------------------

    def prepare(self, sequence: SequenceCache, n: int, reservation: Reservation | None = None) -> WritePlan | None:
        """A plan, or None where there is no room or nothing to write; then nothing has changed."""
        expected = self.live[sequence]
        if expected.plan is not None:
            with pytest.raises(BlockStateError, match="open write"):
                sequence.prepare_write(max(n, 1), reservation)
            return None
        n = min(n, len(expected.tokens) - expected.computed)
        if n == 0:
            return None
        needed = self.needed(sequence, n)
        assert sequence.blocks_needed(n) == needed
        promised = min(needed, self.promises.get(reservation, 0)) if reservation else 0
        if needed - promised > MAX_BLOCKS - self.unavailable():
            before = self.snapshot()
            with pytest.raises(OutOfBlocksError):
                sequence.prepare_write(n, reservation)
            assert self.snapshot() == before
            return None
        plan = self.take(sequence, n, reservation, needed - promised)
        if reservation:
            self.promises[reservation] = self.promises.get(reservation, 0) - promised
        expected.plan = plan
        assert (plan.start, plan.end) == (expected.computed, expected.computed + n)
        return plan

    def take(self, sequence: SequenceCache, n: int, reservation: Reservation | None, from_pool: int) -> WritePlan:
        """Prepare a write that must work; what is reclaimed for it is as little as possible."""
        reclaimed = self.manager.counters["blocks_reclaimed"]
        cached = sum(self.is_cached(entry.block) for entry in self.manager.index.entries())
        free = MAX_BLOCKS - self.unavailable() - cached
        plan = sequence.prepare_write(n, reservation)
        self.no_table_reaches_another_tenants_bytes()  # before they are overwritten
        assert self.manager.counters["blocks_reclaimed"] - reclaimed == max(0, from_pool - free)
        self.forget_reclaimed(max(0, from_pool - free))
        return plan

    def is_cached(self, block: int) -> bool:
        return not self.holders(block) and not self.is_busy(block)

    def forget_reclaimed(self, reclaimed: int) -> None:
        """Which cached blocks leave is the policy's choice; how many is not."""
        left = {self.path_of(entry) for entry in self.manager.index.entries()}
        assert left <= self.published
        if self.exact:
            assert len(self.published) - len(left) == reclaimed
        self.published &= left

    def write(self, sequence: SequenceCache, plan: WritePlan, codes: Codes) -> None:
        positions = sequence.positions(plan.start, plan.end)
        for layer in range(LAYOUT.num_layers):
            self.pool.write(layer, plan.slots, *kv_of(layer, codes, positions))

    def finish(self, sequence: SequenceCache, plan: WritePlan) -> None:
        expected = self.live[sequence]
        self.write(sequence, plan, expected.codes[plan.start : plan.end])
        sequence.complete_write(plan)
        first, last = expected.computed // BLOCK_SIZE, plan.end // BLOCK_SIZE
        expected.computed, expected.plan = plan.end, None
        self.published |= {expected.path(i + 1) for i in range(first, last)}

    @rule(sequence=sequences, n=lengths)
    def compute(self, sequence: SequenceCache, n: int) -> None:
        plan = self.prepare(sequence, n)
        if plan is not None:
            self.finish(sequence, plan)

    @rule(sequence=sequences, n=lengths)
    def open_write(self, sequence: SequenceCache, n: int) -> None:
        self.prepare(sequence, n)

    @rule()
    def close_writes(self) -> None:
        """A step ends for everybody who took part in it."""
        for sequence, expected in self.live.items():
            if expected.plan is not None:
                self.finish(sequence, expected.plan)

    @rule(sequence=sequences, part=st.integers(0, 30))
    def abandon_write(self, sequence: SequenceCache, part: int) -> None:
        """A step that failed may have written some of its KV, and something wrong."""
        expected = self.live[sequence]
        if expected.plan is not None:
            plan = WritePlan(expected.plan.start, expected.plan.slots[:part])
            self.write(sequence, plan, np.full(len(plan.slots), 1 << 20 | expected.owner))
            sequence.abandon_write(expected.plan)
            with pytest.raises(BlockStateError):
                sequence.complete_write(expected.plan)
            expected.plan = None

    # -- sharing -----------------------------------------------------------------------------------------------------

    @rule(sequence=sequences)
    def adopt(self, sequence: SequenceCache) -> None:
        expected = self.live[sequence]
        if expected.plan is not None:
            with pytest.raises(BlockStateError, match="open write"):
                sequence.adopt_prefix()
            return
        blocks = expected.computed // BLOCK_SIZE
        while (blocks + 1) * BLOCK_SIZE <= len(expected.tokens) and expected.path(blocks + 1) in self.published:
            blocks += 1
        possible = max(0, blocks * BLOCK_SIZE - expected.computed)
        gained = sequence.adopt_prefix()
        assert gained == possible if self.exact else gained <= possible
        expected.computed += gained

    @precondition(lambda self: len(self.live) < MOST_SEQUENCES)
    @rule(target=sequences, parent=sequences, text=texts, n=st.integers(0, 12))
    def fork(self, parent: SequenceCache, text: int, n: int) -> SequenceCache | MultipleResults[SequenceCache]:
        """A child with ``n`` tokens of its own; its parent may go on first, later or never."""
        expected = self.live[parent]
        if expected.plan is not None:
            with pytest.raises(BlockStateError, match="open write"):
                parent.fork()
            return multiple()
        free = self.manager.allocator.num_free
        child = parent.fork()
        assert self.manager.allocator.num_free == free
        assert child.block_table().tolist() == parent.block_table().tolist()
        self.live[child] = Expected(expected.owner, list(expected.tokens), expected.codes, expected.computed)
        if n:
            self.take_turn(child, text, n, chunk=7, look=False)
        return child

    # -- going back --------------------------------------------------------------------------------------------------

    @rule(sequence=sequences, drop=st.integers(0, 25))
    def truncate(self, sequence: SequenceCache, drop: int) -> None:
        expected = self.live[sequence]
        keep = max(0, len(expected.tokens) - drop)
        if expected.plan is not None:
            with pytest.raises(BlockStateError, match="open write"):
                sequence.truncate(keep)
            return
        sequence.truncate(keep)
        del expected.tokens[keep:]
        expected.codes = expected.codes[:keep]
        expected.computed = min(expected.computed, keep)

    @rule(sequence=consumes(sequences))
    def release(self, sequence: SequenceCache) -> None:
        expected = self.live.pop(sequence)
        sequence.release()
        sequence.release()
        if expected.plan is not None:
            with pytest.raises(UseAfterFreeError):
                sequence.complete_write(expected.plan)

    # -- reservations, transfers, idle moments -----------------------------------------------------------------------

    @rule(target=reservations, sequence=sequences, promised=st.integers(1, 5), n=lengths)
    def reserve(self, sequence: SequenceCache, promised: int, n: int) -> Reservation:
        """What admission does; the first chunk comes at once, others perhaps later, and not all may be used."""
        promised = min(promised, MAX_BLOCKS - self.unavailable())
        reclaimed = self.manager.counters["blocks_reclaimed"]
        reservation = self.manager.reserve(promised, sequence.owner)
        self.forget_reclaimed(self.manager.counters["blocks_reclaimed"] - reclaimed)
        self.promises[reservation] = promised
        self.compute_reserved(sequence, n, reservation)
        return reservation

    @rule(sequence=sequences, n=lengths, reservation=reservations)
    def compute_reserved(self, sequence: SequenceCache, n: int, reservation: Reservation) -> None:
        if reservation.owner == sequence.owner:
            plan = self.prepare(sequence, n, reservation)
            if plan is not None:
                self.finish(sequence, plan)

    @rule(reservation=reservations)
    def cancel(self, reservation: Reservation) -> None:
        self.manager.cancel(reservation)
        self.promises.pop(reservation, None)

    @rule(target=transfers, sequence=sequences)
    def begin_transfer(self, sequence: SequenceCache) -> Transfer:
        codes = self.live[sequence].codes[: self.live[sequence].computed]
        blocks = sequence.block_table()[: -(-len(codes) // BLOCK_SIZE)].copy()
        transfer = Transfer(Run(blocks, codes))
        self.manager.allocator.begin_use(blocks)
        self.running.append(transfer)
        return transfer

    @rule(transfer=consumes(transfers))
    def end_transfer(self, transfer: Transfer) -> None:
        self.manager.allocator.end_use(transfer.blocks)
        self.running.remove(transfer)

    @rule()
    def scrub_in_an_idle_moment(self) -> None:
        self.manager.scrub_some()

    @rule(sequence=sequences)
    def compact(self, sequence: SequenceCache) -> None:
        """Content is compared after each step; here: what moves, and what must not."""
        table = sequence.block_table().copy()
        writing = [(s, s.block_table().tolist()) for s, e in self.live.items() if e.plan is not None]
        pinned = {block for _, blocks in writing for block in blocks}
        fixed = [int(b) for b in table if self.is_busy(int(b)) or int(b) in pinned]
        assert self.manager.movable(table) == (not fixed)
        before, free = self.snapshot(), self.manager.allocator.num_free
        try:
            moved = self.manager.compact(sequence.id)
        except BlockStateError:
            assert fixed
            moved = 0
        assert self.manager.allocator.num_free == free
        assert moved == int((sequence.block_table() != table).sum())
        if moved == 0:
            assert self.snapshot() == before
        else:
            assert self.manager.num_runs(sequence.block_table()) < self.manager.num_runs(table)
        assert [(s, s.block_table().tolist()) for s, _ in writing] == writing

    # -- after each step ---------------------------------------------------------------------------------------------

    @invariant()
    def bookkeeping_agrees_with_itself(self) -> None:
        self.manager.check_invariants()
        for sequence in self.live:
            sequence.check_invariants()

    @invariant()
    def every_computed_slot_holds_what_a_run_from_scratch_would_write(self) -> None:
        assert_stored(self.pool, (Run(s.block_table(), e.codes[: e.computed]) for s, e in self.live.items()))

    @invariant()
    def no_table_reaches_another_tenants_bytes(self) -> None:
        for owner in (ALICE, BOB):
            blocks = {int(block) for s in self.live if s.owner == owner for block in s.block_table()}
            for stored in all_stored(self.pool, np.array(sorted(blocks), np.int64)):
                assert tenants_in(stored) <= {owner}

    @invariant()
    def what_a_transfer_reads_stays_as_it_was(self) -> None:
        assert_stored(self.pool, (transfer.run for transfer in self.running))

    @invariant()
    def tokens_positions_and_slots_are_looked_up_right(self) -> None:
        for sequence, expected in self.live.items():
            assert sequence.tokens().tolist() == expected.tokens
            assert sequence.positions().tolist() == list(range(len(expected.tokens)))
            assert (sequence.num_computed, sequence.num_pending) == (
                expected.computed,
                len(expected.tokens) - expected.computed,
            )
            table = sequence.block_table()
            slots = [int(table[i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(expected.computed)]
            assert sequence.slots().tolist() == slots
            if slots:
                content = sequence.slot_content(slots[-1])
                assert content is not None
                last = expected.computed - 1
                assert (content.index, content.token, content.position) == (last, expected.tokens[last], last)

    @invariant()
    def what_is_findable_is_complete_and_true(self) -> None:
        """The index holds what was computed and not reclaimed, and each block what its path of tokens says."""
        paths = {entry.block: self.path_of(entry) for entry in self.manager.index.entries()}
        findable = set(paths.values())
        assert findable == self.published if self.exact else findable <= self.published
        assert len(findable) == len(paths)
        runs = []
        for block, (owner, tokens) in paths.items():
            codes = codes_of(owner, np.array(tokens, np.int32))
            runs.append(Run(np.array([block]), codes[-BLOCK_SIZE:], len(tokens) - BLOCK_SIZE))
        assert_stored(self.pool, runs)

    @invariant()
    def equal_prefixes_of_a_tenant_share_their_full_blocks(self) -> None:
        if self.exact:
            canonical: dict[Path, int] = {}
            for sequence, expected in self.live.items():
                for i in range(expected.computed // BLOCK_SIZE):
                    block = int(sequence.block_table()[i])
                    assert canonical.setdefault(expected.path(i + 1), block) == block

    def path_of(self, entry: IndexEntry) -> Path:
        """Walks up to the root, which is compared with the roots of both tenants."""
        tokens: list[int] = []
        at: IndexEntry | None = entry
        while at is not None:
            tokens[:0] = at.tokens.tolist()
            at = at.parent
        return self.roots[entry.root], tuple(tokens)

    def teardown(self) -> None:
        """When everybody has left, every block is free or cached, and can be taken."""
        for transfer in self.running:
            self.manager.allocator.end_use(transfer.blocks)
        for reservation in self.promises:
            self.manager.cancel(reservation)
        for sequence in self.live:
            sequence.release()
        self.manager.check_invariants()
        counts = self.manager.allocator.counts()
        assert (counts.active, counts.reserved) == (0, 0)
        assert counts.cached == len(self.manager.index)
        assert len(self.manager.allocate(MAX_BLOCKS, ALICE)) == MAX_BLOCKS


class LRUSequenceMachine(SequenceMachine):
    """Others leave, and nothing else changes."""

    def make_policy(self) -> EvictionPolicy:
        return LRU()


class CollidingSequenceMachine(SequenceMachine):
    """Hardly anything can be published here; what is shared all the same must be right."""

    exact = False

    def make_hasher(self) -> Hasher:
        return WeakHasher(KEY)


TestSequenceMachine = SequenceMachine.TestCase
TestLRUSequenceMachine = LRUSequenceMachine.TestCase
TestCollidingSequenceMachine = CollidingSequenceMachine.TestCase
