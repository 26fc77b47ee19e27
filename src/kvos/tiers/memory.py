"""The simplest tier: a dictionary of blocks. What the others are compared with, and a stand-in for them in tests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage

__all__ = ["MemoryTier"]

COUNTERS = ("stored", "present", "no_room", "hits", "misses", "damaged", "evicted")


@dataclass(frozen=True, slots=True)
class _Block:
    parent: BlockKey
    tokens: bytes
    content: bytes


class MemoryTier(Tier):
    """Blocks in a dictionary, least recently used first. One lock around every verb.

    Args:
        bytes_per_block: size of one block.
        capacity_bytes: the most that the blocks may take together; their token ids are not counted.
    """

    name = "memory"

    def __init__(self, bytes_per_block: int, capacity_bytes: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[BlockKey, _Block] = OrderedDict()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False

    def store(self, batch: BlockBatch) -> list[Stored]:
        """Store row by row; a row may push out one that the same batch brought."""
        with self._lock:
            return [self._store_one(batch, row) for row in range(len(batch))]

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        with self._lock:
            return [self._load_one(wanted, row, out) for row in range(len(wanted))]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self._blocks for key in keys]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._blocks.pop(key, None)

    def usage(self) -> TierUsage:
        with self._lock:
            blocks = len(self._blocks)
            return TierUsage(self._capacity_bytes, blocks * self._bytes_per_block, blocks, dict(self._counters))

    def close(self) -> None:
        """Forget everything. Afterwards nothing is found and nothing can be stored."""
        with self._lock:
            self._closed = True
            self._blocks.clear()

    def _store_one(self, batch: BlockBatch, row: int) -> Stored:
        key = batch.blocks.keys[row]
        if self._closed:
            return Stored.FAILED
        if key in self._blocks:
            self._blocks.move_to_end(key)
            self._counters["present"] += 1
            return Stored.PRESENT
        if self._bytes_per_block > self._capacity_bytes:
            self._counters["no_room"] += 1
            return Stored.NO_ROOM
        while (len(self._blocks) + 1) * self._bytes_per_block > self._capacity_bytes:
            self._blocks.popitem(last=False)
            self._counters["evicted"] += 1
        tokens = batch.blocks.tokens[row].tobytes()
        self._blocks[key] = _Block(batch.blocks.parents[row], tokens, batch.data[row].tobytes())
        self._counters["stored"] += 1
        return Stored.STORED

    def _load_one(self, wanted: BlockRequest, row: int, out: PayloadBytes) -> Loaded:
        key = wanted.keys[row]
        block = self._blocks.get(key)
        if block is None:
            self._counters["misses"] += 1
            return Loaded.MISS
        if block.parent != wanted.parents[row] or block.tokens != wanted.tokens[row].tobytes():
            del self._blocks[key]
            self._counters["damaged"] += 1
            return Loaded.DAMAGED
        self._blocks.move_to_end(key)
        out[row] = np.frombuffer(block.content, dtype=np.uint8)
        self._counters["hits"] += 1
        return Loaded.HIT
