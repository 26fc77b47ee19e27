"""Blocks as runs of bytes, as lower tiers keep them.

::

    one block   | K of layer 0 | V of layer 0 | K of layer 1 | ...      layout.bytes_per_block bytes in all

In the host's memory each run of neighbouring blocks is one copy per tensor, straight to where it belongs; another
device gets one gather or scatter per tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvos.storage.allocator import runs_of
from kvos.storage.pool import BlockPool
from kvos.types import BlockIds

__all__ = ["export_blocks", "import_blocks"]

Bytes = npt.NDArray[np.uint8]


def export_blocks(pool: BlockPool, blocks: BlockIds, out: Bytes | None = None) -> Bytes:
    """A copy of ``blocks`` on the CPU: ``[blocks, bytes_per_block]``, in ``out`` if it is given. Engine thread."""
    data = np.empty((len(blocks), pool.layout.bytes_per_block), np.uint8) if out is None else out
    if pool.device.type == "cpu":
        for here, there in _runs(pool, blocks, data):
            there[:] = here
        return data
    rows = _elements(pool, data)
    for tensors, inside, places in _by_segment(pool, blocks):
        for tensor, columns in _columns(tensors):
            rows[places, columns] = tensor.index_select(0, inside).flatten(1).cpu()
    return data


def import_blocks(pool: BlockPool, blocks: BlockIds, data: Bytes) -> None:
    """Write ``data`` ``[blocks, bytes_per_block]`` over ``blocks``, which nobody else may hold. Engine thread."""
    if pool.device.type == "cpu":
        for here, there in _runs(pool, blocks, data):
            here[:] = there
        return
    rows = _elements(pool, data)
    for tensors, inside, places in _by_segment(pool, blocks):
        for tensor, columns in _columns(tensors):
            tensor.index_copy_(0, inside, rows[places, columns].reshape(-1, *tensor.shape[1:]).to(pool.device))


def _runs(pool: BlockPool, blocks: BlockIds, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """``(bytes in the pool, bytes in data)`` for each tensor and each run of neighbouring blocks: views."""
    firsts, lengths = runs_of(blocks, pool.blocks_per_segment)
    runs: dict[int, list[tuple[slice, slice]]] = {}
    for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
        number, inside = divmod(int(blocks[first]), pool.blocks_per_segment)
        runs.setdefault(number, []).append((slice(inside, inside + length), slice(first, first + length)))
    for number, places in runs.items():
        start = 0
        for tensor in _tensors(pool, number):
            content: Bytes = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
            columns = data[:, start : start + content.shape[1]]
            start += content.shape[1]
            for here, there in places:
                yield content[here], columns[there]


def _tensors(pool: BlockPool, number: int) -> list[torch.Tensor]:
    """Keys and values of each layer of a segment, in the order that they have in a block."""
    segment = pool.segments[number]
    return [tensor for pair in zip(segment.keys, segment.values, strict=True) for tensor in pair]


def _elements(pool: BlockPool, data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data).view(pool.layout.dtype)


def _columns(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Each tensor with the elements of a block that are its own."""
    start = 0
    for tensor in tensors:
        end = start + tensor[0].numel()
        yield tensor, slice(start, end)
        start = end


def _by_segment(
    pool: BlockPool, blocks: BlockIds
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | slice]]:
    """``(K and V of each layer, blocks inside the segment, rows of the data)``."""
    which = blocks // pool.blocks_per_segment
    for number in np.unique(which):
        places = np.flatnonzero(which == number)
        inside = torch.from_numpy(blocks[places] - number * pool.blocks_per_segment).to(pool.device)
        everything = len(places) == len(blocks)
        yield _tensors(pool, int(number)), inside, slice(None) if everything else torch.from_numpy(places)
