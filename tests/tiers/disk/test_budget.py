"""Folders of several models keep within one budget."""

from __future__ import annotations

import os
from pathlib import Path

from kvos.tiers.codecs import RawCodec
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.budget import capacity_beside
from kvos.tiers.disk.index import CATALOG_BYTES
from tiers.tier_suite import BLOCK_BYTES, LAYOUT, batch

KB = 1 << 10


def folder_with(root: Path, name: str, pack_bytes: int, written: float) -> Path:
    """A folder with one pack of this size; what is in it does not matter to who only counts bytes."""
    folder = root / name
    folder.mkdir(parents=True)
    pack = folder / "00000001.pack"
    pack.write_bytes(bytes(pack_bytes))
    os.utime(pack, (written, written))
    return folder


def test_what_others_hold_is_not_mine(tmp_path: Path) -> None:
    folder_with(tmp_path, "other", 300 * KB, 1.0)
    folder_with(tmp_path, "mine", 900 * KB, 2.0)
    assert capacity_beside(tmp_path, "mine", 2000 * KB) == 2000 * KB - 300 * KB - CATALOG_BYTES


def test_beyond_half_of_it_those_not_written_for_longest_are_cleared(tmp_path: Path) -> None:
    old, new = folder_with(tmp_path, "old", 700 * KB, 1.0), folder_with(tmp_path, "new", 700 * KB, 2.0)
    assert capacity_beside(tmp_path, "mine", 2000 * KB) == 2000 * KB - 700 * KB - CATALOG_BYTES
    assert (list(old.glob("*.pack")), len(list(new.glob("*.pack")))) == ([], 1)


def test_a_folder_in_use_stays_and_half_is_left_at_least(tmp_path: Path) -> None:
    tier = DiskTier(
        tmp_path / "used",
        capacity_bytes=4000 * KB,
        bytes_per_block=BLOCK_BYTES,
        block_size=LAYOUT.block_size,
        codec=RawCodec(),
    )
    for first in range(0, 1000, 200):
        tier.store(batch(range(first, first + 200)))
    used = tier.usage().used_bytes
    assert used > 600 * KB
    assert capacity_beside(tmp_path, "mine", 1000 * KB) == 500 * KB
    assert tier.usage().blocks == 1000
    tier.close()
    assert capacity_beside(tmp_path, "mine", 1000 * KB) == 1000 * KB, "now it could go"


def test_without_any_folder_all_of_it_is_mine(tmp_path: Path) -> None:
    assert capacity_beside(tmp_path / "none", "mine", 123) == 123
