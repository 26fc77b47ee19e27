"""Ways in which files go bad, chosen by a seed; and what that did to the blocks in packs, found by comparing bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kvos.tiers import BlockKey
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.pack import pack_path

Damage = Callable[[Sequence[Path], random.Random], None]


def flip(files: Sequence[Path], rng: random.Random) -> None:
    """One bit."""
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def cut(files: Sequence[Path], rng: random.Random) -> None:
    """The end is missing."""
    path = rng.choice(files)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def remove(files: Sequence[Path], rng: random.Random) -> None:
    rng.choice(files).unlink()


def swap(files: Sequence[Path], rng: random.Random) -> None:
    """Two files have each other's names; or it is one file, and nothing has happened."""
    one, other = rng.choice(files), rng.choice(files)
    content = one.read_bytes(), other.read_bytes()
    other.write_bytes(content[0])
    one.write_bytes(content[1])


def lose_page(files: Sequence[Path], rng: random.Random) -> None:
    """A piece is zeros, or noise, or what stands elsewhere in the file."""
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    if data:
        size = rng.choice([16, 512, 4096])
        start, elsewhere = rng.randrange(len(data)), rng.randrange(len(data))
        end = min(len(data), start + size)
        piece = rng.choice([bytes(end - start), rng.randbytes(end - start), bytes(data[elsewhere:][: end - start])])
        data[start : start + len(piece)] = piece
        path.write_bytes(data)


WAYS: tuple[Damage, ...] = (flip, flip, flip, cut, remove, swap, lose_page)


def spoil(files: Sequence[Path], rng: random.Random, ways: Sequence[Damage] = WAYS) -> str:
    """Damage one of ``files``, or two; the way's name."""
    way = rng.choice(ways)
    way(sorted(files), rng)
    return way.__name__


class Records:
    """The bytes of every block of an open tier as they are now, to see later whose have changed."""

    def __init__(self, tier: DiskTier, folder: Path) -> None:
        self._folder = folder
        self.places = {
            key: (entry.pack, entry.offset, entry.length) for key, entry in tier._shelf.index.entries.items()
        }
        self._before = {key: self._bytes(key) for key in self.places}

    def _bytes(self, key: BlockKey) -> bytes:
        pack, offset, length = self.places[key]
        path = pack_path(self._folder, pack)
        return path.read_bytes()[offset : offset + length] if path.exists() else b""

    def changed(self) -> set[BlockKey]:
        return {key for key in self.places if self._bytes(key) != self._before[key]}
