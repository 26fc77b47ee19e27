"""The same file pattern as the disk tier's, without checksums and index; and files pushed out of the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvos.tiers import PayloadBytes

__all__ = ["drop_from_page_cache", "plain_read_seconds", "plain_write_seconds", "read_seconds"]

READ_BYTES = 1 << 20


def drop_from_page_cache(folder: Path) -> int:
    """Have the kernel forget the content of all files below ``folder``; returns their bytes. They must be synced."""
    size = 0
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(handle).st_size
        finally:
            os.close(handle)
    return size


def read_seconds(files: Iterable[Path]) -> float:
    """Time to read files from end to end, in pieces of 1 MiB."""
    piece = memoryview(bytearray(READ_BYTES))
    begin = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - begin


def plain_write_seconds(folder: Path, data: PayloadBytes, blocks_per_file: Sequence[int]) -> float:
    """Time to write the rows of ``data``, one by one, into files that are synced, renamed, and their folder synced."""
    folder.mkdir(exist_ok=True)
    row = 0
    begin = time.perf_counter()
    for number, blocks in enumerate(blocks_per_file):
        unfinished = folder / f"{number:08d}.tmp"
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for block in data[row : row + blocks]:
                os.write(handle, block.data)
            os.fsync(handle)
        finally:
            os.close(handle)
        unfinished.rename(folder / f"{number:08d}.plain")
        _sync_folder(folder)
        row += blocks
    return time.perf_counter() - begin


def plain_read_seconds(folder: Path, out: PayloadBytes, blocks_per_file: Sequence[int]) -> float:
    """Time to read the rows of such files, one by one, into ``out``."""
    row = 0
    begin = time.perf_counter()
    for number, blocks in enumerate(blocks_per_file):
        handle = os.open(folder / f"{number:08d}.plain", os.O_RDONLY)
        try:
            for block in out[row : row + blocks]:
                os.readv(handle, [block.data])
        finally:
            os.close(handle)
        row += blocks
    return time.perf_counter() - begin


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
