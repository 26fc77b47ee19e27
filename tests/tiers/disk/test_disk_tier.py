"""The disk tier keeps what it is given, across restarts and within its capacity."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import BYTES, ROOM, batch, content, key_of, load_checked, open_tier, request

from kvos.errors import InvalidConfigError
from kvos.tiers.base import Loaded, Stored
from kvos.tiers.disk.catalog import Catalog
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES
from kvos.tiers.disk.pack import FORMAT, HEADER_BYTES, encode_record

RECORD = HEADER_BYTES + 4 * 8 + 1000 + BYTES_PER_ROW
HITS = [Loaded.HIT]


def capacity_for(blocks: int) -> int:
    """Room for so many blocks, and a sixteenth of it all for packs on the move."""
    return CATALOG_BYTES + blocks * RECORD * 16 // 15 + 1


def test_blocks_come_back_in_any_order_and_after_a_restart(tmp_path: Path) -> None:
    numbers = list(range(30))
    tier = open_tier(tmp_path, pack_bytes=7000)
    assert tier.store(batch(numbers)) == [Stored.STORED] * 30
    assert tier.store(batch([3, 40, 40])) == [Stored.PRESENT, Stored.STORED, Stored.PRESENT]
    order = [int(number) for number in np.random.default_rng(0).permutation(30)]
    assert load_checked(tier, order) == HITS * 30
    tier.check_invariants()
    used = tier.usage().used_bytes
    tier.close()
    tier.close()
    again = open_tier(tmp_path)
    again.check_invariants()
    assert again.usage().used_bytes == used
    assert again.contains([key_of(3), key_of(99)]) == [True, False]
    assert load_checked(again, [*order, 40]) == HITS * 31
    assert again.verify() == 0
    again.close()
    assert again.store(batch([77])) == [Stored.FAILED]
    assert load_checked(again, [3]) == [Loaded.MISS]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_other_tokens_or_another_parent_are_damage(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1, 2, 3]))
    wanted = request([1, 2, 3])
    wanted.tokens[0, 5] += 1
    wanted = type(wanted)(wanted.keys, (wanted.parents[0], key_of(5), wanted.parents[2]), wanted.tokens)
    out = np.zeros((3, 1000), np.uint8)
    assert tier.load(wanted, out) == [Loaded.DAMAGED, Loaded.DAMAGED, Loaded.HIT]
    assert tier.usage().counters["damaged"] == 2
    assert load_checked(tier, [1, 2, 3]) == [Loaded.MISS, Loaded.MISS, Loaded.HIT]
    tier.check_invariants()
    tier.close()


def test_capacity_holds_after_every_store_and_after_a_restart(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    capacity = capacity_for(40)
    tier = open_tier(tmp_path, capacity, pack_bytes=9000)
    for start in range(0, 600, 12):
        tier.store(batch(range(start, start + 12)))
        tier.check_invariants()
        load_checked(tier, [int(number) for number in random.integers(0, start + 12, 8)])
        files = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert files <= capacity
    assert tier.usage().counters["evicted"] > 0
    tier.close()
    smaller = open_tier(tmp_path, capacity_for(15))
    smaller.check_invariants()
    assert 10 <= smaller.usage().blocks <= 15
    assert Stored.NO_ROOM in smaller.store(batch(range(1000, 1020)))
    smaller.check_invariants()
    smaller.close()


def test_the_block_used_longest_ago_goes_first_and_of_a_batch_the_last(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, capacity_for(20))
    tier.store(batch(range(10)))
    tier.store(batch(range(10, 20)))
    load_checked(tier, [0, 2, 4])
    tier.store(batch(range(20, 25)))
    assert load_checked(tier, [0, 2, 4, *range(10, 25)]) == HITS * 18
    assert tier.contains([key_of(number) for number in (1, 3, 5, 6, 7, 8, 9)]) == [True, True] + [False] * 5
    tier.check_invariants()
    tier.close()
    again = open_tier(tmp_path, capacity_for(20))
    assert load_checked(again, [0, 2, 4, *range(10, 25)]) == HITS * 18
    again.close()


def test_packs_lose_their_dead_bytes_and_never_take_more_than_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at whenever a file or the folder is synced: a copy is there then, beside what it is made from."""
    random = np.random.default_rng(3)
    capacity = capacity_for(100)
    taken = []
    fsync = os.fsync

    def looks(handle: int) -> None:
        taken.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", looks)
    tier = open_tier(tmp_path, capacity)
    for start in range(0, 360, 12):
        tier.store(batch(range(start, start + 12)))
        load_checked(tier, [int(number) for number in random.integers(max(0, start - 150), start + 12, 8)])
        tier.check_invariants()
    counters = tier.usage().counters
    assert counters["compacted"] > 10
    assert "compaction_errors" not in counters
    assert tier.usage().blocks > 80
    assert max(taken) <= capacity
    tier.close()


