"""What a block is, seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvos.types import BlockId, OwnerId

__all__ = ["BlockStatus", "CacheBlock"]


class BlockStatus(IntEnum):
    """The four states that partition the pool."""

    FREE = 0
    """In the free queue."""
    ACTIVE = 1
    """Held by one block table or more, or busy in a transfer or a step."""
    CACHED = 2
    """Held by none, content still valid and findable; may be reclaimed."""
    RESERVED = 3
    """Promised to a request that has not written yet."""


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """A snapshot of one block; it does not follow later changes.

    Attributes:
        ref_count: block tables that hold it.
        busy: transfers and steps that use it now.
        filled: slots that hold tokens, from the front.
        published: findable by content, and therefore never written again while it is.
        owner: who got it last; what it holds is theirs.
    """

    id: BlockId
    status: BlockStatus
    ref_count: int
    busy: int
    filled: int
    published: bool
    owner: OwnerId
