"""Blocks as runs of bytes, as lower tiers keep them: one batched gather or scatter per layer and segment.

::

    one block   | K of layer 0 | V of layer 0 | K of layer 1 | ...      layout.bytes_per_block bytes in all
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from kvos.storage.pool import BlockPool
from kvos.types import BlockIds

__all__ = ["export_blocks", "import_blocks"]


def export_blocks(pool: BlockPool, blocks: BlockIds) -> npt.NDArray[np.uint8]:
    """A copy of ``blocks`` on the CPU: ``[blocks, bytes_per_block]``. Engine thread."""
    data = np.empty((len(blocks), pool.layout.bytes_per_block), np.uint8)
    rows = _elements(pool, data)
    for tensors, inside, places in _by_segment(pool, blocks):
        for tensor, columns in _columns(tensors):
            rows[places, columns] = tensor.index_select(0, inside).flatten(1).cpu()
    return data


def import_blocks(pool: BlockPool, blocks: BlockIds, data: npt.NDArray[np.uint8]) -> None:
    """Write ``data`` ``[blocks, bytes_per_block]`` over ``blocks``, which nobody else may hold. Engine thread."""
    rows = _elements(pool, data)
    for tensors, inside, places in _by_segment(pool, blocks):
        for tensor, columns in _columns(tensors):
            tensor.index_copy_(0, inside, rows[places, columns].reshape(-1, *tensor.shape[1:]).to(pool.device))


def _elements(pool: BlockPool, data: npt.NDArray[np.uint8]) -> torch.Tensor:
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
        segment = pool.segments[int(number)]
        places = np.flatnonzero(which == number)
        inside = torch.from_numpy(blocks[places] - number * pool.blocks_per_segment).to(pool.device)
        tensors = [tensor for pair in zip(segment.keys, segment.values, strict=True) for tensor in pair]
        yield tensors, inside, slice(None) if len(places) == len(blocks) else torch.from_numpy(places)
