"""The pool's tensors: segments, growth, and where a slot's bytes are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvos.errors import InvalidConfigError
from kvos.storage import BlockPool, KVLayout, LayerSpec

LAYOUT = KVLayout((LayerSpec(2, 3, 5), LayerSpec(1, 4, 2)), 8, torch.float32)
SLOTS_PER_SEGMENT = 4 * 8


def grown_pool(segments: int = 3) -> BlockPool:
    """Segments of 4 blocks of 8 slots, the last one cut: 4 + 4 + 2 blocks."""
    pool = BlockPool(LAYOUT, max_blocks=10, blocks_per_segment=4)
    for _ in range(segments):
        pool.grow()
    return pool


def kv(tokens: int, layer: int, start: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of which no two elements are equal."""
    spec = LAYOUT.layers[layer]
    key = start + torch.arange(tokens * spec.kv_heads * spec.k_dim, dtype=torch.float32)
    value = -start - torch.arange(tokens * spec.kv_heads * spec.v_dim, dtype=torch.float32)
    return key.view(tokens, spec.kv_heads, spec.k_dim), value.view(tokens, spec.kv_heads, spec.v_dim)


def pointers(pool: BlockPool) -> list[int]:
    return [tensor.data_ptr() for segment in pool.segments for tensor in (*segment.keys, *segment.values)]


# -- growing ---------------------------------------------------------------------------------------------------------


def test_a_new_pool_has_no_memory_yet() -> None:
    pool = BlockPool(LAYOUT, max_blocks=10, blocks_per_segment=4)
    assert (pool.num_blocks, len(pool.segments)) == (0, 0)


def test_each_growth_step_adds_one_segment_and_the_last_is_cut_at_the_limit() -> None:
    pool = BlockPool(LAYOUT, max_blocks=10, blocks_per_segment=4)
    assert [pool.grow() for _ in range(4)] == [4, 4, 2, 0]
    assert pool.num_blocks == 10
    assert [len(segment.keys[0]) for segment in pool.segments] == [4, 4, 2]


def test_growing_copies_nothing() -> None:
    pool = grown_pool(segments=1)
    pool.write(0, np.array([5]), *kv(1, layer=0))
    before = pointers(pool)
    pool.grow()
    pool.grow()
    assert pointers(pool)[: len(before)] == before


def test_segments_do_not_share_memory() -> None:
    pool = grown_pool()
    assert len(set(pointers(pool))) == 3 * LAYOUT.num_layers * 2


def test_a_segment_holds_keys_and_values_per_layer_in_the_documented_shape() -> None:
    segment = grown_pool().segments[0]
    assert [tuple(key.shape) for key in segment.keys] == [(4, 8, 2, 3), (4, 8, 1, 4)]
    assert [tuple(value.shape) for value in segment.values] == [(4, 8, 2, 5), (4, 8, 1, 2)]


def test_all_segments_together_take_the_bytes_of_the_layout() -> None:
    tensors = [t for segment in grown_pool().segments for t in (*segment.keys, *segment.values)]
    assert sum(t.numel() * t.element_size() for t in tensors) == 10 * 8 * (2 * 8 + 1 * 6) * 4


def test_a_segment_larger_than_the_pool_is_cut_to_it() -> None:
    pool = BlockPool(LAYOUT, max_blocks=3, blocks_per_segment=100)
    assert (pool.grow(), pool.grow()) == (3, 0)


def test_a_failed_growth_leaves_the_pool_as_it_was() -> None:
    second_layer_fails = KVLayout((LayerSpec(1, 8, 8), LayerSpec(1, 1 << 55, 8)), 8, torch.float32)
    pool = BlockPool(second_layer_fails, max_blocks=4, blocks_per_segment=1)
    with pytest.raises(RuntimeError):
        pool.grow()
    assert (pool.num_blocks, len(pool.segments)) == (0, 0)