def test_the_catalog_takes_no_more_than_its_estimate(tmp_path: Path) -> None:
    """Keys at random places, and a transaction that changes all rows."""
    order = [int(number) for number in np.random.default_rng(0).permutation(6000)]
    tier = open_tier(tmp_path)
    for start in range(0, len(order), 500):
        tier.store(batch(order[start : start + 500]))
    tier.load(request(order), np.empty((len(order), BYTES), np.uint8))
    tier.store(batch([6000]))
    catalog = sum(path.stat().st_size for path in tmp_path.glob("catalog*"))
    assert catalog <= CATALOG_BYTES + BYTES_PER_ROW * len(order)
    tier.close()


def test_drop_and_clear_delete_packs(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1, 2]))
    tier.store(batch([3]))
    tier.drop([key_of(1), key_of(99)])
    assert load_checked(tier, [1, 2, 3]) == [Loaded.MISS, Loaded.HIT, Loaded.HIT]
    tier.drop([key_of(2)])
    assert len(list(tmp_path.glob("*.pack"))) == 1
    tier.clear()
    tier.check_invariants()
    assert not list(tmp_path.glob("*.pack"))
    assert tier.usage().blocks == 0
    tier.close()


def test_a_second_tier_on_the_folder_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(InvalidConfigError, match="in use by another process"):
        open_tier(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_fails_the_store_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert tier.store(batch([1, 2])) == [Stored.PRESENT, Stored.FAILED]
    assert tier.usage().counters["store_errors"] == 1
    tier.check_invariants()
    assert load_checked(tier, [1, 2]) == [Loaded.HIT, Loaded.MISS]
    assert tier.store(batch([2])) == [Stored.STORED]
    assert load_checked(tier, [1, 2]) == HITS * 2
    tier.close()


def test_a_catalog_that_breaks_while_open_is_written_anew(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch(range(300)))

    def malformed(**_: object) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    tier._shelf._catalog.commit = malformed
    assert tier.store(batch([500])) == [Stored.STORED]
    assert tier.usage().counters["catalogs_rebuilt"] == 1
    tier.check_invariants()
    tier.close()
    again = open_tier(tmp_path)
    assert load_checked(again, [*range(300), 500]) == HITS * 301
    again.close()


def test_a_locked_catalog_fails_the_store_and_leaves_no_pack(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1]))
    catalog = tier._shelf._catalog
    commit = catalog.commit

    def full(**_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    catalog.commit = full
    assert tier.store(batch([2])) == [Stored.FAILED]
    tier.drop([key_of(1)])
    assert load_checked(tier, [1, 2]) == [Loaded.MISS] * 2
    assert not list(tmp_path.glob("*.pack"))
    tier.check_invariants()
    catalog.commit = commit
    assert tier.store(batch([1, 2])) == [Stored.STORED] * 2
    tier.check_invariants()
    tier.close()


def test_a_read_error_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1]))

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert load_checked(tier, [1]) == [Loaded.FAILED]
    assert load_checked(tier, [1]) == HITS
    tier.close()


def test_a_deleted_pack_is_a_miss_and_counted(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1, 2]))
    next(tmp_path.glob("*.pack")).unlink()
    assert load_checked(tier, [1, 2]) == [Loaded.MISS] * 2
    assert tier.usage().counters["damaged"] == 2
    assert tier.store(batch([1, 2])) == [Stored.STORED] * 2
    tier.check_invariants()
    tier.close()
    next(tmp_path.glob("*.pack")).unlink()
    again = open_tier(tmp_path)
    assert again.usage().counters["damaged"] == 2
    assert load_checked(again, [1, 2]) == [Loaded.MISS] * 2
    again.check_invariants()
    again.close()


