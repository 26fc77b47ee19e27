"""Numbered blocks for tests of tiers, and the factories of the tiers that have to pass them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kvos.storage.layout import KVLayout
from kvos.testing import FaultyTier
from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier
from kvos.tiers.codec import Codec
from kvos.tiers.codecs import LosslessCodec, RawCodec
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.index import BYTES_PER_ROW, CATALOG_BYTES
from kvos.tiers.disk.pack import HEADER_BYTES
from kvos.tiers.disk.shelf import PACKS_AT_LEAST
from kvos.tiers.host import HostTier
from kvos.tiers.memory import MemoryTier

LAYOUT = KVLayout.uniform(num_layers=2, kv_heads=1, head_dim=4, block_size=8, dtype=torch.float32)
FAST_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""For what asks a disk to sync thousands of times; a machine that stops is not what is tested."""

BLOCK_BYTES = LAYOUT.bytes_per_block

TierFactory = Callable[[int, Path], Tier]
"""A tier for ``LAYOUT`` with room for so many blocks of noise, up to 8, and not one more; with 0, for a bit less than
one. The folder is empty and its own."""


def room_for(blocks: int, around_each: int = 0) -> int:
    """Bytes for blocks, with a little for what the codec adds to noise."""
    return blocks * (BLOCK_BYTES + around_each + 32) if blocks else BLOCK_BYTES - 1


def _disk(blocks: int, folder: Path, codec: Codec) -> DiskTier:
    room = room_for(blocks, HEADER_BYTES + 4 * LAYOUT.block_size + BYTES_PER_ROW)
    kept_free = room // (PACKS_AT_LEAST - 1)
    return DiskTier(
        folder,
        capacity_bytes=CATALOG_BYTES + room + kept_free,
        bytes_per_block=BLOCK_BYTES,
        block_size=LAYOUT.block_size,
        codec=codec,
    )


TIERS: dict[str, TierFactory] = {
    "memory": lambda blocks, folder: MemoryTier(BLOCK_BYTES, room_for(blocks)),
    "host": lambda blocks, folder: HostTier(BLOCK_BYTES, room_for(blocks)),
    "host lossless": lambda blocks, folder: HostTier(BLOCK_BYTES, room_for(blocks), LosslessCodec(LAYOUT)),
    "disk": lambda blocks, folder: _disk(blocks, folder, RawCodec()),
    "disk lossless": lambda blocks, folder: _disk(blocks, folder, LosslessCodec(LAYOUT)),
    "faulty, without a fault": lambda blocks, folder: FaultyTier(MemoryTier(BLOCK_BYTES, room_for(blocks))),
}


def check_invariants(tier: Tier) -> None:
    """Of those tiers that have any."""
    if isinstance(tier, HostTier | DiskTier):
        tier.check_invariants()


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(number.to_bytes(8, "little", signed=True), digest_size=32).digest())


def content_of(number: int, version: int = 0) -> PayloadBytes:
    """``[bytes_per_block]`` of noise, which no codec makes smaller."""
    return np.random.default_rng([number, version]).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def request(numbers: Sequence[int], version: int = 0) -> BlockRequest:
    """These blocks; another version has the same keys and other tokens."""
    first = np.array(numbers, dtype=np.int32).reshape(-1, 1) * LAYOUT.block_size + version * 100_000
    tokens = (first + np.arange(LAYOUT.block_size, dtype=np.int32)).astype(np.int32)
    return BlockRequest(tuple(map(key_of, numbers)), tuple(key_of(number - 1) for number in numbers), tokens)


def other_parents(wanted: BlockRequest) -> BlockRequest:
    return BlockRequest(wanted.keys, tuple(key_of(-99) for _ in wanted.keys), wanted.tokens)


def batch(numbers: Sequence[int], version: int = 0) -> BlockBatch:
    data = np.stack([content_of(number, version) for number in numbers])
    return BlockBatch(request(numbers, version), data)


def store(tier: Tier, *numbers: int, version: int = 0) -> list[Stored]:
    """Store in one batch. The caller's array is overwritten afterwards: a tier must have its own copy."""
    blocks = batch(numbers, version)
    results = tier.store(blocks)
    blocks.data[:] = 0
    return results


def load(tier: Tier, wanted: BlockRequest) -> tuple[list[Loaded], PayloadBytes]:
    out = np.full((len(wanted), BLOCK_BYTES), 0xAA, dtype=np.uint8)
    return tier.load(wanted, out), out


def found(tier: Tier, *numbers: int, version: int = 0) -> list[Loaded]:
    """Load in one batch, and compare each hit bit for bit."""
    results, out = load(tier, request(numbers, version))
    for row, number in enumerate(numbers):
        if results[row] is Loaded.HIT:
            np.testing.assert_array_equal(out[row], content_of(number, version))
    return results
