"""What codecs give back, of what they wrote and of what they did not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvos.storage.layout import KVLayout
from kvos.tiers.base import PayloadBytes
from kvos.tiers.codec import Codec
from kvos.tiers.codecs import LosslessCodec, RawCodec

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def layout_of(dtype: torch.dtype) -> KVLayout:
    return KVLayout.uniform(num_layers=2, kv_heads=1, head_dim=4, block_size=8, dtype=dtype)


LAYOUT = layout_of(torch.float32)
CODECS: dict[str, Codec] = {"raw": RawCodec(), "lossless": LosslessCodec(LAYOUT)}
BLOCK = st.binary(min_size=LAYOUT.bytes_per_block, max_size=LAYOUT.bytes_per_block)


def normal_blocks(layout: KVLayout, blocks: int) -> PayloadBytes:
    torch.manual_seed(0)
    values = torch.randn(blocks, layout.bytes_per_block // layout.dtype.itemsize).to(layout.dtype)
    return values.view(torch.uint8).numpy()


def same_back(codec: Codec, data: PayloadBytes) -> None:
    out = np.empty_like(data)
    assert codec.decode(codec.encode(data), out) == [True] * len(data)
    np.testing.assert_array_equal(out, data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [1, 9])
def test_lossless_gives_back_every_bit(dtype: torch.dtype, level: int) -> None:
    layout = layout_of(dtype)
    same_back(LosslessCodec(layout, level), normal_blocks(layout, 5))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@given(blocks=st.lists(BLOCK, max_size=3))
def test_random_bytes_come_back(codec: Codec, blocks: list[bytes]) -> None:
    data = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), LAYOUT.bytes_per_block)
    same_back(codec, data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_byte_planes_make_keys_and_values_smaller(dtype: torch.dtype) -> None:
    layout = KVLayout.uniform(num_layers=4, kv_heads=2, head_dim=32, dtype=dtype)
    encoded = LosslessCodec(layout).encode(normal_blocks(layout, 2))
    assert max(map(len, encoded)) < 0.97 * layout.bytes_per_block


def test_a_view_of_an_encoding_decodes() -> None:
    data = normal_blocks(LAYOUT, 1)
    for codec in CODECS.values():
        out = np.empty_like(data)
        assert codec.decode([memoryview(codec.encode(data)[0])], out) == [True]
        np.testing.assert_array_equal(out, data)


def test_another_element_size_has_another_name() -> None:
    assert len({LosslessCodec(layout_of(dtype)).name for dtype in DTYPES}) == len(DTYPES)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_every_truncation_is_refused(codec: Codec) -> None:
    data = normal_blocks(LAYOUT, 1)
    whole = bytes(codec.encode(data)[0])
    out = np.empty_like(data)
    assert [size for size in range(len(whole)) if codec.decode([whole[:size]], out) != [False]] == []
    assert codec.decode([whole + b"\0"], out) == [False]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@given(garbage=st.one_of(st.binary(max_size=64), st.binary(max_size=64).map(b"\x28\xb5\x2f\xfd".__add__)))
def test_garbage_is_refused(codec: Codec, garbage: bytes) -> None:
    assert codec.decode([garbage], np.empty((1, LAYOUT.bytes_per_block), np.uint8))[0] in (False, True)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_raises_nothing(place: int, bit: int) -> None:
    """zstd may not see it; that is what the checksum of a tier is for."""
    codec = CODECS["lossless"]
    data = normal_blocks(LAYOUT, 1)
    damaged = bytearray(codec.encode(data)[0])
    damaged[place % len(damaged)] ^= 1 << bit
    assert codec.decode([bytes(damaged)], np.empty_like(data))[0] in (False, True)


def test_a_block_of_another_layout_is_refused_and_its_neighbours_are_not() -> None:
    other = layout_of(torch.float64)
    data = normal_blocks(LAYOUT, 2)
    for codec, stranger in ((CODECS["lossless"], LosslessCodec(other)), (CODECS["raw"], RawCodec())):
        first, second = codec.encode(data)
        strange = stranger.encode(normal_blocks(other, 1))[0]
        out = np.empty((3, LAYOUT.bytes_per_block), np.uint8)
        assert codec.decode([first, strange, second], out) == [True, False, True]
        np.testing.assert_array_equal(out[[0, 2]], data)
