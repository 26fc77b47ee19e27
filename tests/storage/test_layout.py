"""How many bytes the KV cache takes: numbers worked out by hand from published model shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvos.errors import InvalidConfigError
from kvos.storage import BLOCK_SIZES, KVLayout, LayerSpec


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_a_token_of_smollm2_135m_takes_two_times_30_layers_times_3_heads_times_64_elements(
    dtype: torch.dtype, itemsize: int
) -> None:
    layout = KVLayout.uniform(num_layers=30, kv_heads=3, head_dim=64, dtype=dtype)
    assert layout.bytes_per_token == 2 * 30 * 3 * 64 * itemsize


def test_a_token_of_llama_3_8b_takes_128_kib_in_bf16() -> None:
    """32 layers, 8 KV heads (of 32 query heads), head size 128: the figure that its users quote."""
    layout = KVLayout.uniform(num_layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert layout.bytes_per_token == 131_072


def test_keys_and_values_of_different_sizes_are_added_not_doubled() -> None:
    layout = KVLayout((LayerSpec(kv_heads=2, k_dim=192, v_dim=128),), 16, torch.float32)
    assert layout.bytes_per_token == 2 * (192 + 128) * 4


def test_unequal_layers_are_summed_one_by_one() -> None:
    layout = KVLayout((LayerSpec(1, 8, 8), LayerSpec(4, 16, 32)), 16, torch.float16)
    assert layout.bytes_per_token == (1 * 16 + 4 * 48) * 2


def test_a_block_takes_the_bytes_of_its_tokens() -> None:
    layout = KVLayout.uniform(num_layers=30, kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)
    assert layout.bytes_per_block == 16 * 46_080


def test_the_default_block_holds_16_tokens() -> None:
    assert KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=8).block_size == 16


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_counts_a_partly_filled_block(tokens: int, blocks: int) -> None:
    assert KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=8, block_size=16).blocks_for(tokens) == blocks


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_every_power_of_two_from_8_to_128_is_a_block_size(block_size: int) -> None:
    assert block_size in BLOCK_SIZES
    assert KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=8, block_size=block_size).block_size == block_size


@pytest.mark.parametrize("block_size", [-16, 0, 1, 4, 12, 256])
def test_another_block_size_is_refused_and_named(block_size: int) -> None:
    with pytest.raises(InvalidConfigError, match=f"block_size is {block_size};.*8, 16, 32, 64, 128"):
        KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=8, block_size=block_size)


def test_a_layout_without_layers_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="at least one layer"):
        KVLayout((), 16, torch.float32)


@pytest.mark.parametrize("spec", [LayerSpec(0, 8, 8), LayerSpec(1, 0, 8), LayerSpec(1, 8, -1)])
def test_a_layer_with_a_size_below_one_is_refused_and_named(spec: LayerSpec) -> None:
    with pytest.raises(InvalidConfigError, match="layer 1 of the KV layout"):
        KVLayout((LayerSpec(1, 8, 8), spec), 16, torch.float32)


def test_a_layout_is_frozen() -> None:
    layout = KVLayout.uniform(num_layers=1, kv_heads=1, head_dim=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.block_size = 8  # type: ignore[misc]
