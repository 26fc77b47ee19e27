"""Keys and values in 8 or 4 bits: smaller, and no longer what was computed.

Keys are quantised per channel, over the tokens of a block, and values per token, over the channels of a head, since
outliers of keys sit in few channels and those of values in few tokens (KIVI, arXiv 2402.02750). Each group has a
minimum and a step in float16, and its elements are ``minimum + step * q``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvos.storage.layout import KVLayout
from kvos.tiers.base import PayloadBytes
from kvos.tiers.codec import Codec

__all__ = ["QuantisedCodec"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Bytes = npt.NDArray[np.uint8]

_AS_IT_IS, _QUANTISED = b"\0", b"\1"

KEY_AXIS, VALUE_AXIS = 1, 3
"""Of ``[blocks, tokens, heads, channels]``: the one that a group of keys, or of values, goes along."""


class QuantisedCodec(Codec):
    """Lossy. A block with anything that float16 cannot hold is written as it is. Keeps no state.

    Args:
        layout: where keys and values stand in a block.
        bits: 8 or 4.
    """

    lossless = False

    def __init__(self, layout: KVLayout, bits: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits is {bits}; expected 4 or 8")
        self._layout = layout
        self._bits = bits
        self.name = f"int{bits}-{layout.dtype.itemsize}"
        self._encoded_bytes = len(_QUANTISED) + sum(self._part_bytes(shape, axis) for shape, axis in self._parts())

    def encode(self, data: PayloadBytes) -> list[bytes]:
        if not len(data):
            return []
        values = _as_floats(data, self._layout)
        encoded: list[Bytes] = []
        fits = np.ones(len(data), bool)
        start = 0
        for shape, axis in self._parts():
            part = values[:, start : start + int(np.prod(shape))].reshape(len(data), *shape)
            start += int(np.prod(shape))
            pieces, good = self._encode_part(part, axis)
            encoded += pieces
            fits &= good
        rows = np.concatenate(encoded, axis=1)
        return [
            _QUANTISED + row.tobytes() if good else _AS_IT_IS + original.tobytes()
            for row, original, good in zip(rows, data, fits, strict=True)
        ]

    def decode(self, encoded: Sequence[bytes | memoryview], out: PayloadBytes) -> list[bool]:
        results = [False] * len(encoded)
        quantised: list[int] = []
        for i, block in enumerate(encoded):
            kind, size = bytes(block[:1]), len(block)
            if kind == _AS_IT_IS and size == 1 + out.shape[1]:
                out[i] = np.frombuffer(block, np.uint8)[1:]
                results[i] = True
            elif kind == _QUANTISED and size == self._encoded_bytes:
                quantised.append(i)
                results[i] = True
        if quantised:
            rows = np.stack([np.frombuffer(encoded[i], np.uint8)[1:] for i in quantised])
            out[quantised] = _as_bytes(self._decode_rows(rows), self._layout)
        return results

    def _parts(self) -> Iterator[tuple[tuple[int, int, int], int]]:
        """``(tokens, heads, channels)`` and the axis of a group: keys and values of each layer, in order."""
        for layer in self._layout.layers:
            yield (self._layout.block_size, layer.kv_heads, layer.k_dim), KEY_AXIS
            yield (self._layout.block_size, layer.kv_heads, layer.v_dim), VALUE_AXIS

    def _part_bytes(self, shape: tuple[int, int, int], axis: int) -> int:
        elements = int(np.prod(shape))
        return 4 * (elements // shape[axis - 1]) + -(-elements * self._bits // 8)

    def _encode_part(self, part: Floats, axis: int) -> tuple[list[Bytes], npt.NDArray[np.bool_]]:
        """Minima, steps and packed elements ``[blocks, bytes]`` each, and which blocks float16 can describe."""
        blocks, most = len(part), (1 << self._bits) - 1
        with np.errstate(over="ignore", invalid="ignore"):
            least = _rounded(part.min(axis=axis, keepdims=True), down=True)
            step = _rounded((part.max(axis=axis, keepdims=True) - least.astype(np.float32)) / most, down=False)
            described = np.isfinite(least) & np.isfinite(step)
            # A group of equal elements has no step, and all of its elements are the minimum.
            steps = np.where(step > 0, step.astype(np.float32), 1)
            q = np.rint((part - least.astype(np.float32)) / steps)
            q = np.clip(np.nan_to_num(q), 0, most).astype(np.uint8).reshape(blocks, -1)
        if self._bits == 4:
            q = _in_pairs(q)
        halves = (least.reshape(blocks, -1).view(np.uint8), step.reshape(blocks, -1).view(np.uint8))
        good: npt.NDArray[np.bool_] = np.all(described.reshape(blocks, -1), axis=1)
        return [*halves, q], good

    def _decode_rows(self, rows: Bytes) -> Floats:
        """``[blocks, elements]`` from ``[blocks, bytes]``."""
        decoded: list[Floats] = []
        start = 0

        def take(size: int) -> Bytes:
            nonlocal start
            start += size
            return np.ascontiguousarray(rows[:, start - size : start])

        for shape, axis in self._parts():
            elements = int(np.prod(shape))
            groups = list(shape)
            groups[axis - 1] = 1
            least, step = (
                take(2 * int(np.prod(groups))).view(np.float16).astype(np.float32).reshape(len(rows), *groups)
                for _ in range(2)
            )
            q = take(-(-elements * self._bits // 8))
            if self._bits == 4:
                q = np.stack([q & 15, q >> 4], axis=2).reshape(len(rows), -1)[:, :elements]
            decoded.append((least + step * q.reshape(len(rows), *shape)).reshape(len(rows), -1))
        return np.concatenate(decoded, axis=1)


def _as_floats(data: PayloadBytes, layout: KVLayout) -> Floats:
    values: Floats = torch.from_numpy(np.ascontiguousarray(data)).view(layout.dtype).float().numpy()
    return values


def _as_bytes(values: Floats, layout: KVLayout) -> PayloadBytes:
    data: PayloadBytes = torch.from_numpy(values).to(layout.dtype).view(torch.uint8).numpy()
    return data


def _rounded(values: Floats, *, down: bool) -> Halves:
    """In float16, never above (or below) what they are, so that a group's ends lie within its range."""
    halves = values.astype(np.float16)
    beyond = halves.astype(np.float32) > values if down else halves.astype(np.float32) < values
    return np.where(beyond, np.nextafter(halves, np.float16(-np.inf if down else np.inf)), halves)


def _in_pairs(q: Bytes) -> Bytes:
    """Two elements a byte, the first in the lower half."""
    if q.shape[1] % 2:
        q = np.pad(q, ((0, 0), (0, 1)))
    pairs: Bytes = q[:, ::2] | (q[:, 1::2] << np.uint8(4))
    return pairs
