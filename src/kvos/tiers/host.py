"""Blocks in the host's memory: slots of one arena, or, with a codec, encoded one by one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage
from kvos.tiers.codec import Codec
from kvos.tiers.codecs.raw import RawCodec

__all__ = ["HostTier"]

COUNTERS = ("stored", "present", "no_room", "hits", "misses", "damaged", "evicted")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A block: its bytes are in slot ``slot`` of the arena, or, with a codec, in ``encoded``."""

    parent: BlockKey
    tokens: bytes
    size: int
    slot: int = -1
    encoded: bytes = b""

    def agrees(self, wanted: BlockRequest, row: int) -> bool:
        return self.parent == wanted.parents[row] and self.tokens == wanted.tokens[row].tobytes()


class HostTier(Tier):
    """Blocks in host memory, the least recently used leaves first.

    Without a codec the whole arena is allocated here, page-locked if there is a CUDA device, and a whole batch is
    one copy. With one, blocks are encoded and decoded outside the lock. ``contains`` and ``usage`` wait for no copy.
    Memory is trusted: there is no checksum over raw bytes.

    Args:
        bytes_per_block: size of one block.
        capacity_bytes: the most that the blocks may take together, encoded if there is a codec; their token ids are
            not counted.
        codec: how blocks are kept; None or raw is as they are.
    """

    name = "host"

    def __init__(self, bytes_per_block: int, capacity_bytes: int, codec: Codec | None = None) -> None:
        self._bytes_per_block = bytes_per_block
        self._capacity_bytes = capacity_bytes
        self._codec = None if isinstance(codec, RawCodec) else codec
        slots = max(capacity_bytes, 0) // bytes_per_block if self._codec is None else 0
        self.lossless = self._codec is None or self._codec.lossless
        self._arena = _allocate(slots, bytes_per_block)
        self._free = list(range(slots - 1, -1, -1))
        self._lock = threading.Lock()
        self._entries: OrderedDict[BlockKey, _Entry] = OrderedDict()
        self._used_bytes = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False

    def store(self, batch: BlockBatch) -> list[Stored]:
        """Store in order; a row may push out one that the same batch brought."""
        encoded = self._encode_absent(batch) if self._codec is not None else {}
        with self._lock:
            if self._closed:
                return [Stored.FAILED] * len(batch)
            row_of: dict[int, int] = {}
            results = [self._place(batch, row, encoded, row_of) for row in range(len(batch))]
            self._copy_in(row_of, batch.data)
            return results

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        with self._lock:
            found: dict[int, _Entry] = {}
            results = [self._look_up(wanted, row, found) for row in range(len(wanted))]
            if self._codec is None:
                self._copy_out(found, out)
        if self._codec is not None:
            self._decode(self._codec, wanted, found, out, results)
        with self._lock:
            self._counters["hits"] += results.count(Loaded.HIT)
            self._counters["misses"] += results.count(Loaded.MISS)
            self._counters["damaged"] += results.count(Loaded.DAMAGED)
        return results

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self._entries for key in keys]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def usage(self) -> TierUsage:
        return TierUsage(self._capacity_bytes, self._used_bytes, len(self._entries), dict(self._counters))

    def close(self) -> None:
        """Give the memory back. Afterwards nothing is found and nothing can be stored."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._free.clear()
            self._used_bytes = 0
            self._arena = np.empty((0, self._bytes_per_block), dtype=np.uint8)

    def check_invariants(self) -> None:
        """Each slot is free or belongs to one block, and the sum of sizes is what usage says."""
        with self._lock:
            sizes = sum(entry.size for entry in self._entries.values())
            assert self._used_bytes == sizes, f"{self._used_bytes} bytes used, the blocks have {sizes}"
            assert self._used_bytes <= self._capacity_bytes or not self._entries, "over capacity"
            taken = [entry.slot for entry in self._entries.values() if entry.slot >= 0]
            slots = sorted(taken + self._free)
            assert slots == list(range(len(self._arena))), f"slots are lost or held twice: {slots}"
            assert self._codec is not None or len(taken) == len(self._entries), "a block without a slot"

    def _encode_absent(self, batch: BlockBatch) -> dict[int, bytes]:
        """Row to encoded block, of the rows that are not here. Takes no lock."""
        rows = [row for row, key in enumerate(batch.blocks.keys) if key not in self._entries]
        return self._encode(batch, rows)

    def _encode(self, batch: BlockBatch, rows: list[int]) -> dict[int, bytes]:
        if self._codec is None or not rows:
            return {}
        data = batch.data if len(rows) == len(batch) else batch.data[rows]
        return dict(zip(rows, map(bytes, self._codec.encode(data)), strict=True))

    def _place(self, batch: BlockBatch, row: int, encoded: dict[int, bytes], row_of: dict[int, int]) -> Stored:
        """Make the entry of one row. Bytes that belong into the arena are noted in ``row_of``, by slot."""
        key = batch.blocks.keys[row]
        if key in self._entries:
            self._entries.move_to_end(key)
            self._counters["present"] += 1
            return Stored.PRESENT
        if self._codec is not None and row not in encoded:
            encoded |= self._encode(batch, [row])  # it was here when the batch came, and has left since
        content = encoded.get(row, b"")
        size = self._bytes_per_block if self._codec is None else len(content)
        if size > self._capacity_bytes:
            self._counters["no_room"] += 1
            return Stored.NO_ROOM
        while self._used_bytes + size > self._capacity_bytes:
            self._forget(next(iter(self._entries)))
            self._counters["evicted"] += 1
        slot = self._free.pop() if self._codec is None else -1
        if slot >= 0:
            row_of[slot] = row
        tokens = batch.blocks.tokens[row].tobytes()
        self._entries[key] = _Entry(batch.blocks.parents[row], tokens, size, slot, content)
        self._used_bytes += size
        self._counters["stored"] += 1
        return Stored.STORED

    def _look_up(self, wanted: BlockRequest, row: int, found: dict[int, _Entry]) -> Loaded:
        """What becomes of one row; the entry of a hit is noted in ``found``."""
        key = wanted.keys[row]
        entry = self._entries.get(key)
        if entry is None:
            return Loaded.MISS
        if not entry.agrees(wanted, row):
            self._forget(key)
            return Loaded.DAMAGED
        self._entries.move_to_end(key)
        found[row] = entry
        return Loaded.HIT

    def _copy_in(self, row_of: dict[int, int], data: PayloadBytes) -> None:
        """Fill slots; one that was taken twice in this batch has its last row."""
        if row_of and list(row_of.values()) == list(range(len(data))):
            self._arena[list(row_of)] = data
            return
        for slot, row in row_of.items():  # an index on both sides would copy everything twice
            self._arena[slot] = data[row]

    def _copy_out(self, found: dict[int, _Entry], out: PayloadBytes) -> None:
        slots = [entry.slot for entry in found.values()]
        if slots and len(slots) == len(out):
            np.take(self._arena, slots, axis=0, out=out, mode="clip")  # clip: straight into out, without a buffer
            return
        for slot, row in zip(slots, found, strict=True):
            out[row] = self._arena[slot]

    def _decode(
        self, codec: Codec, wanted: BlockRequest, found: dict[int, _Entry], out: PayloadBytes, results: list[Loaded]
    ) -> None:
        """Decode into the rows of ``out``; what does not decode is dropped and becomes DAMAGED. Takes the lock."""
        for row, entry in found.items():
            if codec.decode([entry.encoded], out[row : row + 1])[0]:
                continue
            results[row] = Loaded.DAMAGED
            with self._lock:
                if self._entries.get(wanted.keys[row]) is entry:
                    self._forget(wanted.keys[row])

    def _forget(self, key: BlockKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._used_bytes -= entry.size
        if entry.slot >= 0:
            self._free.append(entry.slot)


def _allocate(slots: int, bytes_per_block: int) -> PayloadBytes:
    """``[slots, bytes_per_block]``, page-locked if a CUDA device can copy from it."""
    if slots and torch.cuda.is_available():
        pinned: PayloadBytes = torch.empty((slots, bytes_per_block), dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    return np.empty((slots, bytes_per_block), dtype=np.uint8)
