"""The packs of a disk tier with their catalog: writes, reads, forgets and makes room. Knows records, no codec's bytes.

The index in memory is the truth; the catalog follows it in transactions, and whatever it could not be told yet is kept
until the next one. A block is in the index only after its pack is durable and its row is committed.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvos.tiers.base import BlockKey
from kvos.tiers.disk.catalog import Catalog, is_damage
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES, Entry, Index
from kvos.tiers.disk.opening import open_folder
from kvos.tiers.disk.pack import EncodedRecord, Record, pack_path, pread_all, read_ahead, read_record, write_pack

__all__ = ["Shelf"]

log = logging.getLogger(__name__)

PACKS_AT_LEAST = 16
"""A full tier has so many: as much as one of them takes is kept free."""


MOST_BUFFER_BYTES = 32 << 20
"""Larger reads, of whole packs, get memory of their own."""

SPARSE = 2
"""Blocks that lie so many times as far apart as if nothing were between them are not worth reading ahead."""


class Shelf:
    """Blocks as records in packs, within a capacity. Called under the tier's lock; ``used_bytes`` also without.

    Attributes:
        index: what is where; read it, change it through the shelf.
        room: bytes for blocks, leftovers and the catalog. The rest of the capacity is for the copy of a pack that loses
            its dead bytes, so that no more than the capacity is ever taken.
        lost_in: damaged blocks that no row named, by the name of their file, as found when this was opened.

    Raises:
        OSError, sqlite3.Error: the folder cannot be opened. Later such errors are counted and logged instead.
    """

    def __init__(
        self, folder: Path, *, capacity_bytes: int, pack_bytes: int, codec: str, counters: Counter[str]
    ) -> None:
        self._folder = folder
        self._capacity = capacity_bytes
        self._pack_bytes = max(0, min(pack_bytes, (capacity_bytes - CATALOG_BYTES) // PACKS_AT_LEAST))
        self.room = capacity_bytes - self._pack_bytes
        self._codec = codec
        self._buffer = bytearray()
        self._counters = counters
        opened = open_folder(folder, counters)
        self._catalog, self.index, self._leftovers = opened.catalog, opened.index, opened.leftovers
        self._gone, self._changed, self._next_pack = opened.gone, opened.changed, opened.next_pack
        self.lost_in = opened.lost_in
        self._catalog_is_broken = False
        self.flush()
        self.delete_empty_packs()
        self._make_room(0, 0)

    def close(self) -> None:
        """Tell the catalog everything and let go of it; the shelf is empty from then on."""
        self.flush()
        self._catalog.close()
        self.index, self._leftovers = Index(), {}

    def check_invariants(self) -> None:
        self.index.check_invariants()
        assert self.used_bytes <= self._capacity
        assert not list(self._folder.glob("*.tmp"))
        files = set(self._folder.glob("*.pack")) - set(self._leftovers)
        assert files <= {pack_path(self._folder, number) for number in self.index.packs}
        rows, nonsense = self._catalog.rows()
        assert nonsense == 0
        assert set(self.index.entries) <= set(rows) | self._changed
        assert set(rows) - set(self.index.entries) <= self._gone

    # --- reading and writing --------------------------------------------------------------------------------------

    def write(self, records: dict[BlockKey, EncodedRecord], ticks: Mapping[BlockKey, int]) -> bool:
        """Make room, write packs, commit, publish; False if that failed, and then the blocks are not there."""
        size = sum(map(len, records.values()))
        written: dict[int, int] = {}
        entries: dict[BlockKey, Entry] = {}
        try:
            if not self._make_room(size, len(records)):
                raise OSError(errno.ENOSPC, "files that hold no room for blocks cannot be deleted")
            for part in self._parts(list(records.items())):
                number = self._number()
                written[number] = sum(len(record) for _, record in part)
                write_pack(pack_path(self._folder, number), [record for _, record in part])
                offset = 0
                for key, record in part:
                    entries[key] = Entry(number, offset, len(record), ticks[key])
                    offset += len(record)
            self._commit(entries)
        except (OSError, sqlite3.Error) as error:
            self.failed("store", error)
            for number, length in written.items():
                self._unlink(pack_path(self._folder, number), length)
            return False
        self._publish(written, entries)
        return True

    def _publish(self, packs: dict[int, int], entries: dict[BlockKey, Entry]) -> None:
        for number, length in packs.items():
            self.index.add_pack(number, length)
        for key, entry in entries.items():
            self.index.add(key, entry)

    def _parts(self, records: list[tuple[BlockKey, EncodedRecord]]) -> list[list[tuple[BlockKey, EncodedRecord]]]:
        """Divided so that no part has more than ``pack_bytes``, except for one record that is larger."""
        parts: list[list[tuple[BlockKey, EncodedRecord]]] = []
        room = -1
        for key, record in records:
            if room < len(record):
                parts.append([])
                room = self._pack_bytes
            parts[-1].append((key, record))
            room -= len(record)
        return parts

    def _number(self) -> int:
        self._next_pack += 1
        return self._next_pack - 1

    def read(self, pack: int, keys: Sequence[BlockKey]) -> list[tuple[memoryview, Record] | None]:
        """Bytes and record of each block of a pack; None where they are damaged or not this key's. Raises OSError.

        They are views of a buffer that the next read uses again: new memory would take as long as the reading.
        """
        entries = [self.index.entries[key] for key in keys]
        buffer = self._buffer_for(sum(entry.length for entry in entries))
        handle = os.open(pack_path(self._folder, pack), os.O_RDONLY | os.O_CLOEXEC)
        try:
            first = min((entry.offset for entry in entries), default=0)
            end = max((entry.offset + entry.length for entry in entries), default=0)
            if end - first <= SPARSE * len(buffer):
                read_ahead(handle, end - first, first)
            found: list[tuple[memoryview, Record] | None] = []
            for key, entry in zip(keys, entries, strict=True):
                data, buffer = buffer[: entry.length], buffer[entry.length :]
                record = read_record(data) if pread_all(handle, data, entry.offset) == entry.length else None
                ours = record is not None and record.key == key and record.codec == self._codec
                found.append((data, record) if record is not None and ours else None)
            return found
        finally:
            os.close(handle)

    def _buffer_for(self, size: int) -> memoryview:
        if size > MOST_BUFFER_BYTES:
            return memoryview(bytearray(size))
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Packs, leftover files, and an estimate of the catalog."""
        return self.index.used_bytes + sum(tuple(self._leftovers.values()))

    def _make_room(self, size: int, rows: int) -> bool:
        """Evict until ``size`` bytes of packs and ``rows`` rows fit; whether they do."""
        limit = self.room - size - rows * BYTES_PER_ROW
        if self.used_bytes > limit:
            self.delete_leftovers()
        if self.used_bytes > limit:
            self._evict(limit)
        return self.used_bytes <= limit

    def _evict(self, limit: int) -> None:
        """Least recently used blocks go until the others' bytes fit, then packs lose their dead bytes."""
        # What is over its capacity already, since it was opened with a smaller one, may be over it by a copy, too.
        ceiling = self._capacity if self.used_bytes <= self._capacity else float("inf")
        victims = []
        bytes_left = self.index.live_bytes + self.index.catalog_bytes
        for key in self.index.least_used():
            if bytes_left <= limit:
                break
            bytes_left -= self.index.cost([key])
            victims.append(key)
        self._counters["evicted"] += len(victims)
        self.forget(victims)
        self.flush()
        self.delete_empty_packs()
        while self.used_bytes > limit and self.index.packs:
            dead, number = max((pack.size - pack.live_bytes, number) for number, pack in self.index.packs.items())
            if not dead:
                break
            # Only the copy of a pack from a time with more capacity is too large.
            if self.used_bytes + self.index.packs[number].live_bytes > ceiling:
                self._evict_pack(number)
            else:
                self._compact(number)
            self.flush()
            self.delete_empty_packs()

    def _evict_pack(self, number: int) -> None:
        keys = list(self.index.packs[number].keys)
        self._counters["evicted"] += len(keys)
        self.forget(keys)

    def _compact(self, number: int) -> None:
        """Move a pack's blocks to a new one without the dead bytes; if that cannot be done, they are evicted."""
        keys = sorted(self.index.packs[number].keys, key=lambda key: self.index.entries[key].offset)
        try:
            found = self.read(number, keys)
            self.drop_damaged([key for key, data in zip(keys, found, strict=True) if data is None], number)
            whole = {key: data[0] for key, data in zip(keys, found, strict=True) if data}
            entries, offset, target = {}, 0, self._number()
            for key, record in whole.items():
                old = self.index.entries[key]
                entries[key] = Entry(target, offset, len(record), old.last_used, old.hits)
                offset += len(record)
            if whole:
                write_pack(pack_path(self._folder, target), [EncodedRecord(b"", data) for data in whole.values()])
                self._publish({target: offset}, entries)
                self._changed |= entries.keys()
            self._counters["compacted"] += 1
        except FileNotFoundError:
            self.drop_damaged(keys, number)
        except OSError as error:
            self.failed("compaction", error)
            self._evict_pack(number)

    def collect(self) -> None:
        """Give back what no block needs: leftover files, empty packs, and dead bytes in packs."""
        self.delete_leftovers()
        self.delete_empty_packs()
        for number in [number for number, pack in self.index.packs.items() if pack.live_bytes < pack.size]:
            if self.used_bytes + self.index.packs[number].live_bytes <= self._capacity:
                self._compact(number)
                self.flush()
                self.delete_empty_packs()

    def delete_empty_packs(self) -> None:
        """Delete packs that hold no block any more."""
        for number in self.index.empty_packs():
            size = self.index.packs[number].size
            self.index.remove_pack(number)
            self._unlink(pack_path(self._folder, number), size)

    def delete_leftovers(self) -> None:
        """Delete files that hold no block of ours."""
        for path, size in list(self._leftovers.items()):
            del self._leftovers[path]
            self._unlink(path, size)

    def _unlink(self, path: Path, size: int) -> None:
        """Delete a file; if that fails it stays counted, and is tried again when room is needed."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.failed("deletion", error)
            self._leftovers[path] = size

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def touch(self, key: BlockKey, tick: int, hits: int = 0) -> None:
        """A block was used, if it is still there; the catalog learns of it with the next commit."""
        entry = self.index.entries.get(key)
        if entry is None:
            return
        entry.last_used = tick
        entry.hits += hits
        self._changed.add(key)

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """Forget blocks, not yet their packs; how many were there."""
        gone = {key for key in keys if self.index.remove(key)}
        self._gone |= gone
        return len(gone)

    def drop_damaged(self, keys: Sequence[BlockKey], pack: int) -> int:
        """Forget damaged blocks of a pack, count and log them; how many were there."""
        dropped = self.forget(keys)
        if dropped:
            self._counters["damaged"] += dropped
            log.warning("%d damaged blocks in %s: dropped", dropped, pack_path(self._folder, pack))
        return dropped

    def failed(self, what: str, error: Exception) -> None:
        """Count and log an error of the world."""
        self._counters[f"{what}_errors"] += 1
        log.warning("disk cache %s: %s failed: %s", self._folder, what, error)

    def _commit(self, new: dict[BlockKey, Entry]) -> None:
        """One transaction with everything that the catalog does not know yet. Raises OSError, sqlite3.Error."""
        if not self._catalog_is_broken:
            known = {key: self.index.entries[key] for key in self._changed if key in self.index.entries}
            try:
                self._catalog.commit(gone=self._gone, changed=(known | new).items())
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                log.warning("the catalog in %s is damaged (%s): writing it anew", self._folder, error)
                self._counters["catalogs_rebuilt"] += 1
                self._catalog_is_broken = True
        if self._catalog_is_broken:
            self._write_anew(new)
        self._gone.clear()
        self._changed.clear()

    def _write_anew(self, new: dict[BlockKey, Entry]) -> None:
        """Another catalog in place of a broken one; if that fails, the next commit tries again. As ``_commit``."""
        self._catalog.close()
        Catalog.remove(self._folder)
        self._catalog = Catalog(self._folder)
        self._catalog.commit(gone=(), changed=(self.index.entries | new).items())
        self._catalog_is_broken = False

    def flush(self) -> None:
        """Tell the catalog what it does not know yet; if that fails, it is told later."""
        try:
            if self._gone or self._changed:
                self._commit({})
        except (OSError, sqlite3.Error) as error:
            self.failed("catalog", error)
