"""A folder is looked at beside its user, and looked after without one. Blocks have 1000 bytes of content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disk_blocks import BLOCK_SIZE, BYTES, batch, key_of, load_checked, open_tier

from kvos.errors import InvalidConfigError
from kvos.tiers.base import Loaded
from kvos.tiers.disk.about import MOST_MODELS, About, read_about, write_about
from kvos.tiers.disk.index import CATALOG_BYTES
from kvos.tiers.disk.pack import HEADER_BYTES
from kvos.tiers.disk.survey import survey_folder
from kvos.tiers.disk.upkeep import FolderUpkeep, locked_folder

RECORD = HEADER_BYTES + 4 * BLOCK_SIZE + BYTES


def filled(folder: Path, *batches: range) -> Path:
    """A closed tier's folder with these blocks, one pack for each batch."""
    tier = open_tier(folder)
    for numbers in batches:
        tier.store(batch(numbers))
    tier.close()
    return folder


def packs_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pack"))


def progress() -> tuple[list[int], object]:
    seen: list[int] = []
    return seen, seen.append


# -- looking ---------------------------------------------------------------------------------------------------------


def test_a_survey_beside_the_open_tier_says_what_the_tier_says(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch(range(5)))
    tier.store(batch(range(5, 8)))
    load_checked(tier, [0, 1])
    tier.store(batch([8]))  # the hits reach the catalog with the next commit
    found = survey_folder(tmp_path)
    usage = tier.usage()
    assert (found.blocks, found.used_bytes) == (usage.blocks, usage.used_bytes)
    assert (found.packs, found.hits, found.blocks_hit) == (3, 2, 2)
    assert (found.dead_bytes, found.lost_blocks, found.problem) == (0, 0, "")
    written = [path.stat().st_mtime for path in packs_of(tmp_path)]
    assert (found.oldest, found.newest) == (min(written), max(written))
    tier.drop([key_of(0)])
    assert survey_folder(tmp_path).dead_bytes == RECORD
    assert load_checked(tier, [1]) == [Loaded.HIT], "looking takes nothing from the tier"
    tier.close()


def test_a_survey_of_a_closed_or_an_empty_folder(tmp_path: Path) -> None:
    empty = survey_folder(tmp_path)
    assert (empty.blocks, empty.packs, empty.oldest) == (0, 0, None)
    assert survey_folder(filled(tmp_path / "x", range(4))).blocks == 4


def test_a_survey_names_what_is_lost_and_a_catalog_that_cannot_be_read(tmp_path: Path) -> None:
    filled(tmp_path, range(4), range(4, 6))
    packs_of(tmp_path)[0].unlink()
    found = survey_folder(tmp_path)
    assert (found.blocks, found.lost_blocks) == (2, 4)
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 1000)
    found = survey_folder(tmp_path)
    assert "database" in found.problem
    assert found.blocks == 0


# -- verifying -------------------------------------------------------------------------------------------------------


def test_whole_blocks_are_read_to_the_last_byte_and_stay(tmp_path: Path) -> None:
    filled(tmp_path, range(300), range(300, 310))
    seen, told = progress()
    blocks, found = FolderUpkeep(tmp_path).verify(told)
    assert (blocks, found) == (310, [])
    assert seen[-1] == 310 * RECORD
    assert seen == sorted(seen)
    tier = open_tier(tmp_path)
    assert load_checked(tier, range(310)) == [Loaded.HIT] * 310
    tier.close()


@pytest.mark.parametrize("byte", [0, HEADER_BYTES - 1, HEADER_BYTES + 3, RECORD - 1])
def test_a_flipped_bit_is_named_by_file_and_place_and_dropped(tmp_path: Path, byte: int) -> None:
    filled(tmp_path, range(6))
    (pack,) = packs_of(tmp_path)
    data = bytearray(pack.read_bytes())
    data[2 * RECORD + byte] ^= 4
    pack.write_bytes(data)
    blocks, (damage,) = FolderUpkeep(tmp_path).verify(lambda _: None)
    assert blocks == 6
    assert damage.where == f"{pack.name}, block {key_of(2)[:6].hex()}, at byte {2 * RECORD:,}"
    tier = open_tier(tmp_path)
    assert load_checked(tier, range(6)) == [Loaded.MISS if n == 2 else Loaded.HIT for n in range(6)]
    tier.check_invariants()
    tier.close()
    assert FolderUpkeep(tmp_path).verify(lambda _: None) == (5, [])


