"""Blocks with known content, and a tier for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes
from kvos.tiers.codec import Codec
from kvos.tiers.disk import DiskTier

BLOCK_SIZE = 8
BYTES = 1000
ROOM = 16 << 30


class PlainCodec(Codec):
    name = "plain"
    lossless = True

    def encode(self, data: PayloadBytes) -> list[bytes]:
        return [row.tobytes() for row in data]

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        for row, data in enumerate(encoded):
            if len(data) == out.shape[1]:
                out[row] = np.frombuffer(data, np.uint8)
        return [len(data) == out.shape[1] for data in encoded]


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def request(numbers: Sequence[int]) -> BlockRequest:
    tokens = np.array([[number] * BLOCK_SIZE for number in numbers], np.int32).reshape(-1, BLOCK_SIZE)
    return BlockRequest(tuple(map(key_of, numbers)), tuple(key_of(number + 2**40) for number in numbers), tokens)


def content(numbers: Sequence[int]) -> PayloadBytes:
    return np.stack([np.random.default_rng(number).integers(0, 256, BYTES, np.uint8) for number in numbers])


def batch(numbers: Sequence[int]) -> BlockBatch:
    return BlockBatch(request(numbers), content(numbers))


def open_tier(folder: Path, capacity: int = ROOM, **options: int) -> DiskTier:
    return DiskTier(
        folder, capacity_bytes=capacity, bytes_per_block=BYTES, block_size=BLOCK_SIZE, codec=PlainCodec(), **options
    )


def load_checked(tier: DiskTier, numbers: Sequence[int]) -> list[Loaded]:
    """Load blocks; every hit holds the bytes that were stored."""
    out = np.zeros((len(numbers), BYTES), np.uint8)
    results = tier.load(request(numbers), out)
    for row, result in enumerate(results):
        if result is Loaded.HIT:
            assert np.array_equal(out[row], content([numbers[row]])[0]), f"wrong bytes for block {numbers[row]}"
    return results
