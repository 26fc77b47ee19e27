"""The attention and mask functions that kvos registers with Transformers, under the name ``kvos``.

The model's attention modules look the function up by that name and call it once per layer. The batch reaches it in a
context variable, not as a keyword of the model's forward: some models drop keywords on the way. This is the generic
path: any device, any dtype, plain PyTorch. It is the reference that compiled kernels are tested against.

What a layer needs (scale of the scores, sliding window, soft cap, sinks) is taken from the keywords of its call, never
guessed from the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvos.engine.plan import BatchPlan, ChunkPlan, DecodePlan, RowPlan, SlotIndex
from kvos.engine.scores import attend
from kvos.errors import EngineContractError
from kvos.storage import BlockPool, LayerSpec

__all__ = [
    "ATTENTION_NAME",
    "AttentionLayer",
    "DecodeKernel",
    "Forward",
    "LayerCall",
    "PackedForward",
    "register",
    "running",
]

ATTENTION_NAME = "kvos"

_HARMLESS_KEYWORDS = frozenset(
    {
        "cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that do not change what attention computes here. Any other one must be None."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What an attention layer asks for in its call.

    Attributes:
        scale: of the scores.
        window: a row sees the last so many tokens, itself included; None for all.
        softcap: see ``scores.attend``; None for none.
        sinks: ``[heads]``, see ``scores.attend``; None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention, as the model was found when it was opened.

    Attributes:
        heads: query heads.
        spec: what it stores per token.
        scale, window, softcap: see ``LayerCall``.
        has_sinks: there is a score per head without a value.
    """

    heads: int
    spec: LayerSpec
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def is_plain(self) -> bool:
        """Nothing but scaled scores over all tokens."""
        return self.window is None and self.softcap is None and not self.has_sinks

    def agrees(self, call: LayerCall) -> bool:
        """Whether ``call`` asks for this layer's attention."""
        sinks = call.sinks is not None
        return (call.scale, call.window, call.softcap, sinks) == (
            self.scale,
            self.window,
            self.softcap,
            self.has_sinks,
        )


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Stands where a mask would: what a layer may see follows from the block tables, this says what it wants to see.

    Attributes:
        window: tokens that a row sees, itself included; None for all.
    """

    window: int | None


class Forward(Protocol):
    """What the attention calls of one forward go to."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """From ``[1, heads or kv_heads, rows, dim]`` each to ``[1, rows, heads, v_dim]``."""


_running: ContextVar[Forward | None] = ContextVar("kvos_forward", default=None)


@contextmanager
def running(forward: Forward) -> Iterator[None]:
    """Attention calls of this thread go to ``forward`` within the block."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


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
        layers: what each layer asked for when the model was opened; it has to ask for the same now.
        kernel: stores, and does the decodes; None leaves both to the generic path. ``plan`` was made for the one or
            the other.
    """

    def __init__(
        self, plan: BatchPlan, pool: BlockPool, layers: Sequence[AttentionLayer], kernel: DecodeKernel | None = None
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._pool = pool
        self._kernel = kernel
        self._next_layer = 0

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Store this layer's keys and values, then attend.

        Args:
            module: the attention module that calls; its ``layer_idx`` must be the layer that is due.
            query: ``[1, heads, rows, k_dim]``; key and value likewise with the KV heads.
            call: what the layer asks for.

        Returns:
            ``[1, rows, heads, v_dim]``.

        Raises:
            EngineContractError: another layer was due, or it asks for something else than when it was opened.
        """
        layer = self._enter(module, query, key)
        if not self._layers[layer].agrees(call):
            raise EngineContractError(
                f"layer {layer} asks for {call}, and asked for {self._layers[layer]} when the model was opened: "
                "someone changed the model object"
            )
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        queries = query[0].transpose(0, 1)
        out = query.new_empty((*queries.shape[:2], values.shape[-1]))
        if self._kernel is not None:
            self._kernel.attend(layer, queries, keys, values, call.scale, out)
        if self._plan.writes is not None:
            self._store(self._plan.writes, layer, keys, values)
        reads = self._plan.reads(call.window)
        for chunk in reads.chunks:
            _attend_chunk(chunk, layer, queries, keys, values, call, out)
        for group in reads.decodes:
            _attend_decodes(group, layer, queries, call, out)
        for sequence in reads.rows:
            _attend_rows(sequence, layer, queries, call, out)
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
    call: LayerCall,
    out: torch.Tensor,
) -> None:
    rows = slice(chunk.start, chunk.stop)
    keys, values = (new_keys[rows], new_values[rows]) if chunk.index is None else chunk.index.read(layer)
    for tile in chunk.tiles:
        inside = slice(chunk.start + tile.start, chunk.start + tile.stop)
        seen = slice(tile.first_key, tile.last_key)
        attended = attend(
            queries[inside].transpose(0, 1)[None],
            keys[seen].transpose(0, 1)[None],
            values[seen].transpose(0, 1)[None],
            scale=call.scale,
            mask=None if tile.mask is None else tile.mask[None, None],
            causal=tile.mask is None,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        out[inside] = attended[0].transpose(0, 1)


def _attend_decodes(group: DecodePlan, layer: int, queries: torch.Tensor, call: LayerCall, out: torch.Tensor) -> None:
    """One row of each sequence against ``[sequences, kv_heads, width, k_dim]``."""
    keys, values = (kv.unflatten(0, (-1, group.width)).transpose(1, 2) for kv in group.index.read(layer))
    rows = queries.index_select(0, group.rows)
    if call.softcap is None and call.sinks is None:
        # Query heads of one KV head as its rows: the fused kernel reads keys and values once for all of them.
        grouped = rows.unflatten(1, (keys.shape[1], -1))
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=call.scale)
        out.index_copy_(0, group.rows, attended.flatten(1, 2))
        return
    attended = attend(
        rows[:, :, None],
        keys,
        values,
        scale=call.scale,
        mask=group.mask,
        softcap=call.softcap,
        sinks=call.sinks,
    )
    out.index_copy_(0, group.rows, attended.squeeze(2))


