"""The tensors of the KV cache, in segments. Knows blocks and slots, not who holds them.

::

    block id   0 1 2 3 | 4 5 6 7 | ...          slot id = block id * block_size + offset
               segment 0 segment 1

A segment is one allocation per layer for K and one for V, so the pool never needs its whole size in one piece,
and growing adds a segment and copies nothing. All segments hold the same number of blocks, which keeps the way
from a block id to its memory one division.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvos.errors import InvalidConfigError
from kvos.storage.layout import KVLayout
from kvos.types import BlockIds, SlotIds

__all__ = ["BlockPool", "Segment"]

COPY_BATCH = 256
"""Blocks that are copied at once: bounds the memory that a copy takes besides the pool."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One growth step of the pool.

    Attributes:
        keys: per layer ``[blocks, block_size, kv_heads, k_dim]``.
        values: per layer ``[blocks, block_size, kv_heads, v_dim]``.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class BlockPool:
    """KV tensors for up to ``max_blocks`` blocks. Engine thread only.

    Args:
        layout: shape of a block.
        max_blocks: the most blocks that may ever exist; memory is taken segment by segment.
        blocks_per_segment: blocks in one segment; the last segment is cut at ``max_blocks``.
        device: where the tensors live.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_blocks: int,
        blocks_per_segment: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_blocks < 1 or blocks_per_segment < 1:
            raise InvalidConfigError(
                f"a pool needs at least one block in one segment, got max_blocks={max_blocks}, "
                f"blocks_per_segment={blocks_per_segment}"
            )
        self.layout = layout
        self.max_blocks = max_blocks
        self.blocks_per_segment = min(blocks_per_segment, max_blocks)
        self.device = torch.device(device)
        self._segments: list[Segment] = []
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory now."""
        return self._num_blocks

    @property
    def segments(self) -> Sequence[Segment]:
        return self._segments

    def grow(self) -> int:
        """Add one segment; returns how many blocks it brought (0 at ``max_blocks``).

        Raises:
            torch.OutOfMemoryError, RuntimeError: the allocation failed; the pool is as before.
        """
        blocks = min(self.blocks_per_segment, self.max_blocks - self._num_blocks)
        if blocks == 0:
            return 0
        shape = (blocks, self.layout.block_size)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for layer in self.layout.layers:
            keys.append(self._zeros(*shape, layer.kv_heads, layer.k_dim))
            values.append(self._zeros(*shape, layer.kv_heads, layer.v_dim))
        self._segments.append(Segment(tuple(keys), tuple(values)))
        self._num_blocks += blocks
        return blocks

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.device)

    # -- moving data ---------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: SlotIds, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]``, one slot per token."""
        for segment, inside, rows in self._by_segment(slots):
            keys = segment.keys[layer].flatten(0, 1)
            values = segment.values[layer].flatten(0, 1)
            if rows is None:
                keys.index_copy_(0, inside, key)
                values.index_copy_(0, inside, value)
            else:
                keys.index_copy_(0, inside, key.index_select(0, rows))
                values.index_copy_(0, inside, value.index_select(0, rows))

    def read(self, layer: int, slots: SlotIds) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]`` at ``slots``."""
        spec = self.layout.layers[layer]
        key = torch.empty((len(slots), spec.kv_heads, spec.k_dim), dtype=self.layout.dtype, device=self.device)
        value = torch.empty((len(slots), spec.kv_heads, spec.v_dim), dtype=self.layout.dtype, device=self.device)
        for segment, inside, rows in self._by_segment(slots):
            keys = segment.keys[layer].flatten(0, 1).index_select(0, inside)
            values = segment.values[layer].flatten(0, 1).index_select(0, inside)
            if rows is None:
                return keys, values
            key.index_copy_(0, rows, keys)
            value.index_copy_(0, rows, values)
        return key, value

    def copy_slots(self, sources: SlotIds, targets: SlotIds) -> None:
        """Copy every layer's KV from ``sources`` to ``targets`` (both ``[tokens]``); the two must not overlap."""
        for layer in range(self.layout.num_layers):
            self.write(layer, targets, *self.read(layer, sources))

    def copy_blocks(self, sources: BlockIds, targets: BlockIds) -> None:
        """Copy whole blocks, every slot of every layer; the two must not overlap. Extra memory: one batch of a layer.

        If it raises, some targets hold copies.
        """
        size = self.layout.block_size
        offsets = np.arange(size, dtype=np.int64)
        for start in range(0, len(sources), COPY_BATCH):
            batch = slice(start, start + COPY_BATCH)
            from_slots = (sources[batch, None] * size + offsets).ravel()
            self.copy_slots(from_slots, (targets[batch, None] * size + offsets).ravel())

    def scrub(self, blocks: BlockIds) -> None:
        """Overwrite whole blocks with zeros, in every layer."""
        for segment, inside, _ in self._by_segment(blocks, per_segment=self.blocks_per_segment):
            for tensor in (*segment.keys, *segment.values):
                tensor.index_fill_(0, inside, 0)

    def _by_segment(
        self, ids: SlotIds, per_segment: int | None = None
    ) -> Iterator[tuple[Segment, torch.Tensor, torch.Tensor | None]]:
        """Split ids by segment: ``(segment, ids inside it, rows of the input or None for all of them)``."""
        size = self.blocks_per_segment * self.layout.block_size if per_segment is None else per_segment
        if len(ids) == 0:
            return
        which = ids // size
        first = int(which[0])
        if len(self._segments) == 1 or bool((which == first).all()):
            yield self._segments[first], self._index(ids - first * size), None
            return
        for segment in np.unique(which):
            rows = np.flatnonzero(which == segment)
            yield self._segments[int(segment)], self._index(ids[rows] - segment * size), self._index(rows)

    def _index(self, ids: SlotIds) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self.device)
