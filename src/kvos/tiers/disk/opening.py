"""Opens a disk tier's folder: what the catalog says, checked against the packs that are there. No threads."""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvos.tiers.base import BlockKey
from kvos.tiers.disk.catalog import Catalog
from kvos.tiers.disk.index import Entry, Index
from kvos.tiers.disk.pack import scan_pack

__all__ = ["Opened", "open_folder"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """A folder's state.

    Attributes:
        leftovers: files that hold no block of ours and may be deleted for room, with their sizes in bytes.
        gone, changed: keys that the catalog still has to forget or to learn.
        next_pack: a number that no file has.
        lost_in: damaged blocks in packs that no row names, by file name.
    """

    catalog: Catalog
    index: Index = field(default_factory=Index)
    leftovers: dict[Path, int] = field(default_factory=dict)
    gone: set[BlockKey] = field(default_factory=set)
    changed: set[BlockKey] = field(default_factory=set)
    next_pack: int = 0
    lost_in: dict[str, int] = field(default_factory=dict)


def open_folder(folder: Path, counters: Counter[str]) -> Opened:
    """Everything in ``folder`` that can be found; deletes unfinished and useless files. Raises OSError, sqlite3.Error.

    A catalog that cannot be read is moved aside and rebuilt from the packs.
    """
    try:
        catalog, rows = _read_catalog(folder)
    except sqlite3.DatabaseError as error:
        log.warning("the catalog in %s cannot be read (%s): rebuilding it from the packs", folder, error)
        counters["catalogs_rebuilt"] += 1
        Catalog.move_aside(folder)
        catalog, rows = _read_catalog(folder)
    opened = Opened(catalog)
    for unfinished in folder.glob("*.tmp"):
        _delete(unfinished, unfinished.lstat().st_size, opened)
    try:
        _match(folder, rows, opened, counters)
    except BaseException:
        catalog.close()
        raise
    return opened


def _read_catalog(folder: Path) -> tuple[Catalog, dict[BlockKey, Entry]]:
    """The catalog and its rows; one that contradicts itself raises sqlite3.DatabaseError like one that is torn."""
    catalog = Catalog(folder)
    try:
        rows, nonsense = catalog.rows()
        places = sorted((entry.pack, entry.offset, entry.length) for entry in rows.values())
        overlaps = any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(places))
        if nonsense or overlaps:
            raise sqlite3.DatabaseError(f"{nonsense} rows make no sense, overlapping blocks: {overlaps}")
    except BaseException:
        catalog.close()
        raise
    return catalog, rows


def _match(folder: Path, rows: dict[BlockKey, Entry], opened: Opened, counters: Counter[str]) -> None:
    """Take the rows whose bytes can be there, and packs without a row."""
    index = opened.index
    named = {entry.pack for entry in rows.values()}
    unknown = []
    for path in sorted(folder.glob("*.pack")):
        size = path.stat().st_size
        number = int(path.stem) if path.stem.isdecimal() else None
        opened.next_pack = max(opened.next_pack, (number or 0) + 1)
        if number is None:
            opened.leftovers[path] = size
        elif number in named:
            index.add_pack(number, size)
        else:
            unknown.append((number, path, size))
    for key, entry in rows.items():
        if entry.pack in index.packs and entry.offset + entry.length <= index.packs[entry.pack].size:
            index.add(key, entry)
        else:
            opened.gone.add(key)
    if opened.gone:
        log.warning("%d blocks in %s have lost their bytes: dropped", len(opened.gone), folder)
        counters["damaged"] += len(opened.gone)
    for number, path, size in unknown:
        _adopt(number, path, size, opened, counters)
    opened.leftovers |= {path: path.stat().st_size for path in folder.glob("*.damaged")}


def _adopt(number: int, path: Path, size: int, opened: Opened, counters: Counter[str]) -> None:
    """Take in what verifies of a pack that no row names; delete one without, leave other formats alone."""
    try:
        scan = scan_pack(path)
    except OSError as error:
        log.warning("%s is in no catalog and cannot be read: %s", path, error)
        counters["load_errors"] += 1
        opened.leftovers[path] = size
        return
    if scan.other_format:
        log.warning("%s has another format: ignored", path)
        counters["other_format"] += 1
        opened.leftovers[path] = size
        return
    lost = scan.damaged if scan.places else max(1, scan.damaged)
    if lost:
        log.warning("%s is in no catalog, and %d of its blocks are damaged: dropped", path, lost)
        counters["damaged"] += lost
        opened.lost_in[path.name] = lost
    if not scan.places:
        _delete(path, size, opened)
        return
    counters["adopted"] += len(scan.places)
    opened.index.add_pack(number, size)
    ticks = opened.index.ticks(len(scan.places))
    for tick, (key, offset, length) in zip(ticks, scan.places, strict=True):
        opened.index.add(key, Entry(number, offset, length, tick))
        opened.changed.add(key)


def _delete(path: Path, size: int, opened: Opened) -> None:
    try:
        path.unlink()
    except OSError as error:
        log.warning("%s cannot be deleted: %s", path, error)
        opened.leftovers[path] = size
