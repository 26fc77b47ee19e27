"""What the disk tier knows in memory: where each block is, how lately it was used, what each pack holds. No I/O.

Changed only under the tier's lock; a lookup of one key needs none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvos.tiers.base import BlockKey

__all__ = ["BYTES_PER_ROW", "CATALOG_BYTES", "Entry", "Index", "Pack"]

CATALOG_BYTES = 96 << 10
"""What the catalog takes without rows: its file, its write-ahead log and that log's index."""

BYTES_PER_ROW = 256
"""A generous estimate of what one row takes in the catalog and its log."""


@dataclass(slots=True)
class Entry:
    """Where a block is. ``last_used`` is a tick of the index's clock, not a time."""

    pack: int
    offset: int
    length: int
    last_used: int
    hits: int = 0


@dataclass(slots=True)
class Pack:
    """A pack file: its size in bytes, and the blocks in it that can still be found."""

    size: int
    live_bytes: int = 0
    keys: set[BlockKey] = field(default_factory=set)


class Index:
    """Blocks and packs, and the bytes that they take."""

    def __init__(self) -> None:
        self.entries: dict[BlockKey, Entry] = {}
        self.packs: dict[int, Pack] = {}
        self.live_bytes = 0
        self.pack_bytes = 0
        self.clock = 0

    @property
    def catalog_bytes(self) -> int:
        return CATALOG_BYTES + BYTES_PER_ROW * len(self.entries)

    @property
    def used_bytes(self) -> int:
        return self.pack_bytes + self.catalog_bytes

    def ticks(self, n: int) -> range:
        """One for each block of a batch, later than every use so far.

        The first block gets the last one: a block is of no use without those before it.
        """
        self.clock += n
        return range(self.clock, self.clock - n, -1)

    def add_pack(self, number: int, size: int) -> None:
        self.packs[number] = Pack(size)
        self.pack_bytes += size

    def add(self, key: BlockKey, entry: Entry) -> None:
        """The block is in ``entry`` from now on; wherever else it was, those bytes are dead."""
        self.remove(key)
        self.entries[key] = entry
        pack = self.packs[entry.pack]
        pack.keys.add(key)
        pack.live_bytes += entry.length
        self.live_bytes += entry.length
        self.clock = max(self.clock, entry.last_used)

    def remove(self, key: BlockKey) -> Entry | None:
        """Forget a block; its pack stays, even empty. What was known, if anything."""
        entry = self.entries.pop(key, None)
        if entry:
            pack = self.packs[entry.pack]
            pack.keys.discard(key)
            pack.live_bytes -= entry.length
            self.live_bytes -= entry.length
        return entry

    def remove_pack(self, number: int) -> list[BlockKey]:
        """Forget a pack and its blocks, which are returned."""
        keys = list(self.packs[number].keys)
        for key in keys:
            self.remove(key)
        self.pack_bytes -= self.packs.pop(number).size
        return keys

    def empty_packs(self) -> list[int]:
        return [number for number, pack in self.packs.items() if not pack.keys]

    def least_used(self) -> list[BlockKey]:
        """Least recently used first, and of one batch the last first."""
        return sorted(self.entries, key=lambda key: self.entries[key].last_used)

    def cost(self, keys: Iterable[BlockKey]) -> int:
        """Bytes that these blocks take, without the dead bytes beside them."""
        return sum(self.entries[key].length + BYTES_PER_ROW for key in keys)

    def check_invariants(self) -> None:
        assert self.pack_bytes == sum(pack.size for pack in self.packs.values())
        assert self.live_bytes == sum(entry.length for entry in self.entries.values())
        assert sum(len(pack.keys) for pack in self.packs.values()) == len(self.entries)
        for number, pack in self.packs.items():
            places = sorted((self.entries[key].offset, self.entries[key].length) for key in pack.keys)
            assert all(self.entries[key].pack == number for key in pack.keys)
            assert pack.live_bytes == sum(length for _, length in places)
            ends = [0, *(offset + length for offset, length in places)]
            assert all(offset >= end for (offset, _), end in zip(places, ends, strict=False)), "blocks overlap"
            assert ends[-1] <= pack.size
        assert all(entry.last_used <= self.clock for entry in self.entries.values())
