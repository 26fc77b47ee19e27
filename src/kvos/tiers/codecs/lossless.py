"""Byte planes and zstd: all first bytes of the elements, then all second bytes, and so on, in one frame per block.

The sign and exponent bytes of neighbours are alike and those of the mantissa are close to noise. Side by side in
memory they hide each other from the compressor; divided, the first kind shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from kvos.storage.layout import KVLayout
from kvos.tiers.base import PayloadBytes
from kvos.tiers.codec import Codec

__all__ = ["LosslessCodec"]


class LosslessCodec(Codec):
    """Compresses blocks without losing a bit.

    Each call has a (de)compressor of its own, which is what makes it safe from any thread.

    Args:
        layout: gives the size of an element and of a block, in bytes.
        level: of zstd; higher is slower and smaller. Any level decodes what any other wrote.
    """

    lossless = True

    def __init__(self, layout: KVLayout, level: int = 1) -> None:
        self._bytes_per_block = layout.bytes_per_block
        self._itemsize = layout.dtype.itemsize
        self._level = level
        # The size of an element is part of the format: with another one the planes go together wrongly.
        self.name = f"lossless-zstd-{self._itemsize}"

    def encode(self, data: PayloadBytes) -> list[bytes]:
        compressor = zstandard.ZstdCompressor(level=self._level, write_content_size=True)
        elements = data.reshape(len(data), self._bytes_per_block // self._itemsize, self._itemsize)
        # Row by row, so that one block's planes are all that is held beside the result.
        return [compressor.compress(np.ascontiguousarray(block.T).data) for block in elements]

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        decompressor = zstandard.ZstdDecompressor()
        return [self._decode_one(decompressor, block, row) for block, row in zip(encoded, out, strict=True)]

    def _decode_one(
        self, decompressor: zstandard.ZstdDecompressor, block: bytes | memoryview, row: PayloadBytes
    ) -> bool:
        try:
            # Before anything is allocated: a damaged header may ask for any amount of memory.
            if zstandard.get_frame_parameters(block).content_size != self._bytes_per_block:
                return False
            content = decompressor.decompress(block, allow_extra_data=False)
        except zstandard.ZstdError:
            return False
        if len(content) != self._bytes_per_block:
            return False
        planes = np.frombuffer(content, dtype=np.uint8).reshape(self._itemsize, -1)
        row.reshape(-1, self._itemsize)[:] = planes.T
        return True
