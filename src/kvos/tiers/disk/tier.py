"""The disk tier: stores batches as packs, loads blocks verified, and keeps within its capacity.

The index in memory is the truth; the catalog follows it in transactions, and whatever it could not be told yet is kept
until the next one. A block is in the index only after its pack is durable and its row is committed.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import filelock
import numpy as np

from kvos.errors import InvalidConfigError, InvalidInputError
from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage
from kvos.tiers.codec import Codec
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES, Entry, Index
from kvos.tiers.disk.opening import open_folder
from kvos.tiers.disk.pack import NAME_BYTES, Record, encode_record, pack_path, pread_all, read_record, write_pack

__all__ = ["DiskTier"]

log = logging.getLogger(__name__)


def _lock_folder(folder: Path) -> filelock.BaseFileLock:
    """Make the folder, for its owner only, and take its lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = filelock.FileLock(folder / "lock", mode=0o600, thread_local=False)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InvalidConfigError(
            f"the disk cache {folder} is in use by another process; close that one, or choose another folder"
        ) from None
    except OSError as error:
        raise InvalidConfigError(f"the disk cache {folder} cannot be used: {error}; choose another folder") from error
    return lock


class DiskTier(Tier):
    """Blocks in files of one folder, which one process at a time has open. Any thread; verbs wait for each other.

    ``contains`` and ``usage`` do no I/O and don't wait.

    Raises:
        InvalidConfigError: the folder is in use or cannot be used, or the capacity holds no block at all.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        bytes_per_block: int,
        block_size: int,
        codec: Codec,
        pack_bytes: int = 64 << 20,
    ) -> None:
        if capacity_bytes <= CATALOG_BYTES:
            raise InvalidConfigError(f"a disk cache needs more than {CATALOG_BYTES} bytes, not {capacity_bytes}")
        if len(codec.name.encode()) > NAME_BYTES:
            raise InvalidConfigError(f"the codec name {codec.name!r} is longer than {NAME_BYTES} bytes")
        self._folder = folder
        self._capacity = capacity_bytes
        self._bytes_per_block = bytes_per_block
        self._block_size = block_size
        self._codec = codec
        self._pack_bytes = pack_bytes
        self._counters: Counter[str] = Counter()
        self._mutex = threading.RLock()
        self._closed = False
        self._file_lock = _lock_folder(folder)
        try:
            opened = open_folder(folder, self._counters)
        except (OSError, sqlite3.Error) as error:
            self._file_lock.release()
            raise InvalidConfigError(f"the disk cache {folder} cannot be opened: {error}; choose another") from error
        self._catalog, self._index, self._leftovers = opened.catalog, opened.index, opened.leftovers
        self._gone, self._changed, self._next_pack = opened.gone, opened.changed, opened.next_pack
        self._make_room(0, 0)
        self._flush()

    # --- verbs ----------------------------------------------------------------------------------------------------

    def store(self, batch: BlockBatch) -> list[Stored]:
        if batch.data.shape != (len(batch), self._bytes_per_block):
            raise InvalidInputError(f"blocks of {self._bytes_per_block} bytes are needed, not {batch.data.shape}")
        self._check_tokens(batch.blocks)
        with self._mutex:
            if self._closed:
                return [Stored.FAILED] * len(batch)
            results = self._store(batch)
            for result in results:
                self._counters[result.name.lower()] += 1
            return results

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        self._check_tokens(wanted)
        with self._mutex:
            results = [Loaded.MISS] * len(wanted)
            packs: dict[int, list[int]] = {}
            for row, key in enumerate(wanted.keys):
                if entry := self._index.entries.get(key):
                    packs.setdefault(entry.pack, []).append(row)
            tick = self._index.tick()
            for pack, rows in packs.items():
                rows.sort(key=lambda row: self._index.entries[wanted.keys[row]].offset)
                self._load_from(pack, rows, wanted, out, results)
            for key, result in zip(wanted.keys, results, strict=True):
                if result is Loaded.HIT:
                    self._counters["hits"] += 1
                    self._touch(key, tick, hits=1)
                elif result is Loaded.MISS:
                    self._counters["misses"] += 1
            return results

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self._index.entries for key in keys]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._mutex:
            self._forget(keys)
            self._flush()
            self._delete_empty_packs()

    def clear(self) -> None:
        """Forget all blocks and delete their files, and whatever else lay in the folder unused."""
        self.drop(list(self._index.entries))
        with self._mutex:
            self._delete_leftovers()

    def verify(self) -> int:
        """Read every block and drop those that are damaged: how many. Takes as long as reading the whole tier."""
        with self._mutex:
            damaged = 0
            for pack, content in list(self._index.packs.items()):
                keys = list(content.keys)
                try:
                    bad = [key for key, found in zip(keys, self._read(pack, keys), strict=True) if found is None]
                except FileNotFoundError:
                    bad = keys
                except OSError as error:
                    self._failed("verify", error)
                    continue
                damaged += self._drop_damaged(bad, pack)
            self._flush()
            self._delete_empty_packs()
            return damaged

    def usage(self) -> TierUsage:
        counters = {name: count for name, count in self._counters.copy().items() if count}
        return TierUsage(self._capacity, self._used_bytes, len(self._index.entries), counters)

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._flush()
            self._index, self._leftovers = Index(), {}
            self._catalog.close()
            self._file_lock.release()

    def check_invariants(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._index.check_invariants()
            assert self._used_bytes <= self._capacity
            assert not list(self._folder.glob("*.tmp"))
            files = set(self._folder.glob("*.pack")) - set(self._leftovers)
            assert files <= {pack_path(self._folder, number) for number in self._index.packs}
            rows, nonsense = self._catalog.rows()
            assert nonsense == 0
            assert set(self._index.entries) <= set(rows) | self._changed
            assert set(rows) - set(self._index.entries) <= self._gone

    # --- storing --------------------------------------------------------------------------------------------------

    def _store(self, batch: BlockBatch) -> list[Stored]:
        tick = self._index.tick()
        new: dict[BlockKey, int] = {}
        present = set()
        results = [Stored.PRESENT] * len(batch)
        for row, key in enumerate(batch.blocks.keys):
            if key in self._index.entries:
                self._touch(key, tick)
                present.add(key)
            else:
                new.setdefault(key, row)
        if not new:
            return results
        records = self._encode(batch, new)
        budget = self._capacity - CATALOG_BYTES - self._index.cost(present)
        refused = set()
        for key, record in list(records.items()):
            budget -= len(record) + BYTES_PER_ROW
            if budget < 0:
                budget += len(record) + BYTES_PER_ROW
                refused.add(key)
                del records[key]
        outcome = self._write(records, tick) if records else Stored.NO_ROOM
        for row, key in enumerate(batch.blocks.keys):
            if key in refused:
                results[row] = Stored.NO_ROOM
            elif key in new and (new[key] == row or outcome is Stored.FAILED):
                results[row] = outcome
        return results

    def _encode(self, batch: BlockBatch, new: dict[BlockKey, int]) -> dict[BlockKey, bytes]:
        rows = list(new.values())
        payloads = self._codec.encode(np.ascontiguousarray(batch.data[rows]))
        blocks = batch.blocks
        return {
            blocks.keys[row]: encode_record(
                self._codec.name, blocks.keys[row], blocks.parents[row], blocks.tokens[row], payload
            )
            for row, payload in zip(rows, payloads, strict=True)
        }

    def _write(self, records: dict[BlockKey, bytes], tick: int) -> Stored:
        """Make room, write packs, commit, publish; after a failure the blocks are not there."""
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
                    entries[key] = Entry(number, offset, len(record), tick)
                    offset += len(record)
            self._commit(entries)
        except (OSError, sqlite3.Error) as error:
            self._failed("store", error)
            for number, length in written.items():
                self._unlink(pack_path(self._folder, number), length)
            return Stored.FAILED
        self._publish(written, entries)
        return Stored.STORED

    def _publish(self, packs: dict[int, int], entries: dict[BlockKey, Entry]) -> None:
        for number, length in packs.items():
            self._index.add_pack(number, length)
        for key, entry in entries.items():
            self._index.add(key, entry)

    def _parts(self, records: list[tuple[BlockKey, bytes]]) -> list[list[tuple[BlockKey, bytes]]]:
        """Divided so that no part has more than ``pack_bytes``, except for one record that is larger."""
        parts: list[list[tuple[BlockKey, bytes]]] = []
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

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def _used_bytes(self) -> int:
        return self._index.used_bytes + sum(tuple(self._leftovers.values()))

    def _make_room(self, size: int, rows: int) -> bool:
        """Evict until ``size`` bytes of packs and ``rows`` rows fit; whether they do."""
        limit = self._capacity - size - rows * BYTES_PER_ROW
        if self._used_bytes > limit:
            self._delete_leftovers()
        if self._used_bytes > limit:
            self._evict(limit)
        return self._used_bytes <= limit

    def _evict(self, limit: int) -> None:
        """Least recently used blocks go until the others' bytes fit, then packs lose their dead bytes."""
        victims = []
        bytes_left = self._index.live_bytes + self._index.catalog_bytes
        for key in self._index.least_used():
            if bytes_left <= limit:
                break
            bytes_left -= self._index.cost([key])
            victims.append(key)
        self._counters["evicted"] += len(victims)
        self._forget(victims)
        self._flush()
        self._delete_empty_packs()
        while self._used_bytes > limit and self._index.packs:
            dead, number = max((pack.size - pack.live_bytes, number) for number, pack in self._index.packs.items())
            if not dead:
                break
            self._compact(number)

    def _compact(self, number: int) -> None:
        """Move a pack's blocks to a new one without the dead bytes; if that cannot be done, they are evicted."""
        keys = sorted(self._index.packs[number].keys, key=lambda key: self._index.entries[key].offset)
        try:
            found = self._read(number, keys)
            self._drop_damaged([key for key, data in zip(keys, found, strict=True) if data is None], number)
            whole = {key: data[0] for key, data in zip(keys, found, strict=True) if data}
            entries, offset, target = {}, 0, self._number()
            for key, record in whole.items():
                old = self._index.entries[key]
                entries[key] = Entry(target, offset, len(record), old.last_used, old.hits)
                offset += len(record)
            if whole:
                write_pack(pack_path(self._folder, target), list(whole.values()))
                self._publish({target: offset}, entries)
                self._changed |= entries.keys()
            self._counters["compacted"] += 1
        except OSError as error:
            self._failed("compaction", error)
            self._counters["evicted"] += len(self._index.packs[number].keys)
            self._forget(list(self._index.packs[number].keys))
        self._flush()
        self._delete_empty_packs()

    def _delete_empty_packs(self) -> None:
        for number in self._index.empty_packs():
            size = self._index.packs[number].size
            self._index.remove_pack(number)
            self._unlink(pack_path(self._folder, number), size)

    def _delete_leftovers(self) -> None:
        for path, size in list(self._leftovers.items()):
            del self._leftovers[path]
            self._unlink(path, size)

    def _unlink(self, path: Path, size: int) -> None:
        """Delete a file; if that fails it stays counted, and is tried again when room is needed."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._failed("deletion", error)
            self._leftovers[path] = size

    # --- loading --------------------------------------------------------------------------------------------------

    def _read(self, pack: int, keys: Sequence[BlockKey]) -> list[tuple[bytes, Record] | None]:
        """Bytes and record of each block of a pack; None where they are damaged or not this key's. Raises OSError."""
        handle = os.open(pack_path(self._folder, pack), os.O_RDONLY | os.O_CLOEXEC)
        try:
            found: list[tuple[bytes, Record] | None] = []
            for key in keys:
                entry = self._index.entries[key]
                data = pread_all(handle, entry.length, entry.offset)
                record = read_record(data)
                ours = record is not None and record.key == key and record.codec == self._codec.name
                found.append((data, record) if record is not None and ours else None)
            return found
        finally:
            os.close(handle)

    def _load_from(
        self, pack: int, rows: list[int], wanted: BlockRequest, out: PayloadBytes, results: list[Loaded]
    ) -> None:
        """Load blocks of one pack, by offset; sets their results."""
        try:
            found = self._read(pack, [wanted.keys[row] for row in rows])
        except FileNotFoundError:
            self._drop_damaged(list(self._index.packs[pack].keys), pack)
            return
        except OSError as error:
            self._failed("load", error)
            for row in rows:
                results[row] = Loaded.FAILED
            return
        good: list[tuple[int, memoryview]] = []
        for row, data in zip(rows, found, strict=True):
            results[row] = Loaded.DAMAGED
            if data and data[1].parent == wanted.parents[row] and np.array_equal(data[1].tokens, wanted.tokens[row]):
                good.append((row, data[1].payload))
        if good:
            order = [row for row, _ in good]
            content = np.empty((len(good), self._bytes_per_block), np.uint8)
            decoded = self._codec.decode([payload for _, payload in good], content)
            for place, row in enumerate(order):
                if decoded[place]:
                    out[row] = content[place]
                    results[row] = Loaded.HIT
        self._drop_damaged([wanted.keys[row] for row in rows if results[row] is Loaded.DAMAGED], pack)

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _check_tokens(self, blocks: BlockRequest) -> None:
        if blocks.tokens.shape != (len(blocks), self._block_size) or len(blocks.parents) != len(blocks):
            raise InvalidInputError(f"{len(blocks)} blocks of {self._block_size} tokens and their parents are needed")

    def _touch(self, key: BlockKey, tick: int, hits: int = 0) -> None:
        entry = self._index.entries[key]
        entry.last_used = tick
        entry.hits += hits
        self._changed.add(key)

    def _forget(self, keys: Iterable[BlockKey]) -> int:
        gone = {key for key in keys if self._index.remove(key)}
        self._gone |= gone
        return len(gone)

    def _drop_damaged(self, keys: Sequence[BlockKey], pack: int) -> int:
        dropped = self._forget(keys)
        if dropped:
            self._counters["damaged"] += dropped
            log.warning("%d damaged blocks in %s: dropped", dropped, pack_path(self._folder, pack))
        return dropped

    def _failed(self, what: str, error: Exception) -> None:
        self._counters[f"{what}_errors"] += 1
        log.warning("disk cache %s: %s failed: %s", self._folder, what, error)

    def _commit(self, new: dict[BlockKey, Entry]) -> None:
        """One transaction with everything that the catalog does not know yet. Raises sqlite3.Error."""
        known = {key: self._index.entries[key] for key in self._changed if key in self._index.entries}
        self._catalog.commit(gone=self._gone, changed=(known | new).items())
        self._gone.clear()
        self._changed.clear()

    def _flush(self) -> None:
        try:
            if self._gone or self._changed:
                self._commit({})
        except sqlite3.Error as error:
            self._failed("catalog", error)
