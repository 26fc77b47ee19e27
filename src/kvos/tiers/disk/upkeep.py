"""A disk tier's folder in the hands of somebody who looks after it: no model, no codec, and nobody else meanwhile."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock

from kvos.errors import InvalidConfigError
from kvos.tiers.base import BlockKey
from kvos.tiers.disk.about import read_about
from kvos.tiers.disk.catalog import NAME as CATALOG_NAME
from kvos.tiers.disk.pack import codec_of, pack_path
from kvos.tiers.disk.shelf import Shelf
from kvos.tiers.disk.survey import survey_folder

__all__ = ["Damage", "FolderUpkeep", "locked_folder"]

UNBOUNDED = 1 << 62
CHUNK = 256
"""Blocks that are read at once: bounds the memory, and how long Ctrl-C waits."""

PACK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not what was written. ``where`` names the file, and the block in it if it is one."""

    where: str
    what: str


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep every other process away from a disk tier's folder.

    Raises:
        InvalidConfigError: a process uses it; the text says what to do.
        OSError: it cannot be locked.
    """
    lock = filelock.FileLock(folder / "lock", mode=0o600, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise InvalidConfigError(
            f"a running kvos process uses the disk cache {folder}: end it (`kvos stats` shows which ones run) and try "
            "again; meanwhile `kvos cache show` works"
        ) from None
    try:
        yield
    finally:
        lock.release()


class FolderUpkeep:
    """What can be done for a folder without using its blocks. The caller holds ``locked_folder``.

    Whatever ends it early (Ctrl-C, a kill) leaves the folder as sound as it was.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def verify(self, progress: Callable[[int], None]) -> tuple[int, list[Damage]]:
        """Read every block; drop what is damaged. How many blocks were read, and what was found.

        Args:
            progress: called with the bytes read so far.

        Raises:
            OSError, sqlite3.Error: the folder cannot be opened.
        """
        counters: Counter[str] = Counter()
        named = _catalog_keys(self._folder)
        with self._shelf(UNBOUNDED, counters) as shelf:
            found = []
            if counters["catalogs_rebuilt"]:
                found.append(Damage(CATALOG_NAME, "could not be read; it was written anew from the packs"))
            lost = {key: pack for key, pack in named.items() if key not in shelf.index.entries}
            found += [Damage(_place(pack, key), "its file has lost these bytes") for key, pack in lost.items()]
            for name, blocks in shelf.lost_in.items():
                found.append(Damage(name, f"was in no catalog, and blocks of it were damaged: {blocks}"))
            read = 0
            for pack in sorted(shelf.index.packs):
                keys = sorted(shelf.index.packs[pack].keys, key=lambda key: shelf.index.entries[key].offset)
                for first in range(0, len(keys), CHUNK):
                    chunk = keys[first : first + CHUNK]
                    size = sum(shelf.index.entries[key].length for key in chunk)
                    found += _verify(shelf, pack, chunk)
                    read += size
                    progress(read)
                shelf.flush()
            shelf.delete_empty_packs()
            return len(named.keys() | shelf.index.entries.keys()), found

    def collect(self, capacity_bytes: int) -> tuple[int, int]:
        """Bring it within its capacity, and rewrite packs in which dropped blocks take room.

        Returns:
            Bytes that were freed, and blocks that had to leave for the capacity.

        Raises:
            OSError, sqlite3.Error: the folder cannot be opened.
        """
        counters: Counter[str] = Counter()
        before = survey_folder(self._folder).used_bytes
        with self._shelf(capacity_bytes, counters) as shelf:
            shelf.collect()
            return max(0, before - shelf.used_bytes), counters["evicted"]

    def clear(self) -> None:
        """Delete everything but the lock. Raises OSError.

        The catalog goes first: packs without one are found again by whoever opens the folder, if this is cut short.
        """
        for pattern in (f"{CATALOG_NAME}*", "*.pack", "*.damaged", "*.tmp", "about.json*"):
            for path in sorted(self._folder.glob(pattern)):
                path.unlink(missing_ok=True)

    @contextmanager
    def _shelf(self, capacity_bytes: int, counters: Counter[str]) -> Iterator[Shelf]:
        shelf = Shelf(
            self._folder,
            capacity_bytes=capacity_bytes,
            pack_bytes=PACK_BYTES,
            codec=self._codec(),
            counters=counters,
        )
        try:
            yield shelf
        finally:
            shelf.close()

    def _codec(self) -> str:
        """The codec that the blocks were written with: all of a folder have the same."""
        about = read_about(self._folder)
        if about is not None:
            return about.codec
        for path in sorted(self._folder.glob("*.pack")):
            with suppress(OSError):
                if name := codec_of(path):
                    return name
        return ""


def _verify(shelf: Shelf, pack: int, keys: Sequence[BlockKey]) -> list[Damage]:
    """Read blocks of one pack and drop the damaged ones."""
    places = {key: f"{_place(pack, key)}, at byte {shelf.index.entries[key].offset:,}" for key in keys}
    try:
        bad = [key for key, found in zip(keys, shelf.read(pack, keys), strict=True) if found is None]
    except FileNotFoundError:
        bad = list(keys)
    except OSError as error:  # perhaps a passing trouble: nothing is dropped
        return [Damage(pack_path(Path(), pack).name, f"cannot be read: {error}")]
    shelf.drop_damaged(bad, pack)
    return [Damage(places[key], "is not what was written") for key in bad]


def _place(pack: int, key: BlockKey) -> str:
    return f"{pack_path(Path(), pack).name}, block {key[:6].hex()}"


def _catalog_keys(folder: Path) -> dict[BlockKey, int]:
    """Every block that the catalog names, with its pack; none if it cannot be read."""
    path = folder / CATALOG_NAME
    found: dict[BlockKey, int] = {}
    with suppress(sqlite3.Error):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            for key, pack in db.execute("SELECT key, pack FROM blocks"):
                if isinstance(key, bytes) and isinstance(pack, int) and pack >= 0:
                    found[BlockKey(key)] = pack
        finally:
            db.close()
    return found
