"""A block's bytes as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvos.tiers.base import PayloadBytes
from kvos.tiers.codec import Codec

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Writes the bytes down unchanged: views of what it is given. Keeps no state."""

    name = "raw"
    lossless = True

    def encode(self, data: PayloadBytes) -> list[bytes | memoryview]:
        return [row.data for row in data]

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        return [self._decode_one(block, row) for block, row in zip(encoded, out, strict=True)]

    @staticmethod
    def _decode_one(block: bytes | memoryview, row: PayloadBytes) -> bool:
        content = np.frombuffer(block, dtype=np.uint8)
        if content.size != row.size:
            return False
        row[:] = content
        return True
