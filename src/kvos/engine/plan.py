"""Everything about a batch that is the same in all layers: computed once per forward, used once per layer.

::

    batch  ->  writes      where the new keys and values go
               reads(w)    for layers with window w, None for full attention:
                 decodes   groups of sequences with one new row, of similar length, attended in one call
                 chunks    sequences with several new rows, one call each (more, when the chunk is long)

In batch-invariant mode rows are attended one by one instead, each in a call of its own, so that what is beside a row
cannot change its bits.

A layer with a sliding window sees the last ``window`` tokens, itself included: what lies before is not even gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvos.engine.base import PackedBatch
from kvos.engine.scores import additive
from kvos.errors import EngineContractError
from kvos.storage import BlockPool
from kvos.types import SlotIds

__all__ = [
    "BatchPlan",
    "ChunkPlan",
    "DecodePlan",
    "ReadPlan",
    "RowPlan",
    "SlotIndex",
    "Tile",
    "check_batch",
    "context_slots",
]

TILE_ROWS = 256
"""Rows of a chunk that are attended at once where a mask is needed: bounds the mask to ``TILE_ROWS * context``."""

DECODE_LENGTH_RATIO = 2
"""Decodes share a call, padded, while the longest is at most this many times the shortest."""


@dataclass(frozen=True, slots=True)
class _Part:
    segment: int
    inside: slice | torch.Tensor
    rows: torch.Tensor | None


class SlotIndex:
    """Slots of a pool, resolved to segments and offsets once, to be read or written in every layer.

    Args:
        pool: whose slots they are.
        slots: ``[tokens]`` slot ids. Neighbours in one segment become a slice: reading them copies nothing.
    """

    def __init__(self, pool: BlockPool, slots: SlotIds) -> None:
        self._pool = pool
        self._count = len(slots)
        self._parts = tuple(self._split(slots))

    def _split(self, slots: SlotIds) -> Iterator[_Part]:
        if len(slots) == 0:
            return
        size = self._pool.blocks_per_segment * self._pool.layout.block_size
        which = slots // size
        first = int(which[0])
        if (which == first).all():
            yield _Part(first, self._inside(slots - first * size), None)
            return
        for segment in np.unique(which):
            rows = np.flatnonzero(which == segment)
            yield _Part(int(segment), self._inside(slots[rows] - segment * size), self._tensor(rows))

    def _inside(self, offsets: SlotIds) -> slice | torch.Tensor:
        start, count = int(offsets[0]), len(offsets)
        if int(offsets[-1]) - start == count - 1 and (np.diff(offsets) == 1).all():
            return slice(start, start + count)
        return self._tensor(offsets)

    def _tensor(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._pool.device)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]``; views if possible."""
        spec = self._pool.layout.layers[layer]
        if len(self._parts) == 1:
            return self._take(self._parts[0], layer)
        like = self._pool.segments[0].keys[0]
        keys = like.new_empty((self._count, spec.kv_heads, spec.k_dim))
        values = like.new_empty((self._count, spec.kv_heads, spec.v_dim))
        for part in self._parts:
            key, value = self._take(part, layer)
            keys[part.rows] = key
            values[part.rows] = value
        return keys, values

    def _take(self, part: _Part, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        segment = self._pool.segments[part.segment]
        keys, values = segment.keys[layer].flatten(0, 1), segment.values[layer].flatten(0, 1)
        if isinstance(part.inside, slice):
            return keys[part.inside], values[part.inside]
        return keys.index_select(0, part.inside), values.index_select(0, part.inside)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys ``[tokens, kv_heads, k_dim]`` and values ``[tokens, kv_heads, v_dim]`` into the pool."""
        for part in self._parts:
            segment = self._pool.segments[part.segment]
            for target, source in ((segment.keys[layer], keys), (segment.values[layer], values)):
                rows = source if part.rows is None else source.index_select(0, part.rows)
                if isinstance(part.inside, slice):
                    target.flatten(0, 1)[part.inside] = rows
                else:
                    target.flatten(0, 1).index_copy_(0, part.inside, rows)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sequences with one new row each.

    Attributes:
        rows: ``[sequences]`` rows of the batch.
        index: ``sequences * width`` slots, each sequence padded to the longest with a slot of its own.
        width: tokens of the longest.
        mask: ``[sequences, 1, 1, width]``, zero or minus infinity; None when all are equally long.
    """

    rows: torch.Tensor
    index: SlotIndex
    width: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows ``start`` to ``stop`` of a chunk see keys ``first_key`` to ``last_key`` of its index.

    ``mask`` is ``[rows, keys]``; None stands for causal: as many rows as keys.
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One sequence with several new rows.

    Attributes:
        start, stop: its rows of the batch.
        index: slots of the context that its rows see; None when these rows are the whole context and all of them are
            written, so that the keys and values at hand are the ones in the blocks.
        tiles: how the rows are cut.
    """

    start: int
    stop: int
    index: SlotIndex | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence, row by row.

    Attributes:
        start: its first row of the batch.
        index: slots of the context that its rows see.
        seen: for each row the keys ``[first, last)`` of the index.
    """

    start: int
    index: SlotIndex
    seen: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What layers of one window read.

    Attributes:
        decodes: groups of sequences with one row; empty when a compiled kernel does them.
        chunks: sequences with several rows.
        rows: all sequences, in batch-invariant mode; the other two are empty then.
    """

    decodes: tuple[DecodePlan, ...]
    chunks: tuple[ChunkPlan, ...]
    rows: tuple[RowPlan, ...] = ()


class BatchPlan:
    """A checked batch over a pool, ready for the layers.

    Args:
        compiled: writes and decodes are left to a compiled kernel.
        row_by_row: batch-invariant mode.

    Attributes:
        write_rows: rows to store, None for all of them.
        writes: where they go; None when a compiled kernel stores them.
    """

    def __init__(
        self, batch: PackedBatch, pool: BlockPool, *, compiled: bool = False, row_by_row: bool = False
    ) -> None:
        self._batch = batch
        self._pool = pool
        self._compiled = compiled
        self._row_by_row = row_by_row
        self._longest = int(batch.context_lengths.max())
        self._reads: dict[int | None, ReadPlan] = {}
        self.write_rows: torch.Tensor | None = None
        self.writes: SlotIndex | None = None
        if not compiled:
            if len(batch.write_rows) < batch.num_rows:
                self.write_rows = torch.from_numpy(batch.write_rows).to(pool.device)
            self.writes = SlotIndex(pool, batch.write_slots)

    def reads(self, window: int | None) -> ReadPlan:
        """For layers whose rows see the last ``window`` tokens; None for all of them. Made once per window."""
        if window is not None and window >= self._longest:
            window = None
        plan = self._reads.get(window)
        if plan is None:
            plan = self._reads[window] = self._plan(window)
        return plan

    def _plan(self, window: int | None) -> ReadPlan:
        batch, pool = self._batch, self._pool
        if self._row_by_row:
            return ReadPlan((), (), tuple(_rows(batch, pool, n, window) for n in range(batch.num_sequences)))
        rows = np.diff(batch.query_starts)
        chunks = tuple(_chunk(batch, pool, int(sequence), window) for sequence in np.flatnonzero(rows > 1))
        decodes = () if self._compiled else tuple(_decode_groups(batch, pool, np.flatnonzero(rows == 1), window))
        return ReadPlan(decodes, chunks)


def check_batch(batch: PackedBatch, pool: BlockPool) -> None:
    """Reject a batch that would read or write outside the pool.

    Raises:
        EngineContractError: names what contradicts what.
    """
    starts, lengths, size = batch.query_starts, batch.context_lengths, pool.layout.block_size
    if batch.num_rows == 0 or len(starts) != len(lengths) + 1 or len(batch.block_tables) != len(lengths):
        raise EngineContractError("a batch needs rows, and one start, one length and one block table per sequence")
    rows = np.diff(starts)
    width = batch.block_tables.shape[1] * size
    used = np.arange(batch.block_tables.shape[1]) * size < lengths[:, None]
    tables = batch.block_tables[used]
    checks = (
        (starts[0] == 0 and starts[-1] == batch.num_rows, "query_starts must run from 0 to the number of rows"),
        (bool((rows > 0).all()), "every sequence of a batch needs a row"),
        (bool((lengths >= rows).all()), "a sequence has more rows than tokens to see"),
        (bool((lengths <= width).all()), "a block table is shorter than its context"),
        (bool(((tables >= 0) & (tables < pool.num_blocks)).all()), "a block table names a block that the pool lacks"),
        (len(batch.write_rows) == len(batch.write_slots), "write_rows and write_slots differ in length"),
        (_within(batch.write_rows, batch.num_rows), "write_rows lie outside the batch"),
        (_within(batch.write_slots, pool.num_blocks * size), "write_slots lie outside the pool"),
        (_within(batch.logit_rows, batch.num_rows), "logit_rows lie outside the batch"),
        (len(batch.positions) == batch.num_rows, "positions and token_ids differ in length"),
        (
            batch.declared_lengths is None
            or (len(batch.declared_lengths) == len(lengths) and bool((batch.declared_lengths >= lengths).all())),
            "a sequence is longer than it declared",
        ),
    )
    for holds, message in checks:
        if not holds:
            raise EngineContractError(message)


def _within(values: npt.NDArray[np.int64], limit: int) -> bool:
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < limit)


def context_slots(table: npt.NDArray[np.int64], length: int, block_size: int) -> SlotIds:
    """The slots ``[length]`` of a sequence's first ``length`` tokens, from its block table."""
    blocks = table[: -(-length // block_size), None]
    return np.asarray((blocks * block_size + np.arange(block_size)).reshape(-1)[:length], dtype=np.int64)


def _decode_groups(
    batch: PackedBatch, pool: BlockPool, singles: npt.NDArray[np.int64], window: int | None
) -> Iterator[DecodePlan]:
    seen = batch.context_lengths if window is None else np.minimum(batch.context_lengths, window)
    by_length = singles[np.argsort(seen[singles], kind="stable")]
    group: list[int] = []
    for sequence in by_length:
        if group and seen[sequence] > DECODE_LENGTH_RATIO * seen[group[0]]:
            yield _decode_group(batch, pool, np.array(group), seen)
            group = []
        group.append(int(sequence))
    if group:
        yield _decode_group(batch, pool, np.array(group), seen)


def _decode_group(
    batch: PackedBatch, pool: BlockPool, group: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]
) -> DecodePlan:
    lengths = seen[group]
    width = int(lengths.max())
    slots = np.empty((len(group), width), dtype=np.int64)
    for row, (sequence, length) in enumerate(zip(group, lengths, strict=True)):
        context = int(batch.context_lengths[sequence])
        own = context_slots(batch.block_tables[sequence], context, pool.layout.block_size)[context - length :]
        slots[row, : len(own)] = own
        slots[row, len(own) :] = own[0]
    mask = None
    if (lengths != width).any():
        hidden = torch.from_numpy(np.arange(width) >= lengths[:, None]).to(pool.device)
        mask = additive(hidden, pool.layout.dtype)[:, None, None, :]
    rows = torch.from_numpy(batch.query_starts[group]).to(pool.device)
    return DecodePlan(rows, SlotIndex(pool, slots.reshape(-1)), width, mask)


def _rows(batch: PackedBatch, pool: BlockPool, sequence: int, window: int | None) -> RowPlan:
    start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
    length = int(batch.context_lengths[sequence])
    ends = range(length - (stop - start) + 1, length + 1)
    firsts = [0 if window is None else max(0, end - window) for end in ends]
    slots = context_slots(batch.block_tables[sequence], length, pool.layout.block_size)
    seen = tuple((first - firsts[0], end - firsts[0]) for first, end in zip(firsts, ends, strict=True))
    return RowPlan(start, SlotIndex(pool, slots[firsts[0] :]), seen)


def _chunk(batch: PackedBatch, pool: BlockPool, sequence: int, window: int | None) -> ChunkPlan:
    start, stop = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
    length = int(batch.context_lengths[sequence])
    past = length - (stop - start)
    first_seen = 0 if window is None else max(0, past + 1 - window)
    written = np.searchsorted(batch.write_rows, (start, stop))
    index = None
    if past > 0 or written[1] - written[0] < length:
        slots = context_slots(batch.block_tables[sequence], length, pool.layout.block_size)
        index = SlotIndex(pool, slots[first_seen:])
    if past == 0 and (window is None or window >= length):
        return ChunkPlan(start, stop, index, (Tile(0, length, 0, length, None),))
    tiles = []
    for first in range(0, stop - start, TILE_ROWS):
        last = min(first + TILE_ROWS, stop - start)
        lowest = 0 if window is None else max(0, past + first + 1 - window)
        place = torch.arange(past + first, past + last, device=pool.device)[:, None]
        keys = torch.arange(lowest, past + last, device=pool.device)
        hidden = keys > place
        if window is not None:
            hidden |= keys <= place - window
        mask = additive(hidden, pool.layout.dtype)
        tiles.append(Tile(first, last, lowest - first_seen, past + last - first_seen, mask))
    return ChunkPlan(start, stop, index, tuple(tiles))