def test_a_pack_of_another_format_is_left_alone_until_room_is_needed(tmp_path: Path) -> None:
    blocks = request([5])
    payload = content([5]).tobytes()
    old = bytearray(bytes(encode_record("plain", blocks.keys[0], blocks.parents[0], blocks.tokens[0], payload)))
    old[8:12] = struct.pack("<I", FORMAT + 1)
    path = tmp_path / "00000007.pack"
    path.write_bytes(bytes(old))
    tier = open_tier(tmp_path, capacity_for(3))
    assert tier.usage().counters["other_format"] == 1
    assert load_checked(tier, [5]) == [Loaded.MISS]
    assert tier.usage().used_bytes == CATALOG_BYTES + len(old)
    assert path.exists()
    assert tier.store(batch([1, 2, 3])) == [Stored.STORED] * 3
    assert not path.exists()
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("removed", [["catalog.sqlite"], ["catalog.sqlite", "catalog.sqlite-wal"]])
def test_a_catalog_that_is_deleted_while_open_loses_no_block(tmp_path: Path, removed: list[str]) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1, 2]))
    for name in removed:
        (tmp_path / name).unlink()
    tier.store(batch([3]))
    tier.store(batch([4]))
    assert load_checked(tier, [1, 2, 3, 4]) == HITS * 4
    tier.close()
    again = open_tier(tmp_path)
    assert load_checked(again, [1, 2, 3, 4]) == HITS * 4
    again.check_invariants()
    again.close()


@pytest.mark.parametrize("length", [0, 30, 4096, 5000])
def test_a_catalog_that_is_cut_short_while_open_heals(tmp_path: Path, length: int) -> None:
    tier = open_tier(tmp_path)
    for start in range(0, 300, 20):
        tier.store(batch(range(start, start + 20)))
    for path in tmp_path.glob("catalog*"):
        os.truncate(path, min(length, path.stat().st_size))
    for number in (500, 501, 502):
        assert tier.store(batch([number])) == [Stored.STORED]
    numbers = [*range(300), 500, 501, 502]
    assert load_checked(tier, numbers) == HITS * 303
    tier.close()
    again = open_tier(tmp_path)
    assert load_checked(again, numbers) == HITS * 303
    again.check_invariants()
    again.close()


def test_a_catalog_that_cannot_be_written_anew_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1]))

    def malformed(**_: object) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    tier._shelf._catalog.commit = malformed
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "remove", refused)
        assert tier.store(batch([2])) == [Stored.FAILED]
        assert tier.store(batch([3])) == [Stored.FAILED]
        tier.drop([key_of(9)])
    assert tier.store(batch([2, 3])) == [Stored.STORED] * 2
    tier.check_invariants()
    tier.close()
    again = open_tier(tmp_path)
    assert load_checked(again, [1, 2, 3]) == HITS * 3
    again.close()


def test_good_blocks_of_a_pack_that_no_row_names_are_kept(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch(range(10)))
    tier.close()
    for path in tmp_path.glob("catalog*"):
        path.unlink()
    pack = next(tmp_path.glob("*.pack"))
    data = bytearray(pack.read_bytes())
    length = len(data) // 10
    data[3 * length + HEADER_BYTES + 50] ^= 1  # in a payload
    data[6 * length] ^= 1  # in the magic
    data[8 * length + 104] ^= 1  # in the number of tokens: the header's length of the record is wrong
    pack.write_bytes(data[:-1])
    again = open_tier(tmp_path)
    bad = {3, 6, 8, 9}
    expected = [Loaded.MISS if number in bad else Loaded.HIT for number in range(10)]
    assert load_checked(again, list(range(10))) == expected
    assert again.usage().counters["adopted"] == 6
    assert again.usage().counters["damaged"] == 4
    again.check_invariants()
    again.close()


def test_a_pack_that_cannot_be_read_does_not_keep_the_tier_from_opening(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch([1]))
    tier.close()
    (tmp_path / "00000005.pack").mkdir()
    (tmp_path / "odd.tmp").mkdir()
    again = open_tier(tmp_path)
    assert load_checked(again, [1]) == HITS
    assert again.store(batch([2])) == [Stored.STORED]
    again.close()


def test_a_lost_or_damaged_catalog_is_rebuilt(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, pack_bytes=5000)
    tier.store(batch(range(20)))
    tier.close()
    (tmp_path / "catalog.sqlite").write_bytes(b"nonsense" * 1000)
    again = open_tier(tmp_path, ROOM)
    again.check_invariants()
    assert again.usage().counters["catalogs_rebuilt"] == 1
    assert load_checked(again, list(range(20))) == HITS * 20
    again.close()
    for path in tmp_path.glob("catalog*"):
        path.unlink()
    third = open_tier(tmp_path)
    assert load_checked(third, list(range(20))) == HITS * 20
    third.close()
