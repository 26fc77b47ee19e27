"""The disk tier: stores batches as packs, loads blocks verified, and keeps within its capacity."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import filelock
import numpy as np

from kvos.errors import InvalidConfigError, InvalidInputError
from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage
from kvos.tiers.codec import Codec
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES
from kvos.tiers.disk.pack import NAME_BYTES, EncodedRecord, encode_record
from kvos.tiers.disk.shelf import Shelf

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


def _number(path: Path) -> int | None:
    """Of the file on its file system; None if there is none. Raises OSError."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


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
        self._pack_bytes = pack_bytes
        self._capacity = capacity_bytes
        self._bytes_per_block = bytes_per_block
        self._block_size = block_size
        self._codec = codec
        self.lossless = codec.lossless
        self._counters: Counter[str] = Counter()
        self._mutex = threading.RLock()
        self._closed = False
        self._file_lock = _lock_folder(folder)
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._file_lock.release()
            raise InvalidConfigError(f"the disk cache {folder} cannot be opened: {error}; choose another") from error

    def _open(self) -> None:
        """Raises OSError, sqlite3.Error."""
        self._lock_number = _number(self._folder / "lock")
        self._shelf = Shelf(
            self._folder,
            capacity_bytes=self._capacity,
            pack_bytes=self._pack_bytes,
            codec=self._codec.name,
            counters=self._counters,
        )

    def _is_lost(self) -> bool:
        """Whether somebody has deleted the folder, or its lock, so that another process may take it now."""
        return _number(self._folder / "lock") != self._lock_number

    def _begin_anew(self) -> None:
        """Make the folder again and go on with what is in it, unless another process has it. Raises as ``_open``."""
        log.warning("the disk cache %s was deleted under its user: making it again", self._folder)
        self._counters["folders_made_again"] += 1
        lock = _lock_folder(self._folder)
        self._shelf.close()
        self._file_lock.release()
        self._file_lock = lock
        self._open()

    # --- verbs ----------------------------------------------------------------------------------------------------

    def store(self, batch: BlockBatch) -> list[Stored]:
        if batch.data.shape != (len(batch), self._bytes_per_block):
            raise InvalidInputError(f"blocks of {self._bytes_per_block} bytes are needed, not {batch.data.shape}")
        self._check_tokens(batch.blocks)
        with self._mutex:
            if self._closed:
                return [Stored.FAILED] * len(batch)
            try:
                if self._is_lost():
                    self._begin_anew()
                results = self._store(batch)
            except (InvalidConfigError, OSError, sqlite3.Error) as error:
                self._shelf.failed("store", error)
                results = [Stored.FAILED] * len(batch)
            for result in results:
                self._counters[result.name.lower()] += 1
            return results

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        self._check_tokens(wanted)
        with self._mutex:
            results = [Loaded.MISS] * len(wanted)
            packs: dict[int, list[int]] = {}
            for row, key in enumerate(wanted.keys):
                if entry := self._shelf.index.entries.get(key):
                    packs.setdefault(entry.pack, []).append(row)
            ticks = self._shelf.index.ticks(len(wanted))
            for pack, rows in packs.items():
                rows.sort(key=lambda row: self._shelf.index.entries[wanted.keys[row]].offset)
                self._load_from(pack, rows, wanted, out, results)
            for key, result, tick in zip(wanted.keys, results, ticks, strict=True):
                if result is Loaded.HIT:
                    self._counters["hits"] += 1
                    self._shelf.touch(key, tick, hits=1)
                elif result is Loaded.MISS:
                    self._counters["misses"] += 1
            return results

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self._shelf.index.entries for key in keys]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._mutex:
            self._shelf.forget(keys)
            self._shelf.flush()
            self._shelf.delete_empty_packs()

    def clear(self) -> None:
        """Forget all blocks and delete their files, and whatever else lay in the folder unused."""
        with self._mutex:
            self.drop(list(self._shelf.index.entries))
            self._shelf.delete_leftovers()

    def verify(self) -> int:
        """Read every block and drop those that are damaged: how many. Takes as long as reading the whole tier."""
        with self._mutex:
            damaged = 0
            for pack, content in list(self._shelf.index.packs.items()):
                keys = list(content.keys)
                try:
                    bad = [key for key, found in zip(keys, self._shelf.read(pack, keys), strict=True) if found is None]
                except FileNotFoundError:
                    bad = keys
                except OSError as error:
                    self._shelf.failed("verify", error)
                    continue
                damaged += self._shelf.drop_damaged(bad, pack)
            self._shelf.flush()
            self._shelf.delete_empty_packs()
            return damaged

    def usage(self) -> TierUsage:
        counters = {name: count for name, count in self._counters.copy().items() if count}
        return TierUsage(self._capacity, self._shelf.used_bytes, len(self._shelf.index.entries), counters)

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            self._shelf.close()
            self._file_lock.release()

    def check_invariants(self) -> None:
        with self._mutex:
            if not self._closed:
                self._shelf.check_invariants()

    # --- storing --------------------------------------------------------------------------------------------------

    def _store(self, batch: BlockBatch) -> list[Stored]:
        ticks = self._shelf.index.ticks(len(batch))
        new: dict[BlockKey, int] = {}
        present = set()
        results = [Stored.PRESENT] * len(batch)
        for row, key in enumerate(batch.blocks.keys):
            if key in self._shelf.index.entries:
                self._shelf.touch(key, ticks[row])
                present.add(key)
            else:
                new.setdefault(key, row)
        if not new:
            return results
        records = self._encode(batch, new)
        budget = self._shelf.room - CATALOG_BYTES - self._shelf.index.cost(present)
        refused = set()
        for key, record in list(records.items()):
            budget -= len(record) + BYTES_PER_ROW
            if budget < 0:
                budget += len(record) + BYTES_PER_ROW
                refused.add(key)
                del records[key]
        stored = not records or self._shelf.write(records, {key: ticks[row] for key, row in new.items()})
        outcome = Stored.STORED if stored else Stored.FAILED
        for row, key in enumerate(batch.blocks.keys):
            if key in refused:
                results[row] = Stored.NO_ROOM
            elif key in new and (new[key] == row or outcome is Stored.FAILED):
                results[row] = outcome
        return results

    def _encode(self, batch: BlockBatch, new: dict[BlockKey, int]) -> dict[BlockKey, EncodedRecord]:
        rows = list(new.values())
        data = batch.data if rows == list(range(len(batch))) else batch.data[rows]
        payloads = self._codec.encode(np.ascontiguousarray(data))
        blocks = batch.blocks
        return {
            blocks.keys[row]: encode_record(
                self._codec.name, blocks.keys[row], blocks.parents[row], blocks.tokens[row], payload
            )
            for row, payload in zip(rows, payloads, strict=True)
        }

    # --- loading --------------------------------------------------------------------------------------------------

    def _load_from(
        self, pack: int, rows: list[int], wanted: BlockRequest, out: PayloadBytes, results: list[Loaded]
    ) -> None:
        """Load blocks of one pack, by offset; sets their results."""
        try:
            found = self._shelf.read(pack, [wanted.keys[row] for row in rows])
        except FileNotFoundError:
            self._shelf.drop_damaged(list(self._shelf.index.packs[pack].keys), pack)
            return
        except OSError as error:
            self._shelf.failed("load", error)
            for row in rows:
                results[row] = Loaded.FAILED
            return
        good: list[tuple[int, memoryview]] = []
        for row, data in zip(rows, found, strict=True):
            results[row] = Loaded.DAMAGED
            if data and data[1].parent == wanted.parents[row] and np.array_equal(data[1].tokens, wanted.tokens[row]):
                good.append((row, data[1].payload))
        decoded = self._decode_into([payload for _, payload in good], [row for row, _ in good], out)
        for (row, _), well in zip(good, decoded, strict=True):
            results[row] = Loaded.HIT if well else Loaded.DAMAGED
        self._shelf.drop_damaged([wanted.keys[row] for row in rows if results[row] is Loaded.DAMAGED], pack)

    def _decode_into(self, payloads: list[memoryview], rows: list[int], out: PayloadBytes) -> list[bool]:
        """Decode into these rows of ``out``; straight there if they are neighbours."""
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return self._codec.decode(payloads, out[rows[0] : rows[0] + len(rows)])
        content = np.empty((len(rows), self._bytes_per_block), np.uint8)
        decoded = self._codec.decode(payloads, content)
        out[rows] = content
        return decoded

    def _check_tokens(self, blocks: BlockRequest) -> None:
        if blocks.tokens.shape != (len(blocks), self._block_size) or len(blocks.parents) != len(blocks):
            raise InvalidInputError(f"{len(blocks)} blocks of {self._block_size} tokens and their parents are needed")
