"""A full disk, a folder that may not be written, a file that may not be read: a result, a count and a log line each.

And when the cause is gone, the tier works again, without being told.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_blocks import batch, key_of, load_checked, open_tier

from kvos.errors import InvalidConfigError
from kvos.tiers.base import Loaded, Stored

HIT, MISS, FAILED = Loaded.HIT, Loaded.MISS, Loaded.FAILED
LARGE_BATCH = 60


def as_root(*command: str) -> bool:
    """Whether it could be done."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not as_root("mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)):
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)


def test_a_disk_that_is_full_skips_stores_until_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_disk / "cache"
    tier = open_tier(folder)
    stored, start = [], 0
    while (results := tier.store(batch(range(start, start + LARGE_BATCH))))[0] is Stored.STORED:
        stored += range(start, start + LARGE_BATCH)
        start += LARGE_BATCH
    assert results == [Stored.FAILED] * LARGE_BATCH
    assert stored, "some fits into half a megabyte"
    for again in (1, 2, 3):
        assert tier.store(batch(range(start, start + LARGE_BATCH))) == [Stored.FAILED] * LARGE_BATCH
        assert tier.usage().counters["store_errors"] == 1 + again
        assert load_checked(tier, stored) == [HIT] * len(stored)
        tier.check_invariants()
    assert "No space left" in caplog.text or "disk is full" in caplog.text
    # A little fits, as long as the catalog can grow; whatever is said to be stored is.
    small = [number for number in range(5000, 5200) if tier.store(batch([number])) == [Stored.STORED]]
    assert load_checked(tier, [*stored, *small]) == [HIT] * (len(stored) + len(small))
    tier.check_invariants()
    grow(small_disk)
    more = list(range(start, start + LARGE_BATCH))
    assert tier.store(batch(more)) == [Stored.STORED] * LARGE_BATCH
    tier.check_invariants()
    tier.close()
    later = open_tier(folder)
    assert load_checked(later, [*stored, *small, *more]) == [HIT] * (len(stored) + len(small) + len(more))
    assert "damaged" not in later.usage().counters
    later.check_invariants()
    later.close()


def test_a_tier_that_is_closed_on_a_full_disk_is_found_again(small_disk: Path) -> None:
    folder = small_disk / "cache"
    tier = open_tier(folder)
    tier.store(batch(range(20)))
    (small_disk / "other").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    load_checked(tier, list(range(20)))
    tier.drop([key_of(3)])
    tier.close()
    later = open_tier(folder)
    results = load_checked(later, list(range(20)))
    assert results.count(HIT) >= 19
    later.close()
    (small_disk / "other").unlink()
    last = open_tier(folder)
    assert last.store(batch([50])) == [Stored.STORED]
    assert load_checked(last, [50, 0]) == [HIT] * 2
    last.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Any]:
    """Seals a folder, so that nothing can be made or deleted in it, not even by root; ``sealed(folder, False)`` opens
    it again."""
    sealed_ones = set()

    def seal(folder: Path, on: bool = True) -> None:
        if os.geteuid() != 0:
            folder.chmod(0o500 if on else 0o700)
        elif not as_root("chattr", "+i" if on else "-i", str(folder)):
            pytest.skip("this file system cannot seal a folder")
        (sealed_ones.add if on else sealed_ones.discard)(folder)

    yield seal
    for folder in list(sealed_ones):
        seal(folder, False)


def test_a_folder_that_may_not_be_written_serves_what_it_has(tmp_path: Path, sealed: Any) -> None:
    folder = tmp_path / "cache"
    tier = open_tier(folder)
    tier.store(batch(range(4)))
    tier.store(batch([9]))
    sealed(folder)
    assert tier.store(batch([5])) == [Stored.FAILED]
    assert tier.usage().counters["store_errors"] == 1
    assert load_checked(tier, [0, 1, 2, 3, 5, 9]) == [HIT] * 4 + [MISS, HIT]
    tier.drop([key_of(9)])
    assert load_checked(tier, [9]) == [MISS]
    assert tier.usage().counters["deletion_errors"] == 1
    tier.check_invariants()
    sealed(folder, False)
    assert tier.store(batch([5])) == [Stored.STORED]
    assert load_checked(tier, [0, 5]) == [HIT] * 2
    tier.check_invariants()
    tier.clear()
    assert not list(folder.glob("*.pack")), "what could not be deleted then is deleted now"
    tier.close()


def test_a_folder_that_was_sealed_when_it_was_opened_is_refused_or_serves(tmp_path: Path, sealed: Any) -> None:
    folder = tmp_path / "cache"
    tier = open_tier(folder)
    tier.store(batch(range(4)))
    tier.close()
    sealed(folder)
    with pytest.raises(InvalidConfigError, match="choose another"):
        open_tier(folder)
    sealed(folder, False)
    later = open_tier(folder)
    assert load_checked(later, list(range(4))) == [HIT] * 4
    later.close()


def test_a_file_where_the_folder_should_be_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("somebody's notes")
    with pytest.raises(InvalidConfigError, match="choose another folder"):
        open_tier(tmp_path / "cache")
    with pytest.raises(InvalidConfigError, match="choose another folder"):
        open_tier(tmp_path / "cache" / "below")
    assert (tmp_path / "cache").read_text() == "somebody's notes"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.EIO, errno.EDQUOT])
def test_files_that_may_not_be_opened_are_left_until_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch(range(4)))
    really = os.open

    def refused(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith((".pack", ".tmp")):
            raise OSError(code, os.strerror(code), str(path))
        return really(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert load_checked(tier, [0, 1]) == [FAILED] * 2
        assert tier.store(batch([7, 8])) == [Stored.FAILED] * 2
        assert tier.verify() == 0
        tier.check_invariants()
    counters = tier.usage().counters
    assert (counters["load_errors"], counters["store_errors"], counters["verify_errors"]) == (1, 1, 1)
    assert load_checked(tier, [0, 1, 2, 3]) == [HIT] * 4
    assert tier.store(batch([7, 8])) == [Stored.STORED] * 2
    assert load_checked(tier, [7, 8]) == [HIT] * 2
    tier.close()


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = open_tier(folder)
    tier.store(batch(range(4)))
    shutil.rmtree(folder)
    assert load_checked(tier, [0, 1]) == [MISS] * 2
    assert tier.usage().counters["damaged"] == 4
    assert tier.store(batch(range(3))) == [Stored.STORED] * 3
    assert tier.usage().counters["folders_made_again"] == 1
    assert load_checked(tier, range(4)) == [HIT] * 3 + [MISS]
    assert folder.stat().st_mode & 0o777 == 0o700
    tier.check_invariants()
    with pytest.raises(InvalidConfigError, match="in use"):
        open_tier(folder)
    tier.close()
    later = open_tier(folder)
    assert load_checked(later, range(4)) == [HIT] * 3 + [MISS]
    later.close()


def test_a_folder_that_was_deleted_and_is_somebody_elses_now_is_left_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = open_tier(folder)
    tier.store(batch(range(4)))
    shutil.rmtree(folder)
    other = open_tier(folder)
    assert other.store(batch(range(10, 14))) == [Stored.STORED] * 4
    assert tier.store(batch([5])) == [Stored.FAILED]
    assert tier.usage().counters["store_errors"] == 1
    assert set(load_checked(tier, range(4))) <= {MISS, Loaded.DAMAGED}, "never the other's blocks"
    other.close()
    assert tier.store(batch([5])) == [Stored.STORED]
    assert load_checked(tier, [5, 10, 11, 12, 13]) == [HIT] * 5
    tier.check_invariants()
    tier.close()
