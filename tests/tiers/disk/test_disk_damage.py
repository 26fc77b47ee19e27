"""Flipped bits, truncated files and killed writers: a miss or the right bytes, never wrong ones."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_blocks import ROOM, batch, load_checked, open_tier
from killed_writer import BATCH

from kvos.tiers.base import Loaded
from kvos.tiers.disk.index import CATALOG_BYTES

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


def test_damaged_packs_give_misses_that_are_counted(saved: Path, tmp_path: Path) -> None:
    for seed in range(60):
        one_round(saved, tmp_path / str(seed), random.Random(seed))


@pytest.mark.long
def test_damaged_packs_at_length(saved: Path, tmp_path: Path) -> None:
    for seed in range(1000, 1500):
        one_round(saved, tmp_path / str(seed), random.Random(seed))


def test_a_damaged_catalog_never_gives_wrong_bytes(
    saved: Path, tmp_path: Path, rounds: Callable[[int, int], int]
) -> None:
    for seed in range(rounds(60, 500)):
        folder = tmp_path / str(seed)
        shutil.copytree(saved, folder)
        damage(folder / "catalog.sqlite", random.Random(seed))
        tier = open_tier(folder)
        load_checked(tier, NUMBERS)
        tier.check_invariants()
        tier.store(batch(NUMBERS))
        assert load_checked(tier, NUMBERS) == [Loaded.HIT] * len(NUMBERS)
        tier.check_invariants()
        tier.close()


def kill_and_check(folder: Path, kills: int, rng: random.Random, capacity: int = ROOM) -> None:
    """Kill a writer at random moments; what it acknowledged is there, unless it was evicted."""
    acknowledged: list[int] = []
    for _ in range(kills):
        first = (acknowledged[-1] if acknowledged else 0) + 1000
        with subprocess.Popen(
            [sys.executable, HERE / "killed_writer.py", folder, str(first), str(capacity)],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.3))
            writer.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in writer.stdout.read().splitlines() if line]
        tier = open_tier(folder, capacity)
        tier.check_invariants()
        blocks = [number for start in acknowledged for number in range(start, start + BATCH)]
        results = load_checked(tier, blocks)
        assert set(results) <= {Loaded.HIT, Loaded.MISS}
        if capacity == ROOM:
            assert results == [Loaded.HIT] * len(blocks)
        assert tier.usage().used_bytes <= capacity
        tier.close()
    assert acknowledged


def test_killed_writers_lose_nothing_acknowledged(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 5, random.Random(0))


def test_killed_writers_that_evict_leave_a_tier_within_its_capacity(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 3, random.Random(1), CATALOG_BYTES + (200 << 10))


@pytest.mark.long
def test_killed_writers_at_length(tmp_path: Path) -> None:
    for folder, seed in (("a", 2), ("b", 3), ("c", 4), ("d", 5)):
        kill_and_check(tmp_path / folder, 50, random.Random(seed))