def test_a_cut_file_and_a_missing_one_are_named_block_by_block(tmp_path: Path) -> None:
    filled(tmp_path, range(4), range(4, 7))
    first, second = packs_of(tmp_path)
    os.truncate(first, 3 * RECORD + 10)
    second.unlink()
    blocks, found = FolderUpkeep(tmp_path).verify(lambda _: None)
    assert blocks == 7
    lost = [(first, 3), *((second, number) for number in (4, 5, 6))]
    expected = {f"{pack.name}, block {key_of(number)[:6].hex()}" for pack, number in lost}
    assert {damage.where for damage in found} == expected


def test_a_catalog_that_cannot_be_read_is_damage_and_is_rebuilt(tmp_path: Path) -> None:
    filled(tmp_path, range(4))
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 1000)
    blocks, found = FolderUpkeep(tmp_path).verify(lambda _: None)
    assert (blocks, [damage.where for damage in found]) == (4, ["catalog.sqlite"])
    assert FolderUpkeep(tmp_path).verify(lambda _: None) == (4, [])


def test_ctrl_c_while_verifying_leaves_every_block(tmp_path: Path) -> None:
    filled(tmp_path, range(300), range(300, 310))

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FolderUpkeep(tmp_path).verify(interrupt)
    assert FolderUpkeep(tmp_path).verify(lambda _: None) == (310, [])


# -- collecting and clearing -----------------------------------------------------------------------------------------


def test_collect_gives_back_the_bytes_of_dropped_blocks(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.store(batch(range(10)))
    tier.drop([key_of(number) for number in range(3, 10)])
    tier.close()
    assert FolderUpkeep(tmp_path).collect(1 << 30) == (7 * RECORD, 0)
    assert sum(path.stat().st_size for path in packs_of(tmp_path)) == 3 * RECORD
    tier = open_tier(tmp_path)
    assert load_checked(tier, range(4)) == [Loaded.HIT] * 3 + [Loaded.MISS]
    tier.check_invariants()
    tier.close()


def test_collect_keeps_the_most_recently_used_within_a_capacity(tmp_path: Path) -> None:
    filled(tmp_path, range(10), range(10, 20))
    tier = open_tier(tmp_path)
    load_checked(tier, range(10))
    tier.close()
    # A sixteenth is kept free for packs on the move.
    capacity = CATALOG_BYTES + 16 * (RECORD + 256) * 16 // 15 + 1
    freed, evicted = FolderUpkeep(tmp_path).collect(capacity)
    assert evicted == 4
    assert freed == 4 * (RECORD + 256)
    assert survey_folder(tmp_path).used_bytes <= capacity
    tier = open_tier(tmp_path)
    assert load_checked(tier, range(10)) == [Loaded.HIT] * 10
    tier.close()


def test_clear_leaves_nothing_but_the_lock(tmp_path: Path) -> None:
    filled(tmp_path, range(10))
    write_about(tmp_path, ABOUT)
    FolderUpkeep(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir() if path.name != "lock"] == []
    tier = open_tier(tmp_path)
    assert load_checked(tier, [0]) == [Loaded.MISS]
    tier.close()


def test_a_folder_in_use_is_not_locked(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(InvalidConfigError, match="end it"), locked_folder(tmp_path):
        pass
    tier.close()
    with locked_folder(tmp_path), pytest.raises(InvalidConfigError, match="in use"):
        open_tier(tmp_path)
    open_tier(tmp_path).close()


# -- what a folder says of itself ------------------------------------------------------------------------------------

ABOUT = About(("toy",), "float32", 8, 3, 1000, "plain", 1, os.getpid(), 5.0)


def test_models_that_were_seen_are_kept_the_latest_first(tmp_path: Path) -> None:
    write_about(tmp_path, ABOUT)
    assert read_about(tmp_path) == ABOUT
    for number in range(MOST_MODELS):
        write_about(tmp_path, About((f"m{number}",), *[getattr(ABOUT, name) for name in About.__slots__[1:]]))
    found = read_about(tmp_path)
    assert found is not None
    assert found.models == tuple(f"m{number}" for number in reversed(range(MOST_MODELS)))
    assert [path.name for path in tmp_path.iterdir()] == ["about.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"models": 1}', "[" * 100_000, "\udcff"])
def test_what_cannot_be_read_is_as_good_as_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "about.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_about(tmp_path) is None
    write_about(tmp_path, ABOUT)
    assert read_about(tmp_path) == ABOUT


def test_a_codec_is_found_without_being_told(tmp_path: Path) -> None:
    filled(tmp_path, range(3))
    write_about(tmp_path, ABOUT)
    (tmp_path / "about.json").unlink()
    assert FolderUpkeep(tmp_path).verify(lambda _: None) == (3, [])
