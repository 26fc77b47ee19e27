"""Blocks as bytes: what leaves the pool comes back the same, wherever the blocks lie."""

import numpy as np
import pytest
import torch

from kvos.storage import BlockPool, KVLayout, LayerSpec, export_blocks, import_blocks


def filled_pool(dtype: torch.dtype = torch.float32) -> BlockPool:
    layout = KVLayout((LayerSpec(2, 4, 6), LayerSpec(1, 8, 3)), 8, dtype)
    pool = BlockPool(layout, max_blocks=10, blocks_per_segment=4)
    generator = torch.Generator().manual_seed(0)
    while pool.grow():
        for tensor in (*pool.segments[-1].keys, *pool.segments[-1].values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [[2], [3, 0, 1], [9, 1, 4, 8, 3]])
def test_blocks_come_back_into_other_blocks(dtype, blocks):
    pool, other = filled_pool(dtype), filled_pool(dtype)
    data = export_blocks(pool, np.array(blocks))
    assert data.shape == (len(blocks), pool.layout.bytes_per_block)
    targets = np.array([7, 0, 9, 5, 2][: len(blocks)])
    import_blocks(other, targets, data)
    slots = (np.array(blocks)[:, None] * 8 + np.arange(8)).ravel()
    target_slots = (targets[:, None] * 8 + np.arange(8)).ravel()
    for layer in range(2):
        for mine, theirs in zip(pool.read(layer, slots), other.read(layer, target_slots), strict=True):
            assert torch.equal(mine, theirs)


def test_other_blocks_are_left_alone():
    pool, before = filled_pool(), filled_pool()
    import_blocks(pool, np.array([1, 5]), export_blocks(pool, np.array([0, 2])))
    untouched = (np.array([0, 2, 3, 4, 6, 7, 8, 9])[:, None] * 8 + np.arange(8)).ravel()
    for layer in range(2):
        for now, then in zip(pool.read(layer, untouched), before.read(layer, untouched), strict=True):
            assert torch.equal(now, then)


def test_a_block_is_its_layers_keys_and_values_in_order():
    pool = filled_pool()
    segment = pool.segments[1]
    expected = torch.cat([t[1].flatten() for pair in zip(segment.keys, segment.values, strict=True) for t in pair])
    assert np.array_equal(export_blocks(pool, np.array([5]))[0], expected.numpy().view(np.uint8))
