"""How a tier writes a block's bytes down: a codec per tier. Knows the KV layout, no keys and no files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvos.tiers.base import PayloadBytes

__all__ = ["Codec"]


class Codec(ABC):
    """Encodes and decodes whole blocks, in batches. Any thread.

    Attributes:
        name: what the tier writes beside each block; with it an upgrade never misreads one.
        lossless: whether decoding gives the bytes back that were encoded.
    """

    name: str
    lossless: bool

    @abstractmethod
    def encode(self, data: PayloadBytes) -> Sequence[bytes | memoryview]:
        """One string of bytes per row of ``data`` ``[blocks, bytes_per_block]``; may be a view of it."""

    @abstractmethod
    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        """Write ``encoded[i]`` into ``out[i]``; says for each whether it was an encoded block of this layout."""
