"""Runtimes to play on: the block size and the limits change from one group of rounds to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvos.config import KvosConfig
from kvos.engine.support import layout_of
from kvos.models.dtypes import short_name
from kvos.runtime import Runtime, open_runtime

__all__ = ["ROUNDS_PER_RUNTIME", "Workplace", "group_of"]

ROUNDS_PER_RUNTIME = 10
"""Rounds that one runtime lives for, so that its blocks are recycled, shared and reclaimed."""

BLOCK_SIZES = (8, 16, 32)
POOL_TOKENS = 256
"""Small on purpose: a few sessions fill it, so cached blocks are reclaimed all the time, and now and then none is left."""
PREFILL_CHUNKS = (256, 13)
"""In whole, or in chunks whose edges lie inside blocks."""


def group_of(number: int) -> int:
    """The group of rounds that share a runtime with round ``number``."""
    return number // ROUNDS_PER_RUNTIME


@dataclass(frozen=True, slots=True)
class Workplace:
    """Opens runtimes over one model object, one at a time, and a visitor beside it.

    Attributes:
        model: a Transformers model that nobody else uses meanwhile.
        config: what is not about block size and limits is taken from here.
    """

    model: Any
    tokenizer: Any
    config: KvosConfig

    def open(self, group: int) -> Runtime:
        """The runtime for a group of rounds; the caller closes it."""
        chunk = PREFILL_CHUNKS[group % len(PREFILL_CHUNKS)]
        settings = replace(self.config, prefill_chunk_tokens=chunk, max_batch_tokens=max(64, chunk), max_running=32)
        return self._open(BLOCK_SIZES[group % len(BLOCK_SIZES)], settings)

    def open_visitor(self, group: int) -> Runtime:
        """A second runtime with another block size and the generic kernels; opened after, and closed before, the first."""
        return self._open(BLOCK_SIZES[(group + 2) % len(BLOCK_SIZES)], replace(self.config, kernels="generic"))

    def _open(self, block_size: int, config: KvosConfig) -> Runtime:
        block = layout_of(self.model.config, block_size, self.model.dtype).bytes_per_block
        blocks = POOL_TOKENS // block_size
        chosen = replace(
            config,
            dtype=short_name(self.model.dtype),
            block_size=block_size,
            cache_bytes=max(4096, blocks * block),
            segment_bytes=max(4096, -(-blocks // 3) * block),
        )
        return open_runtime(self.model, tokenizer=self.tokenizer, config=chosen)
