"""What every tier below the device does: store and load blocks by key, in batches. Knows no sessions and no models.

A block is one run of bytes across layers (:meth:`kvos.storage.BlockPool.export_blocks`). It is stored with its token
ids and its parent's key, and a load says which ones it expects: what does not agree is a miss, never wrong content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

import numpy as np
import numpy.typing as npt

__all__ = ["BlockBatch", "BlockKey", "BlockRequest", "Loaded", "PayloadBytes", "Stored", "Tier", "TierUsage"]

BlockKey = NewType("BlockKey", bytes)
"""Content address of a full block, 32 bytes: model, tenant, numeric and exactness class, and all tokens to its end."""

PayloadBytes = npt.NDArray[np.uint8]
"""``[blocks, bytes_per_block]``, C-contiguous."""


class Stored(Enum):
    """What became of one block of a store."""

    STORED = "stored"
    PRESENT = "was there already"
    NO_ROOM = "larger than what the tier may hold"
    FAILED = "could not be written"


class Loaded(Enum):
    """What became of one block of a load."""

    HIT = "loaded and verified"
    MISS = "not there"
    DAMAGED = "there, but its bytes, tokens or parent do not agree; dropped"
    FAILED = "could not be read"


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks that are wanted, and what they must hold.

    Attributes:
        keys: one per block.
        parents: the key before each; the root's for the first of a sequence.
        tokens: ``[blocks, block_size]`` int32.
    """

    keys: tuple[BlockKey, ...]
    parents: tuple[BlockKey, ...]
    tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks to store: what a request names, and ``data`` ``[blocks, bytes_per_block]``. Owned by the caller."""

    blocks: BlockRequest
    data: PayloadBytes

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is.

    Attributes:
        capacity_bytes: the most that it may hold.
        used_bytes: what it holds now, with whatever stands around the blocks.
        blocks: how many blocks can be found.
        counters: what happened so far, by name: stored, hits, misses, damaged, failed, evicted, ...
    """

    capacity_bytes: int
    used_bytes: int
    blocks: int
    counters: Mapping[str, int] = field(default_factory=dict)


class Tier(ABC):
    """Blocks by key. Any thread; the mover calls from one thread of its own.

    No verb raises for what the world does (a full disk, a missing file, a flipped bit): that is a result, a counter and
    a log line, and when the cause is gone the tier works again.
    """

    name: str
    lossless: bool = True
    """Whether a hit is bit for bit what was stored."""

    @abstractmethod
    def store(self, batch: BlockBatch) -> list[Stored]:
        """Store blocks; each can be found only after all its bytes are safely there. May drop less valuable ones."""

    @abstractmethod
    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        """Load ``wanted[i]`` into ``out[i]``, verified. A row whose result is not HIT holds anything."""

    @abstractmethod
    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys would probably be found. Quick, without reading blocks; the engine thread may ask."""

    @abstractmethod
    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget these blocks; keys that are not there are ignored."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """How full the tier is. Quick."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory, files and threads. Idempotent."""