def _attend_rows(plan: RowPlan, layer: int, queries: torch.Tensor, call: LayerCall, out: torch.Tensor) -> None:
    """A call per row: its shapes depend on the row's own context alone."""
    keys, values = (kv.transpose(0, 1)[None] for kv in plan.index.read(layer))
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    plain = call.softcap is None and call.sinks is None
    for row, (first, last) in enumerate(plan.seen, plan.start):
        seen = slice(first, last)
        if plain:
            attended = scaled_dot_product_attention(
                grouped[row][None], keys[:, :, seen], values[:, :, seen], scale=call.scale
            )
        else:
            attended = attend(
                queries[row][None, :, None],
                keys[:, :, seen],
                values[:, :, seen],
                scale=call.scale,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        out[row] = attended.reshape(out.shape[1:])


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskRequest | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,  # noqa: FBT001 - the library calls it by name
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    forward = _running.get()
    if forward is None:
        raise EngineContractError(
            "attention ran without a kvos batch: the model object is in use by a kvos engine (close that first)"
        )
    if isinstance(attention_mask, torch.Tensor) or dropout != 0.0 or is_causal is False:
        raise EngineContractError("attention got a mask, dropout, or a non-causal request, which kvos would ignore")
    if attention_mask is not None and attention_mask.window != sliding_window:
        raise EngineContractError(
            f"a layer's mask has a window of {attention_mask.window}, its call says {sliding_window}: the model's "
            "config contradicts itself, or was changed after the model was made"
        )
    unknown = [name for name, given in keywords.items() if name not in _HARMLESS_KEYWORDS and given is not None]
    if unknown:
        raise EngineContractError(f"attention got keywords that kvos does not know: {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return forward.attend(module, query, key, value, LayerCall(scale, sliding_window, softcap, s_aux)), None


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> MaskRequest:
    return MaskRequest(local_size)


def register() -> None:
    """Make both functions known to Transformers. Idempotent; the registry is global to the process."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
