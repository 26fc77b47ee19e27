"""A pool grows where one allocation of its size is impossible: shown in a really fragmented address space.

A child process takes all of its own address space with reservations that no memory stands behind, opens a few holes in
it, and shows that torch cannot get one tensor of the pool's size, while the pool of that size grows into the holes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAGMENTED = """
import ctypes, os, sys
import numpy as np, torch
from kvos.storage import BlockPool, KVLayout

MIB = 1 << 20
PROT_NONE, MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE = 0x0, 0x02, 0x20, 0x4000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value

# One layer, keys and values of 1 MiB per block: a segment of 8 blocks is two tensors of 8 MiB.
layout = KVLayout.uniform(num_layers=1, kv_heads=16, head_dim=128, block_size=128, dtype=torch.float32)
pool = BlockPool(layout, max_blocks=32, blocks_per_segment=8)
torch.set_num_threads(1)
torch.zeros(8).index_copy_(0, torch.zeros(1, dtype=torch.int64), torch.ones(1))

reserved, size = [], 1 << 46
while size >= MIB:
    address = libc.mmap(None, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if address == FAILED:
        size //= 2
    else:
        reserved.append((address, size))
largest = max(reserved, key=lambda piece: piece[1])[0]
for hole in range(12):
    assert libc.munmap(largest + hole * 64 * MIB, 10 * MIB) == 0

whole = layout.bytes_per_block * pool.max_blocks
try:
    torch.zeros(whole, dtype=torch.uint8)
    sys.exit("the address space is not fragmented: one allocation worked")
except RuntimeError:
    print("one allocation failed")
while pool.grow():
    pass
last = np.array([32 * 128 - 1])
pool.write(0, last, torch.full((1, 16, 128), 3.0), torch.full((1, 16, 128), 4.0))
key, value = pool.read(0, last)
assert whole == 64 * MIB and pool.num_blocks == 32
assert key.eq(3).all() and value.eq(4).all()
print("the pool grew to", pool.num_blocks, "blocks in", len(pool.segments), "segments", flush=True)
os._exit(0)  # no destructors: they may want address space that is gone
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reserves address space with Linux's mmap flags")
def test_a_pool_grows_by_segments_where_one_allocation_of_its_size_fails() -> None:
    child = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["one allocation failed", "the pool grew to 32 blocks in 4 segments"]
