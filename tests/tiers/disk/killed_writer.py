"""Stores batches in a disk tier for ever, and is killed while it does so: ``killed_writer.py FOLDER KILLS CAPACITY``.

Each child is forked from a process that has imported everything already, so that a kill costs milliseconds. After each
kill the tier is opened and looked at; all that was acknowledged must be there, unless it was evicted. Prints what was
found as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from disk_blocks import ROOM, batch, load_checked, open_tier

from kvos.tiers.base import Loaded, Stored
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.index import CATALOG_BYTES

BATCH = 20
PACK_BYTES = 10_000
MOST_STORES = 4
FIRST_STORE_S = 0.005
SAMPLE = 3
NUMBER = struct.Struct("<q")


def store_for_ever(folder: Path, capacity: int, first: int, acknowledgements: int) -> None:
    """Write the number of each batch's first block once it is stored, and -1 when the tier is open."""
    tier = open_tier(folder, capacity, pack_bytes=PACK_BYTES)
    os.write(acknowledgements, NUMBER.pack(-1))
    for start in itertools.count(first, BATCH):
        if tier.store(batch(range(start, start + BATCH))) != [Stored.STORED] * BATCH:
            raise RuntimeError(f"batch {start} was not stored")
        os.write(acknowledgements, NUMBER.pack(start))


def killed_child(folder: Path, capacity: int, first: int, rng: random.Random) -> list[int]:
    """Fork a writer and kill it within one of its first stores; the batches that it acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store_for_ever(folder, capacity, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as acknowledgements:
        seen = acknowledgements.read(NUMBER.size)
        opened_at = time.perf_counter()
        stores = rng.randint(0, MOST_STORES)
        seen += acknowledgements.read(stores * NUMBER.size)
        one_store = (time.perf_counter() - opened_at) / stores if stores else FIRST_STORE_S
        time.sleep(rng.uniform(0, 1.2 * one_store))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status != signal.SIGKILL:
            raise RuntimeError("the writer ended by itself")
        seen += acknowledgements.read()
    opened, *starts = [start for (start,) in NUMBER.iter_unpack(seen[: len(seen) // NUMBER.size * NUMBER.size])]
    assert opened == -1
    return starts


def check_accounts(tier: DiskTier, folder: Path, capacity: int) -> None:
    """What the tier says it takes is what the files take, and no more than it may."""
    tier.check_invariants()
    packs = sum(path.stat().st_size for path in folder.glob("*.pack"))
    catalog = sum(path.stat().st_size for path in folder.glob("catalog*"))
    used = tier.usage().used_bytes
    assert packs <= used <= capacity
    assert packs + catalog <= used, "the catalog takes no more than its estimate"
    assert not list(folder.glob("*.tmp"))


def blocks_of(starts: list[int]) -> list[int]:
    return [number for start in starts for number in range(start, start + BATCH)]


def main(folder: Path, kills: int, capacity: int) -> None:
    rng = random.Random(capacity)
    acknowledged: list[int] = []
    counters = dict.fromkeys(("adopted", "damaged", "unfinished", "evicted"), 0)
    for attempt in range(kills):
        new = killed_child(folder, capacity, attempt * 100_000, rng)
        counters["unfinished"] += len(list(folder.glob("*.tmp")))
        tier = open_tier(folder, capacity, pack_bytes=PACK_BYTES)
        check_accounts(tier, folder, capacity)
        old = rng.sample(acknowledged, min(SAMPLE, len(acknowledged)))
        acknowledged += new
        wanted = blocks_of(acknowledged if attempt == kills - 1 else new[-SAMPLE:] + old)
        results = load_checked(tier, wanted)
        assert set(results) <= {Loaded.HIT, Loaded.MISS}
        if capacity == ROOM:
            assert set(results) <= {Loaded.HIT}
        elif new:
            assert set(load_checked(tier, blocks_of(new[-1:]))) == {Loaded.HIT}, "the newest are not evicted"
        for name, count in tier.usage().counters.items():
            counters[name] = counters.get(name, 0) + count
        tier.close()
    used = counters | {"kills": kills, "batches": len(acknowledged)}
    sys.stdout.write(json.dumps(used))


if __name__ == "__main__":
    small = sys.argv[3] == "small"
    main(Path(sys.argv[1]), int(sys.argv[2]), CATALOG_BYTES + (200 << 10) if small else ROOM)
