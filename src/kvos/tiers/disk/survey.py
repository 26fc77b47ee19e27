"""What lies in a disk tier's folder, read beside a process that may be using it: no lock, no change."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvos.tiers.disk.catalog import LOG_SUFFIX
from kvos.tiers.disk.catalog import NAME as CATALOG_NAME
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES
from kvos.tiers.disk.pack import FORMAT

__all__ = ["FolderSurvey", "survey_folder"]

READS = 50
PAUSE_S = 0.02
"""A commit is over within milliseconds; a catalog that changes for longer than these reads is said to be unreadable."""


@dataclass(frozen=True, slots=True)
class FolderSurvey:
    """A disk tier's folder at one moment. Its user's last seconds may not have reached the catalog yet.

    Attributes:
        used_bytes: packs, other files that count, and an estimate of the catalog, as the tier itself counts.
        dead_bytes: of those, in packs but belonging to no block any more.
        blocks: that can be found.
        lost_blocks: named by the catalog, but their pack is gone or too short.
        hits: loads of these blocks so far, over all processes.
        blocks_hit: blocks that were loaded at least once.
        oldest, newest: when the first and the last of the packs was written, in seconds since the epoch; None without.
        problem: why the catalog could not be read; then there are no blocks to count. Empty if all is well.
    """

    packs: int
    used_bytes: int
    dead_bytes: int
    blocks: int
    lost_blocks: int
    hits: int
    blocks_hit: int
    oldest: float | None
    newest: float | None
    problem: str


def survey_folder(folder: Path) -> FolderSurvey:
    """Look, without touching anything. Raises OSError if the folder cannot be read."""
    packs, written = _packs(folder)
    rows, problem = _rows_by_pack(folder)
    good = {pack: row for pack, row in rows.items() if row.end <= packs.get(pack, 0)}
    blocks = sum(row.blocks for row in rows.values())
    # Where the end of a pack is cut off, the number of blocks lost is the tier's to find out; all of it counts here.
    lost = blocks - sum(row.blocks for row in good.values())
    aside = sum(path.stat().st_size for path in folder.glob("*.damaged"))
    total = sum(packs.values())
    return FolderSurvey(
        packs=len(packs),
        used_bytes=total + aside + CATALOG_BYTES + BYTES_PER_ROW * blocks,
        dead_bytes=0 if problem else total - sum(row.length for row in good.values()),
        blocks=blocks - lost,
        lost_blocks=lost,
        hits=sum(row.hits for row in good.values()),
        blocks_hit=sum(row.blocks_hit for row in good.values()),
        oldest=min(written, default=None),
        newest=max(written, default=None),
        problem=problem,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """The blocks of one pack, by the catalog; ``end`` is the last byte that one of them needs."""

    blocks: int
    length: int
    end: int
    hits: int
    blocks_hit: int


def _packs(folder: Path) -> tuple[dict[int, int], list[float]]:
    """Number and size of each pack, and when they were written. One that goes away meanwhile is left out."""
    sizes: dict[int, int] = {}
    written = []
    for path in folder.glob("*.pack"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.stem.isdecimal():
            sizes[int(path.stem)] = status.st_size
            written.append(status.st_mtime)
    return sizes, written


def _rows_by_pack(folder: Path) -> tuple[dict[int, _Row], str]:
    path = folder / CATALOG_NAME
    if not path.is_file():
        return {}, ""
    try:
        with tempfile.TemporaryDirectory() as copies, closing(_open_copy(path, Path(copies))) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                return {}, f"its format is {version}; this kvos reads format {FORMAT}"
            found = db.execute(
                "SELECT pack, COUNT(*), SUM(length), MAX(offset + length), SUM(hits), SUM(hits > 0) "
                "FROM blocks GROUP BY pack"
            ).fetchall()
        return {int(pack): _Row(*map(int, numbers)) for pack, *numbers in found}, ""
    except (OSError, sqlite3.Error, TypeError, ValueError) as error:
        return {}, str(error)


def _open_copy(path: Path, folder: Path) -> sqlite3.Connection:
    """A copy of the catalog in ``folder``: its user has the file for itself. Raises OSError, sqlite3.Error."""
    files = (path, path.with_name(path.name + LOG_SUFFIX))
    content = _read(files)
    for _ in range(READS):
        again = _read(files)
        if again == content:
            break
        content = again
        time.sleep(PAUSE_S)
    else:
        raise OSError(f"{path} changes all the time; try again")
    for file, data in zip(files, content, strict=True):
        (folder / file.name).write_bytes(data)
    return sqlite3.connect(folder / path.name)


def _read(files: Sequence[Path]) -> list[bytes]:
    return [file.read_bytes() if file.exists() else b"" for file in files]
