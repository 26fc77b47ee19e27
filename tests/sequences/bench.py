"""A real pool with a manager, and the part of the engine that matters here: it writes KV where a plan says."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvos.policy import EvictionPolicy
from kvos.sequences import BlockAddress, BlockHasher, BlockManager, Hasher, PrefixRoot, SequenceCache, WritePlan
from kvos.storage import BlockPool, BlockStatus, Reservation
from kvos.types import OwnerId, TokenIds
from sequences.kv_values import BLOCK_SIZE, LAYOUT, Run, assert_stored, codes_of, kv_of

KEY = b"a key for tests"
ALICE, BOB = OwnerId(1), OwnerId(2)


class WeakHasher(BlockHasher):
    """Six addresses for all the blocks of the world, and blind to what came before: collisions are the rule."""

    def chain(self, parent: BlockAddress, tokens: TokenIds) -> BlockAddress:
        return BlockAddress(bytes([super().chain(BlockAddress(b""), tokens)[0] % 6]))


def root_of(owner: OwnerId) -> PrefixRoot:
    return PrefixRoot(model="m", tenant=f"tenant {owner}", numeric_class="fp64")


def tokens_from(first: int, n: int) -> TokenIds:
    """``n`` tokens that count up from ``first``."""
    return np.arange(first, first + n, dtype=np.int32)


class Bench:
    """Blocks of 8 tokens in segments of 4."""

    def __init__(
        self,
        max_blocks: int = 16,
        *,
        blocks_per_segment: int = 4,
        hasher: Hasher | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.pool = BlockPool(LAYOUT, max_blocks=max_blocks, blocks_per_segment=blocks_per_segment)
        self.manager = BlockManager(self.pool, BlockHasher(KEY) if hasher is None else hasher, policy=policy)

    def open(
        self, tokens: Iterable[int] = (), *, owner: OwnerId = ALICE, root: PrefixRoot | None = None, label: str = ""
    ) -> SequenceCache:
        """A sequence with pending ``tokens``."""
        sequence = SequenceCache(self.manager, root or root_of(owner), owner=owner, label=label)
        sequence.append(np.fromiter(tokens, np.int32))
        return sequence

    def computed(self, tokens: Iterable[int], **options: object) -> SequenceCache:
        """A sequence whose ``tokens`` are all computed, without looking for shared blocks."""
        sequence = self.open(tokens, **options)  # type: ignore[arg-type]
        self.compute(sequence)
        return sequence

    def occupy(self, blocks: int) -> SequenceCache:
        """Somebody else who holds ``blocks`` blocks."""
        return self.computed(tokens_from(1_000_000, blocks * BLOCK_SIZE))

    def compute(self, sequence: SequenceCache, n: int | None = None, reservation: Reservation | None = None) -> None:
        """Write the KV of the next ``n`` pending tokens (default all)."""
        n = sequence.num_pending if n is None else n
        if n:
            plan = sequence.prepare_write(n, reservation)
            self.fill(sequence, plan)
            sequence.complete_write(plan)

    def fill(self, sequence: SequenceCache, plan: WritePlan) -> None:
        """What a forward pass does: KV of the plan's tokens, at the positions that the sequence says."""
        codes = codes_of(sequence.owner, sequence.tokens(0, plan.end))[plan.start :]
        for layer in range(LAYOUT.num_layers):
            self.pool.write(layer, plan.slots, *kv_of(layer, codes, sequence.positions(plan.start, plan.end)))

    def check(self, *sequences: SequenceCache) -> None:
        """Invariants hold, and the KV of every computed token is what a run from scratch would have written."""
        self.manager.check_invariants()
        for sequence in sequences:
            sequence.check_invariants()
            codes = codes_of(sequence.owner, sequence.tokens(0, sequence.num_computed))
            assert_stored(self.pool, [Run(sequence.block_table(), codes)])

    def status(self, block: int) -> BlockStatus:
        return self.manager.allocator.blocks(np.array([block]))[0].status

    def state(self, *sequences: SequenceCache) -> list[object]:
        """All that a failed call must leave alone."""
        blocks = self.manager.allocator.blocks(np.arange(self.manager.allocator.num_blocks))
        return [
            blocks,
            self.manager.allocator.counts(),
            [(entry.address, entry.block) for entry in self.manager.index.entries()],
            [(s.tokens().tolist(), s.block_table().tolist(), s.num_computed) for s in sequences],
        ]


__all__ = ["ALICE", "BLOCK_SIZE", "BOB", "KEY", "Bench", "WeakHasher", "root_of", "tokens_from"]
