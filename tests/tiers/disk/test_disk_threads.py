"""Several threads on one disk tier: each sees what it would see alone, and nobody sees half a block."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import BLOCK_SIZE, BYTES, ROOM, batch, content, key_of, open_tier, request

from kvos.tiers.base import Loaded, Stored, Tier
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES
from kvos.tiers.disk.pack import HEADER_BYTES
from kvos.tiers.memory import MemoryTier

THREADS = 4
OWN_BLOCKS = 40
SHARED = 1_000_000
"""Numbers from here on belong to everybody."""


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def load(tier: Tier, numbers: list[int]) -> tuple[list[Loaded], list[bytes]]:
    """Results, and the bytes of those that were found."""
    out = np.zeros((len(numbers), BYTES), np.uint8)
    results = tier.load(request(numbers), out)
    return results, [out[row].tobytes() for row, result in enumerate(results) if result is Loaded.HIT]


def one_agent(tier: DiskTier, first: int, seed: int, steps: int) -> None:
    """Blocks of its own must behave as in a memory tier that nobody else uses."""
    rng = random.Random(seed)
    alone = MemoryTier(BYTES, ROOM)
    for _ in range(steps):
        numbers = rng.sample(range(first, first + OWN_BLOCKS), rng.randint(1, 8))
        keys = [key_of(number) for number in numbers]
        verb = rng.choice(["store", "store", "load", "load", "contains", "drop", "usage"])
        if verb == "store":
            assert tier.store(batch(numbers)) == alone.store(batch(numbers))
        elif verb == "load":
            assert load(tier, numbers) == load(alone, numbers)
        elif verb == "contains":
            assert tier.contains(keys) == alone.contains(keys)
        elif verb == "drop":
            tier.drop(keys)
            alone.drop(keys)
        else:
            assert tier.usage().blocks >= alone.usage().blocks
    everything = list(range(first, first + OWN_BLOCKS))
    assert load(tier, everything) == load(alone, everything)


def meddler(tier: DiskTier, seed: int, steps: int) -> None:
    """Stores, loads and drops what others store, load and drop, too."""
    rng = random.Random(seed)
    for _ in range(steps):
        numbers = rng.sample(range(SHARED, SHARED + 12), rng.randint(1, 6))
        verb = rng.choice(["store", "load", "drop", "verify"])
        if verb == "store":
            assert set(tier.store(batch(numbers))) <= {Stored.STORED, Stored.PRESENT}
        elif verb == "load":
            results, found = load(tier, numbers)
            assert set(results) <= {Loaded.HIT, Loaded.MISS}
            hits = [number for number, result in zip(numbers, results, strict=True) if result is Loaded.HIT]
            assert found == [row.tobytes() for row in content(hits)] if hits else not found
        elif verb == "drop":
            tier.drop([key_of(number) for number in numbers])
        else:
            assert tier.verify() == 0


def test_each_thread_sees_its_blocks_as_if_it_were_alone(fast_folder: Path, rounds: Callable[[int, int], int]) -> None:
    for seed in range(rounds(2, 30)):
        folder = fast_folder / str(seed)
        tier = open_tier(folder, pack_bytes=5000)
        agents = [
            lambda n=n, seed=seed: one_agent(tier, n * OWN_BLOCKS, 10 * seed + n, 60)  # noqa: B023 - ended below
            for n in range(THREADS)
        ]
        meddlers = [lambda n=n, seed=seed: meddler(tier, 10 * seed + n, 60) for n in range(2)]  # noqa: B023
        together([*agents, *meddlers])
        tier.check_invariants()
        assert "damaged" not in tier.usage().counters
        blocks = tier.usage().blocks
        tier.close()
        again = open_tier(folder)
        assert again.usage().blocks == blocks
        assert again.verify() == 0
        again.close()


def test_threads_that_push_each_other_out_stay_within_the_capacity(
    fast_folder: Path, rounds: Callable[[int, int], int]
) -> None:
    record = HEADER_BYTES + 4 * BLOCK_SIZE + BYTES + BYTES_PER_ROW
    tier = open_tier(fast_folder, CATALOG_BYTES + 60 * record)
    over: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            usage = tier.usage()
            over.extend([usage.used_bytes] if usage.used_bytes > usage.capacity_bytes else [])

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds(40, 600)):
            numbers = rng.sample(range(200), rng.randint(1, 12))
            assert set(tier.store(batch(numbers))) <= {Stored.STORED, Stored.PRESENT}
            results, found = load(tier, numbers)
            hits = [number for number, result in zip(numbers, results, strict=True) if result is Loaded.HIT]
            assert found == ([row.tobytes() for row in content(hits)] if hits else [])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        together([lambda seed=seed: work(seed) for seed in range(THREADS)])
    finally:
        done.set()
        watcher.join()
    tier.check_invariants()
    assert tier.usage().counters["evicted"] > 100
    assert not over
    assert sum(path.stat().st_size for path in fast_folder.iterdir()) <= tier.usage().capacity_bytes
    tier.close()
