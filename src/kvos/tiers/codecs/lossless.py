"""Byte planes and zstd: all first bytes of the elements, then all second bytes, and so on, each plane by itself.

The sign and exponent bytes of neighbours are alike and those of the mantissa are close to noise. Side by side in
memory they hide each other from the compressor; divided, the first kind shrinks, and the second is kept as it is,
which costs neither time to write nor to read.

::

    one block   | encoded size of each plane, uint32 | plane 0 | plane 1 | ...    a plane of full size is not compressed
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from kvos.storage.layout import KVLayout
from kvos.tiers.base import PayloadBytes
from kvos.tiers.codec import Codec

__all__ = ["LosslessCodec"]

WORTH_IT = 0.95
"""A plane that shrinks to no less than this is kept as it is."""


class LosslessCodec(Codec):
    """Compresses blocks without losing a bit.

    Each call has a (de)compressor of its own, which is what makes it safe from any thread.

    Args:
        layout: gives the size of an element and of a block, in bytes.
        level: of zstd; higher is slower and smaller. Any level decodes what any other wrote.
    """

    lossless = True

    def __init__(self, layout: KVLayout, level: int = 1) -> None:
        self._itemsize = layout.dtype.itemsize
        self._plane_bytes = layout.bytes_per_block // self._itemsize
        self._level = level
        # The size of an element is part of the format: with another one the planes go together wrongly.
        self.name = f"lossless-planes-{self._itemsize}"

    def encode(self, data: PayloadBytes) -> Sequence[bytes]:
        compressor = zstandard.ZstdCompressor(level=self._level, write_content_size=True)
        # Planes of one batch are alike: what did not shrink in the first block is not tried in the others.
        shrinks = [True] * self._itemsize
        return [self._encode_one(compressor, block, shrinks) for block in data]

    def _encode_one(self, compressor: zstandard.ZstdCompressor, block: PayloadBytes, shrinks: list[bool]) -> bytes:
        planes: list[bytes] = []
        for number, plane in enumerate(np.ascontiguousarray(block.reshape(-1, self._itemsize).T)):
            encoded = compressor.compress(plane.data) if shrinks[number] else b""
            if not 0 < len(encoded) < WORTH_IT * self._plane_bytes:
                shrinks[number] = False
                encoded = plane.tobytes()
            planes.append(encoded)
        return b"".join((np.array([len(plane) for plane in planes], "<u4").tobytes(), *planes))

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        decompressor = zstandard.ZstdDecompressor()
        return [self._decode_one(decompressor, block, row) for block, row in zip(encoded, out, strict=True)]

    def _decode_one(
        self, decompressor: zstandard.ZstdDecompressor, block: bytes | memoryview, row: PayloadBytes
    ) -> bool:
        start = 4 * self._itemsize
        if len(block) < start:
            return False
        sizes = [int(size) for size in np.frombuffer(block, "<u4", self._itemsize)]
        if len(block) != start + sum(sizes):
            return False
        elements = row.reshape(-1, self._itemsize)
        for number, size in enumerate(sizes):
            plane = self._decode_plane(decompressor, memoryview(block)[start : start + size])
            if plane is None:
                return False
            elements[:, number] = np.frombuffer(plane, np.uint8)
            start += size
        return True

    def _decode_plane(self, decompressor: zstandard.ZstdDecompressor, encoded: memoryview) -> bytes | memoryview | None:
        """None if it is not an encoded plane."""
        if len(encoded) == self._plane_bytes:
            return encoded
        try:
            # Before anything is allocated: a damaged header may ask for any amount of memory.
            if zstandard.get_frame_parameters(encoded).content_size != self._plane_bytes:
                return None
            content: bytes = decompressor.decompress(encoded, allow_extra_data=False)
        except zstandard.ZstdError:
            return None
        return content if len(content) == self._plane_bytes else None
