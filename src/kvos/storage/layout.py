"""The shape of the KV cache: the one place that knows how many bytes a token takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvos.errors import InvalidConfigError

__all__ = ["BLOCK_SIZES", "KVLayout", "LayerSpec"]

BLOCK_SIZES = (8, 16, 32, 64, 128)
"""Tokens per block that are allowed. 8 wastes least at forks, 32 and more gather faster."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer stores for a token.

    Attributes:
        kv_heads: key and value heads (not query heads: with GQA there are fewer).
        k_dim: size of one key head, in elements.
        v_dim: size of one value head, in elements.
    """

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of a whole model's KV cache; frozen.

    Raises:
        InvalidConfigError: no layers, a size below one, or a block size outside ``BLOCK_SIZES``.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise InvalidConfigError(f"block_size is {self.block_size}; choose one of {BLOCK_SIZES} tokens")
        if not self.layers:
            raise InvalidConfigError("a KV layout needs at least one layer")
        for index, layer in enumerate(self.layers):
            if min(layer.kv_heads, layer.k_dim, layer.v_dim) < 1:
                raise InvalidConfigError(f"layer {index} of the KV layout has a size below one: {layer}")

    @classmethod
    def uniform(
        cls, *, num_layers: int, kv_heads: int, head_dim: int, block_size: int = 16, dtype: torch.dtype = torch.float32
    ) -> KVLayout:
        """The common case: equal layers, keys and values of one size."""
        return cls((LayerSpec(kv_heads, head_dim, head_dim),) * num_layers, block_size, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """``sum over layers of kv_heads * (k_dim + v_dim) * itemsize``.

        For equal layers and head sizes this is the familiar ``2 * L * H_kv * D * itemsize``.
        """
        return sum(layer.elements_per_token for layer in self.layers) * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill, the last one possibly in part."""
        return -(-tokens // self.block_size)
