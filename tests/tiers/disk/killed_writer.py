"""Stores batches for ever and prints each once it is acknowledged: ``killed_writer.py FOLDER FIRST CAPACITY``.

Prints ``ready`` first, then ``N`` lines: the number of the batch's first block. Meant to be killed.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from disk_blocks import batch, open_tier

from kvos.tiers.base import Stored

BATCH = 20


def main(folder: Path, first: int, capacity: int) -> None:
    tier = open_tier(folder, capacity, pack_bytes=10_000)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for start in itertools.count(first, BATCH):
        if tier.store(batch(range(start, start + BATCH))) != [Stored.STORED] * BATCH:
            raise RuntimeError(f"batch {start} was not stored")
        sys.stdout.write(f"{start}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