@pytest.mark.parametrize(("max_blocks", "per_segment"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_without_blocks_is_refused(max_blocks: int, per_segment: int) -> None:
    with pytest.raises(InvalidConfigError, match=f"max_blocks={max_blocks}, blocks_per_segment={per_segment}"):
        BlockPool(LAYOUT, max_blocks=max_blocks, blocks_per_segment=per_segment)


# -- slots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("offset", [0, 7])
def test_slot_is_block_times_block_size_plus_offset_in_whatever_segment(block: int, offset: int) -> None:
    pool = grown_pool()
    key, value = kv(1, layer=1)
    pool.write(1, np.array([block * 8 + offset]), key, value)
    segment = pool.segments[block // 4]
    assert torch.equal(segment.keys[1][block % 4, offset], key[0])
    assert torch.equal(segment.values[1][block % 4, offset], value[0])


def test_a_write_changes_its_own_slots_and_layer_only() -> None:
    pool = grown_pool()
    slots = np.array([3, SLOTS_PER_SEGMENT, 2 * SLOTS_PER_SEGMENT + 9])
    pool.write(0, slots, *kv(3, layer=0))
    changed = torch.cat([segment.keys[0].flatten(0, 1).ne(0).any(-1).any(-1) for segment in pool.segments])
    assert torch.nonzero(changed).flatten().tolist() == slots.tolist()
    assert all(not segment.keys[1].any() for segment in pool.segments)


def test_what_was_written_across_segments_is_read_back_in_order() -> None:
    pool = grown_pool()
    slots = np.array([2 * SLOTS_PER_SEGMENT + 1, 0, SLOTS_PER_SEGMENT + 4, 31, 2 * SLOTS_PER_SEGMENT, 5])
    key, value = kv(6, layer=0)
    pool.write(0, slots, key, value)
    read_key, read_value = pool.read(0, slots)
    assert torch.equal(read_key, key)
    assert torch.equal(read_value, value)


def test_slots_of_one_later_segment_are_read_back() -> None:
    pool = grown_pool()
    slots = np.array([SLOTS_PER_SEGMENT + 9, SLOTS_PER_SEGMENT + 2])
    key, value = kv(2, layer=1)
    pool.write(1, slots, key, value)
    assert torch.equal(pool.read(1, slots)[0], key)
    assert torch.equal(pool.read(1, slots[::-1].copy())[1], value.flip(0))


def test_a_read_is_a_copy() -> None:
    pool = grown_pool()
    pool.write(0, np.array([1]), *kv(1, layer=0))
    pool.read(0, np.array([1]))[0].zero_()
    assert torch.equal(pool.read(0, np.array([1]))[0], kv(1, layer=0)[0])


def test_reading_no_slots_gives_empty_tensors_of_the_right_shape() -> None:
    key, value = grown_pool().read(0, np.array([], np.int64))
    assert (tuple(key.shape), tuple(value.shape)) == ((0, 2, 3), (0, 2, 5))


def test_a_slot_beyond_the_memory_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        grown_pool(segments=1).read(0, np.array([SLOTS_PER_SEGMENT]))


def test_copy_slots_copies_every_layer_across_segments_and_leaves_the_source() -> None:
    pool = grown_pool()
    sources = np.array([0, 1, 2, 30])
    targets = np.array([2 * SLOTS_PER_SEGMENT + 3, SLOTS_PER_SEGMENT, 8, SLOTS_PER_SEGMENT + 1])
    written = [kv(4, layer, start=100.0 * (layer + 1)) for layer in range(2)]
    for layer, (key, value) in enumerate(written):
        pool.write(layer, sources, key, value)
    pool.copy_slots(sources, targets)
    for layer, (key, value) in enumerate(written):
        for slots in (sources, targets):
            assert torch.equal(pool.read(layer, slots)[0], key)
            assert torch.equal(pool.read(layer, slots)[1], value)


def test_scrub_zeroes_whole_blocks_in_every_layer_and_nothing_else() -> None:
    pool = grown_pool()
    everything = np.arange(10 * 8)
    for layer in range(2):
        pool.write(layer, everything, *kv(80, layer))
    pool.scrub(np.array([9, 3, 4]))
    scrubbed = np.isin(everything // 8, [3, 4, 9])
    for layer in range(2):
        key, value = kv(80, layer)
        key[scrubbed], value[scrubbed] = 0, 0
        assert torch.equal(pool.read(layer, everything)[0], key)
        assert torch.equal(pool.read(layer, everything)[1], value)
