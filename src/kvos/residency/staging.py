"""Staging buffers: memory that transfers use in turn. New memory costs as much as a copy, until it is touched."""

from __future__ import annotations

import numpy as np

from kvos.tiers import PayloadBytes

__all__ = ["StagingBuffers"]


class StagingBuffers:
    """Buffers for ``blocks`` blocks each. Engine thread only.

    Args:
        keep: how many to keep when they are not in use; more than that are made when they are needed.
    """

    def __init__(self, blocks: int, bytes_per_block: int, keep: int) -> None:
        self.blocks = blocks
        self._shape = (blocks, bytes_per_block)
        self._keep = keep
        self._idle: list[PayloadBytes] = []

    def take(self, blocks: int) -> PayloadBytes:
        """``[blocks, bytes_per_block]`` with any content, at most as many as a buffer holds; the caller's until given
        back, or for good."""
        whole = self._idle.pop() if self._idle else np.empty(self._shape, np.uint8)
        return whole[:blocks]

    def give(self, data: PayloadBytes) -> None:
        """Back, once nobody reads or writes it any more. One that a transfer still uses is never given back."""
        whole = data.base if isinstance(data.base, np.ndarray) else data
        if len(self._idle) < self._keep and whole.shape == self._shape:
            self._idle.append(whole)
