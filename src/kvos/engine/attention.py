"""The attention and mask functions that kvos registers with Transformers, under the name ``kvos``.

The model's attention modules look the function up by that name and call it once per layer; the batch reaches it as a
keyword argument of the model's forward. This is the generic path: any device, any dtype, plain PyTorch. It is the
reference that compiled kernels are tested against.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvos.engine.plan import BatchPlan, ChunkPlan, DecodePlan, SlotIndex
from kvos.errors import EngineContractError
from kvos.storage import BlockPool

__all__ = ["ATTENTION_NAME", "FORWARD_KEYWORD", "DecodeKernel", "PackedForward", "register"]

ATTENTION_NAME = "kvos"
FORWARD_KEYWORD = "kvos_forward"

_HARMLESS_KEYWORDS = frozenset(
    {
        FORWARD_KEYWORD,
        "cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that do not change what attention computes here. Any other one must be None."""


class DecodeKernel(Protocol):
    """Stores a batch's keys and values and attends for its one-row sequences, layer by layer."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """From ``queries`` ``[rows, heads, k_dim]`` fill the decode rows of ``out`` ``[rows, heads, v_dim]``."""


class PackedForward:
    """One forward in flight: the plan, the pool, and which layer is due.

    Args:
        plan: of the batch.
        pool: where keys and values live.
        kernel: stores, and does the decodes; None leaves both to the generic path. ``plan`` was made for the one or
            the other.
    """

    def __init__(self, plan: BatchPlan, pool: BlockPool, kernel: DecodeKernel | None = None) -> None:
        self._plan = plan
        self._pool = pool
        self._kernel = kernel
        self._next_layer = 0

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Store this layer's keys and values, then attend.

        Args:
            module: the attention module that calls; its ``layer_idx`` must be the layer that is due.
            query: ``[1, heads, rows, k_dim]``; key and value likewise with the KV heads.
            scaling: of the scores; None means one over the root of ``k_dim``.

        Returns:
            ``[1, rows, heads, v_dim]``.
        """
        layer = self._enter(module, query, key)
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        queries = query[0].transpose(0, 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = query.new_empty((*queries.shape[:2], values.shape[-1]))
        if self._kernel is not None:
            self._kernel.attend(layer, queries, keys, values, scale, out)
        if self._plan.writes is not None:
            self._store(self._plan.writes, layer, keys, values)
        for chunk in self._plan.chunks:
            _attend_chunk(chunk, layer, queries, keys, values, scale, out)
        for group in self._plan.decodes:
            _attend_decodes(group, layer, queries, scale, out)
        return out[None]

    def _store(self, writes: SlotIndex, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self._plan.write_rows
        if rows is not None:
            keys, values = keys.index_select(0, rows), values.index_select(0, rows)
        writes.write(layer, keys, values)

    def _enter(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor) -> int:
        layer = getattr(module, "layer_idx", None)
        if layer != self._next_layer:
            raise EngineContractError(
                f"attention of layer {layer} ran where layer {self._next_layer} was due; "
                "kvos needs each layer exactly once, in order"
            )
        layout = self._pool.layout
        if layer >= layout.num_layers:
            raise EngineContractError(
                f"attention ran for layer {layer}, but the KV layout has {layout.num_layers} layers"
            )
        if key.dtype != layout.dtype or query.shape[0] != 1:
            raise EngineContractError(
                f"layer {layer} produced keys of {key.dtype} in {query.shape[0]} rows of batch; "
                f"kvos needs {layout.dtype} in one packed row"
            )
        self._next_layer += 1
        return int(layer)

    def finish(self) -> None:
        """Check that every layer attended.

        Raises:
            EngineContractError: fewer attention calls than layers.
        """
        if self._next_layer != self._pool.layout.num_layers:
            raise EngineContractError(
                f"{self._next_layer} of {self._pool.layout.num_layers} layers attended through kvos; the model must "
                f"dispatch attention to {ATTENTION_NAME!r} in every layer"
            )


def _attend_chunk(
    chunk: ChunkPlan,
    layer: int,
    queries: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    rows = slice(chunk.start, chunk.stop)
    keys, values = (new_keys[rows], new_values[rows]) if chunk.index is None else chunk.index.read(layer)
    for tile in chunk.tiles:
        inside = slice(chunk.start + tile.start, chunk.start + tile.stop)
        attended = scaled_dot_product_attention(
            queries[inside].transpose(0, 1)[None],
            keys[: tile.context].transpose(0, 1)[None],
            values[: tile.context].transpose(0, 1)[None],
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[inside] = attended[0].transpose(0, 1)


def _attend_decodes(group: DecodePlan, layer: int, queries: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Grouped queries ``[sequences, kv_heads, group, k_dim]`` against ``[sequences, kv_heads, width, k_dim]``."""
    keys, values = (kv.unflatten(0, (-1, group.width)).transpose(1, 2) for kv in group.index.read(layer))
    rows = queries.index_select(0, group.rows).unflatten(1, (keys.shape[1], -1))
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask, scale=scale)
    out.index_copy_(0, group.rows, attended.flatten(1, 2))


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,  # noqa: FBT001 - the library calls it by name
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    forward = keywords.get(FORWARD_KEYWORD)
    if not isinstance(forward, PackedForward):
        raise EngineContractError(
            "attention ran without a kvos batch: the model object is in use by a kvos engine (close that first), "
            f"or its forward does not hand keyword {FORWARD_KEYWORD!r} down to attention"
        )
    if attention_mask is not None or dropout != 0.0 or is_causal is False:
        raise EngineContractError("attention got a mask, dropout, or a non-causal request, which kvos would ignore")
    unknown = [name for name, given in keywords.items() if name not in _HARMLESS_KEYWORDS and given is not None]
    if unknown:
        raise EngineContractError(f"attention got keywords that kvos does not know: {', '.join(unknown)}")
    return forward.attend(module, query, key, value, scaling), None


def _mask(*_: Any, **__: Any) -> None:
    """No mask: what a row may see follows from the block tables."""


def register() -> None:
    """Make both functions known to Transformers. Idempotent; the registry is global to the process."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
