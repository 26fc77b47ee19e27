"""The disk tier's index on disk: one SQLite table in WAL mode. Everything in it can be rebuilt from the packs.

Called under the tier's lock, from any thread. A commit that a power cut undoes is no loss: its pack is found and
adopted, so the log need not be synced at every commit.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvos.tiers.base import BlockKey
from kvos.tiers.disk.index import Entry
from kvos.tiers.disk.pack import FORMAT

__all__ = ["Catalog", "is_damage"]

NAME = "catalog.sqlite"
LOG_SUFFIX = "-wal"
LARGEST_NUMBER = 1 << 62
"""A row beyond it makes no sense; what counts on from below it stays within SQLite's integers."""

_OF_THE_WORLD = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
    }
)
_TABLE = """CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, pack INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    last_used INTEGER NOT NULL, hits INTEGER NOT NULL) WITHOUT ROWID"""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the catalog itself is broken, or taken away, and not the disk full or busy: then waiting won't help."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_FULL) & 0xFF not in _OF_THE_WORLD
    return isinstance(error, sqlite3.DatabaseError)


class Catalog:
    """Rows of blocks. Every method may raise sqlite3.Error or OSError, and has then changed nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        # SQLite gives its log the permissions of the database.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _prepare(db: sqlite3.Connection) -> None:
        # One process has the folder, so the log's index can be in its own memory. In a mapped file it would kill the
        # process, were the file cut short.
        db.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=8", "journal_size_limit=32768"):
            db.execute(f"PRAGMA {setting}").fetchall()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise sqlite3.DatabaseError(f"the catalog has format {version}, not {FORMAT}")
        db.execute(_TABLE)
        db.execute(f"PRAGMA user_version={FORMAT}")
        found = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            raise sqlite3.DatabaseError(str(found))

    @staticmethod
    def move_aside(folder: Path) -> None:
        """Rename a catalog that cannot be read, replacing an earlier one; it may have gone. Raises OSError."""
        for suffix in (LOG_SUFFIX, "-shm"):
            (folder / (NAME + suffix)).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (folder / NAME).replace(folder / f"{NAME}.damaged")

    @staticmethod
    def remove(folder: Path) -> None:
        """Delete a catalog that is broken, once it is closed; it may have gone. Raises OSError."""
        for suffix in (LOG_SUFFIX, "-shm", ""):
            (folder / (NAME + suffix)).unlink(missing_ok=True)

    def rows(self) -> tuple[dict[BlockKey, Entry], int]:
        """All rows that make sense, and how many did not."""
        found: dict[BlockKey, Entry] = {}
        nonsense = 0
        for key, *numbers in self._db.execute("SELECT key, pack, offset, length, last_used, hits FROM blocks"):
            if (
                isinstance(key, bytes)
                and len(key) == 32
                and all(isinstance(n, int) and 0 <= n < LARGEST_NUMBER for n in numbers)
            ):
                found[BlockKey(key)] = Entry(*numbers)
            else:
                nonsense += 1
        return found, nonsense

    def commit(self, *, gone: Iterable[BlockKey], changed: Iterable[tuple[BlockKey, Entry]]) -> None:
        """One transaction: delete ``gone``, then insert or replace ``changed``."""
        rows = [(key, e.pack, e.offset, e.length, e.last_used, e.hits) for key, e in changed]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in gone])
            self._db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()
