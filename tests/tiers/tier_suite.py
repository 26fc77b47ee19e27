"""Numbered blocks for tests of tiers, and the factories of the tiers that have to pass them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kvos.storage.layout import KVLayout
from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier
from kvos.tiers.codecs import LosslessCodec
from kvos.tiers.host import HostTier
from kvos.tiers.memory import MemoryTier

LAYOUT = KVLayout.uniform(num_layers=2, kv_heads=1, head_dim=4, block_size=8, dtype=torch.float32)
BLOCK_BYTES = LAYOUT.bytes_per_block

TierFactory = Callable[[int, Path], Tier]
"""A tier for ``LAYOUT`` of so many bytes; the folder is empty and its own."""

TIERS: dict[str, TierFactory] = {
    "memory": lambda capacity, folder: MemoryTier(BLOCK_BYTES, capacity),
    "host": lambda capacity, folder: HostTier(BLOCK_BYTES, capacity),
    "host lossless": lambda capacity, folder: HostTier(BLOCK_BYTES, capacity, LosslessCodec(LAYOUT)),
}


def room_for(blocks: int) -> int:
    """Bytes that hold ``blocks`` blocks of noise with a little around each, and not one more. For up to 8 blocks."""
    return blocks * (BLOCK_BYTES + 32)


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
