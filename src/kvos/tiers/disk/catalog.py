"""The disk tier's index on disk: one SQLite table in WAL mode. Everything in it can be rebuilt from the packs.

Called under the tier's lock, from any thread. A commit that a power cut undoes is no loss: its pack is found and
adopted, so the log need not be synced at every commit.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from kvos.tiers.base import BlockKey
from kvos.tiers.disk.index import Entry
from kvos.tiers.disk.pack import FORMAT

__all__ = ["Catalog"]

NAME = "catalog.sqlite"
_TABLE = """CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, pack INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    last_used INTEGER NOT NULL, hits INTEGER NOT NULL) WITHOUT ROWID"""


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
        """Rename a catalog that cannot be read, replacing an earlier one. Raises OSError."""
        for suffix in ("-wal", "-shm"):
            (folder / (NAME + suffix)).unlink(missing_ok=True)
        (folder / NAME).replace(folder / f"{NAME}.damaged")

    def rows(self) -> tuple[dict[BlockKey, Entry], int]:
        """All rows that make sense, and how many did not."""
        found: dict[BlockKey, Entry] = {}
        nonsense = 0
        for key, *numbers in self._db.execute("SELECT key, pack, offset, length, last_used, hits FROM blocks"):
            if isinstance(key, bytes) and len(key) == 32 and all(isinstance(n, int) and n >= 0 for n in numbers):
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
