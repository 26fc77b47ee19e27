"""Flipped bits, truncated files and killed writers: a miss or the right bytes, never wrong ones."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import batch, load_checked, open_tier

from kvos.tiers.base import Loaded

HERE = Path(__file__).parent
NUMBERS = list(range(12))


def damage(path: Path, rng: random.Random) -> None:
    """Flip one bit, or cut the end off."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.7:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tier = open_tier(folder, pack_bytes=4000)
    tier.store(batch(NUMBERS))
    tier.close()
    return folder


def one_round(saved: Path, folder: Path, rng: random.Random) -> None:
    shutil.copytree(saved, folder)
    opened_before = rng.random() < 0.5
    tier = open_tier(folder) if opened_before else None
    for path in rng.sample(sorted(folder.glob("*.pack")), rng.randint(1, 2)):
        damage(path, rng)
    tier = tier or open_tier(folder)
    results = load_checked(tier, NUMBERS)
    lost = len(NUMBERS) - results.count(Loaded.HIT)
    assert lost >= 1, "a pack is all blocks: every damage hits one"
    assert tier.usage().counters["damaged"] == lost
    tier.check_invariants()
    assert tier.verify() == 0
    tier.store(batch(NUMBERS))
    assert load_checked(tier, NUMBERS) == [Loaded.HIT] * len(NUMBERS)
    tier.close()
    shutil.rmtree(folder)


def test_damaged_packs_give_misses_that_are_counted(
    saved: Path, fast_folder: Path, rounds: Callable[[int, int], int]
) -> None:
    for seed in range(rounds(60, 500)):
        one_round(saved, fast_folder / str(seed), random.Random(seed))


def test_a_damaged_catalog_never_gives_wrong_bytes(
    saved: Path, fast_folder: Path, rounds: Callable[[int, int], int]
) -> None:
    for seed in range(rounds(60, 500)):
        folder = fast_folder / str(seed)
        shutil.copytree(saved, folder)
        damage(folder / "catalog.sqlite", random.Random(seed))
        tier = open_tier(folder)
        load_checked(tier, NUMBERS)
        tier.check_invariants()
        tier.store(batch(NUMBERS))
        assert load_checked(tier, NUMBERS) == [Loaded.HIT] * len(NUMBERS)
        tier.check_invariants()
        tier.close()


def kill_and_check(folder: Path, kills: int, capacity: str) -> dict[str, int]:
    """Kill a writer at random moments, see ``killed_writer.py``; what it found."""
    run = subprocess.run(
        [sys.executable, HERE / "killed_writer.py", folder, str(kills), capacity],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen: dict[str, int] = json.loads(run.stdout)
    assert seen["kills"] == kills
    assert seen["damaged"] == 0
    assert seen["batches"] > kills
    return seen


def test_killed_writers_lose_nothing_acknowledged(fast_folder: Path, rounds: Callable[[int, int], int]) -> None:
    kills = rounds(8, 200)
    seen = kill_and_check(fast_folder, kills, "large")
    assert seen["adopted"] + seen["unfinished"] > 0 or kills < 100, "no kill hit a store: this test shows nothing"


def test_killed_writers_that_evict_leave_a_tier_within_its_capacity(
    fast_folder: Path, rounds: Callable[[int, int], int]
) -> None:
    kills = rounds(8, 200)
    seen = kill_and_check(fast_folder, kills, "small")
    assert seen["adopted"] + seen["unfinished"] > 0 or kills < 100
