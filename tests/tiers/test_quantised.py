"""What 8 and 4 bits give back: within half a step of each group, and never nonsense."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvos.storage.layout import KVLayout, LayerSpec
from kvos.tiers.base import PayloadBytes
from kvos.tiers.codecs import QuantisedCodec

BLOCK_SIZE = 8
LAYOUT = KVLayout((LayerSpec(2, 6, 4), LayerSpec(1, 3, 5)), BLOCK_SIZE, torch.float32)


def blocks_of(values: torch.Tensor) -> PayloadBytes:
    return values.contiguous().view(torch.uint8).numpy()


def random_values(layout: KVLayout, blocks: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(blocks, layout.bytes_per_block // layout.dtype.itemsize).to(layout.dtype)


def round_trip(codec: QuantisedCodec, values: torch.Tensor) -> torch.Tensor:
    data = blocks_of(values)
    out = np.zeros_like(data)
    assert codec.decode(codec.encode(data), out) == [True] * len(data)
    return torch.from_numpy(out).view(values.dtype)


def parts(values: torch.Tensor, layout: KVLayout) -> list[tuple[torch.Tensor, int]]:
    """Keys and values of each layer, ``[blocks, tokens, heads, channels]``, with the axis of a group."""
    found, start = [], 0
    for layer in layout.layers:
        for dim, axis in ((layer.k_dim, 1), (layer.v_dim, 3)):
            size = layout.block_size * layer.kv_heads * dim
            part = values[:, start : start + size].reshape(len(values), layout.block_size, layer.kv_heads, dim)
            found.append((part.double(), axis))
            start += size
    assert start == values.shape[1]
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_element_is_within_half_a_step_of_its_group(bits: int, dtype: torch.dtype) -> None:
    layout = KVLayout(LAYOUT.layers, BLOCK_SIZE, dtype)
    values = random_values(layout, 5) * 3 + 1
    back = round_trip(QuantisedCodec(layout, bits), values)
    for (was, axis), (now, _) in zip(parts(values, layout), parts(back, layout), strict=True):
        spread = was.amax(axis, keepdim=True) - was.amin(axis, keepdim=True)
        half_a_step = spread / (2**bits - 1) / 2
        # float16 ends lie up to 2**-10 of their size outside the group; the working dtype rounds what comes back.
        slack = was.abs().amax(axis, keepdim=True) * (2**-9 + torch.finfo(dtype).eps) + 1e-6
        assert ((was - now).abs() <= half_a_step + slack).all()


def test_an_outlier_of_a_channel_costs_only_the_keys_of_that_channel() -> None:
    values = random_values(LAYOUT, 1)
    keys = values[:, : BLOCK_SIZE * 2 * 6].view(1, BLOCK_SIZE, 2, 6)
    keys[0, 3, 1, 2] = 1000.0
    back = round_trip(QuantisedCodec(LAYOUT, 4), values)
    error = (back - values).abs()[:, : keys.numel()].view(1, BLOCK_SIZE, 2, 6)
    assert error[0, :, 1, 2].max() > 1
    error[0, :, 1, 2] = 0
    assert error.max() < 0.5


@pytest.mark.parametrize(("bits", "share"), [(8, 0.34), (4, 0.22)])
def test_it_is_smaller_by_what_the_bits_say(bits: int, share: float) -> None:
    layout = KVLayout.uniform(num_layers=2, kv_heads=3, head_dim=64, block_size=16)
    size = len(QuantisedCodec(layout, bits).encode(blocks_of(random_values(layout, 1)))[0])
    elements = layout.bytes_per_block // 4
    # Per layer: two float16 for each key channel and for each token and head of the values, and the elements.
    by_hand = 1 + 2 * (4 * 3 * 64 + 4 * 16 * 3) + elements * bits // 8
    assert size == by_hand
    assert size < share * layout.bytes_per_block


def test_equal_elements_come_back_as_they_were() -> None:
    values = torch.full((1, LAYOUT.bytes_per_block // 4), 0.5)
    assert torch.equal(round_trip(QuantisedCodec(LAYOUT, 4), values), values)


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), 1e30])
def test_a_block_that_float16_cannot_describe_is_written_as_it_is(odd: float) -> None:
    values = random_values(LAYOUT, 3)
    values[1, 17] = odd
    back = round_trip(QuantisedCodec(LAYOUT, 8), values)
    assert back[1].view(torch.int32).equal(values[1].view(torch.int32))
    assert not torch.equal(back[0], values[0])


@pytest.mark.parametrize("bits", [8, 4])
def test_every_truncation_and_a_foreign_kind_are_refused(bits: int) -> None:
    codec = QuantisedCodec(LAYOUT, bits)
    data = blocks_of(random_values(LAYOUT, 1))
    whole = codec.encode(data)[0]
    out = np.empty_like(data)
    assert [size for size in range(len(whole)) if codec.decode([whole[:size]], out) != [False]] == []
    assert codec.decode(
        [whole + b"\0", b"\2" + whole[1:], memoryview(whole)], np.empty((3, data.shape[1]), np.uint8)
    ) == [
        False,
        False,
        True,
    ]


def test_nothing_encodes_to_nothing_and_other_widths_are_refused() -> None:
    codec = QuantisedCodec(LAYOUT, 8)
    nothing = np.empty((0, LAYOUT.bytes_per_block), np.uint8)
    assert codec.encode(nothing) == []
    assert codec.decode([], nothing) == []
    with pytest.raises(ValueError, match="4 or 8"):
        QuantisedCodec(LAYOUT, 2)
