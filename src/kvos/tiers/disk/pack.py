"""The record of one block, and the pack files that hold records end to end. Knows no catalog and keeps no state.

Record: magic, format version, codec name, key, parent, token count, payload length, XXH3-128 of all the rest; then the
tokens as little-endian int32, then the payload. It says everything that the catalog knows, so that a lost catalog can
be rebuilt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvos.tiers.base import BlockKey

__all__ = [
    "FORMAT",
    "HEADER_BYTES",
    "NAME_BYTES",
    "EncodedRecord",
    "Record",
    "Scan",
    "codec_of",
    "encode_record",
    "fsync_folder",
    "pack_path",
    "pread_all",
    "read_ahead",
    "read_record",
    "scan_pack",
    "write_pack",
]

MAGIC = b"KVOSBLK\x00"
FORMAT = 1
"""Version of the record; a reader ignores packs of any other."""

NAME_BYTES = 24
"""Room for a codec's name in UTF-8."""

_FIELDS = struct.Struct(f"<8sI{NAME_BYTES}s32s32sIQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Record:
    """A record whose checksum agrees. ``tokens`` is ``[n]`` int32; both arrays are views of what was read."""

    codec: str
    key: BlockKey
    parent: BlockKey
    tokens: npt.NDArray[np.int32]
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Scan:
    """What a pack holds, found without the catalog.

    Attributes:
        places: key, offset and length of each record that verifies, in file order.
        damaged: how many records do not; neighbours whose headers are gone count as one.
        other_format: whether it begins in another format version and holds nothing of ours; then it is not ours to
            judge.
    """

    places: tuple[tuple[BlockKey, int, int], ...]
    damaged: int
    other_format: bool


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record's bytes in two parts; ``len`` is that of both."""

    head: bytes
    payload: bytes | memoryview

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)

    def __bytes__(self) -> bytes:
        return b"".join((self.head, self.payload))


def _checksum(*parts: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def encode_record(
    codec: str, key: BlockKey, parent: BlockKey, tokens: npt.NDArray[np.int32], payload: bytes | memoryview
) -> EncodedRecord:
    """One record, ready to be written; ``payload`` is not copied, and must stay as it is until then."""
    fields = _FIELDS.pack(MAGIC, FORMAT, codec.encode(), key, parent, len(tokens), len(payload))
    ids = tokens.astype("<i4", copy=False).tobytes()
    return EncodedRecord(fields + _checksum(fields, ids, payload) + ids, payload)


def read_record(data: bytes | memoryview) -> Record | None:
    """The record that fills ``data`` exactly; None if one bit of it is not what was written."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        return None
    magic, version, codec, key, parent, count, length = _FIELDS.unpack_from(view)
    if magic != MAGIC or version != FORMAT or len(view) != HEADER_BYTES + 4 * count + length:
        return None
    if _checksum(view[: _FIELDS.size], view[HEADER_BYTES:]) != bytes(view[_FIELDS.size : HEADER_BYTES]):
        return None
    tokens = np.frombuffer(view, "<i4", count, HEADER_BYTES)
    name = codec.rstrip(b"\x00").decode(errors="replace")
    return Record(name, BlockKey(key), BlockKey(parent), tokens, view[HEADER_BYTES + 4 * count :])


def pack_path(folder: Path, number: int) -> Path:
    """Where pack ``number`` lies."""
    return folder / f"{number:08d}.pack"


def fsync_folder(folder: Path) -> None:
    """Make names that were created or renamed in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_pack(path: Path, records: Sequence[EncodedRecord]) -> int:
    """Write a pack so that its name appears only when its bytes are durable; its size in bytes.

    Raises:
        OSError: nothing is left, unless the folder itself could not be synced: then the pack may be there.
    """
    unfinished = path.with_suffix(".tmp")
    try:
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for record in records:
                _write_all(handle, record.head)
                _write_all(handle, record.payload)
            os.fsync(handle)
        finally:
            os.close(handle)
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    fsync_folder(path.parent)
    return sum(map(len, records))


def _write_all(handle: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def pread_all(handle: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` with what is at ``offset``; how many bytes that were: fewer only where the file ends."""
    done = 0
    while done < len(out):
        read = os.preadv(handle, [out[done:]], offset + done)
        if not read:
            break
        done += read
    return done


def read_ahead(handle: int, length: int, offset: int) -> None:
    """Have the kernel fetch what will be asked for, while what has come is being worked on. A hint: never raises."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, offset, length, os.POSIX_FADV_WILLNEED)


def _verified(data: memoryview, offset: int) -> tuple[Record, int] | None:
    """The record at ``offset`` and its length; None if none that verifies begins there."""
    if offset + HEADER_BYTES > len(data):
        return None
    *_, count, length = _FIELDS.unpack_from(data, offset)
    size = HEADER_BYTES + 4 * count + length
    record = read_record(data[offset : offset + size])
    return None if record is None else (record, size)


def codec_of(path: Path) -> str:
    """What a pack's first record says of its codec, unverified; empty if it is no record of ours. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_FIELDS.size)
    if len(data) < _FIELDS.size:
        return ""
    magic, version, codec, *_ = _FIELDS.unpack(data)
    return codec.rstrip(b"\x00").decode(errors="replace") if (magic, version) == (MAGIC, FORMAT) else ""


def scan_pack(path: Path) -> Scan:
    """Read a whole pack and verify every record; behind a damaged one it goes on where the next begins. Raises OSError.

    A record begins with the magic. Should a payload hold it by chance, the checksum tells.
    """
    data = path.read_bytes()
    view = memoryview(data)
    places = []
    damaged = offset = 0
    while offset < len(data):
        found = _verified(view, offset)
        if found is None:
            damaged += 1
            following = data.find(MAGIC, offset + 1)
            offset = following if following >= 0 else len(data)
        else:
            record, size = found
            places.append((record.key, offset, size))
            offset += size
    return Scan(tuple(places), damaged, other_format=not places and _is_other_format(data))


def _is_other_format(data: bytes) -> bool:
    if len(data) < HEADER_BYTES:
        return False
    magic, version, *_ = _FIELDS.unpack_from(data)
    return bool(magic == MAGIC and version != FORMAT)
