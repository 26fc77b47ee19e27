"""The simplest engine: a plain loop over sequences, each run with the model library's own ``DynamicCache``.

It copies every sequence's whole past in each step and batches nothing, so it is slow; it is short, it needs no
attention function, and it is the worked example of ``docs/integrate.md``.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from kvos.engine.base import Engine, EngineInfo, PackedBatch
from kvos.engine.identity import model_identity
from kvos.engine.plan import check_batch, context_slots
from kvos.engine.probe import layout_from, probe_layers
from kvos.engine.support import check_model
from kvos.errors import EngineContractError, UnsupportedModelError
from kvos.models.config_checks import context_of, takes_declared_length
from kvos.storage import BlockPool

__all__ = ["DynamicCacheEngine", "cache_keyword"]


def cache_keyword(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: Transformers 5.24 gave ``past_key_values`` a new name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DynamicCacheEngine(Engine):
    """Runs a supported model, one sequence after the other. Engine thread only.

    A sequence sees what another one of the same batch wrote only if that one comes first.

    Args:
        model: a supported model; only its training mode is touched, and restored by ``close``.
        block_size: tokens per block of the layout, one of ``BLOCK_SIZES``.
        model_name: for messages and saved files.

    Raises:
        UnsupportedModelError: the model needs a feature that is missing; the text names it.
    """

    def __init__(self, model: PreTrainedModel, *, block_size: int = 16, model_name: str = "model") -> None:
        dtype = check_model(model)
        if takes_declared_length(model.config):
            raise UnsupportedModelError("this engine has no positions that depend on the length of the sequence")
        config = model.config
        self.info = EngineInfo(model_name, config.vocab_size, context_of(config), config.num_hidden_layers, dtype)
        self._model = model
        self._pool: BlockPool | None = None
        self._identity: str | None = None
        self._cache_keyword = cache_keyword(model)
        self._was_training = model.training
        self._closed = False
        model.eval()
        try:
            layers = probe_layers(model)
            if not all(layer.is_plain for layer in layers):
                raise UnsupportedModelError("this engine has no sliding windows, soft caps or attention sinks")
            self.layout = layout_from(layers, block_size, dtype)
        except BaseException:
            self.close()
            raise

    def attach(self, pool: BlockPool) -> None:
        if pool.layout != self.layout:
            raise EngineContractError(f"the pool's layout {pool.layout} is not that of the model, {self.layout}")
        self._pool = pool

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        if self._pool is None:
            raise EngineContractError("the engine has no pool: attach one first")
        check_batch(batch, self._pool)
        logits = torch.empty(
            (len(batch.logit_rows), self.info.vocab_size),
            dtype=torch.float64 if self.layout.dtype == torch.float64 else torch.float32,
            device=self._model.device,
        )
        for sequence in range(batch.num_sequences):
            start, stop = (int(row) for row in batch.query_starts[sequence : sequence + 2])
            past = int(batch.context_lengths[sequence]) - (stop - start)
            slots = context_slots(batch.block_tables[sequence], past, self.layout.block_size)
            cache = self._gather(self._pool, slots)
            wanted = np.flatnonzero((batch.logit_rows >= start) & (batch.logit_rows < stop))
            output = self._model(
                input_ids=self._tensor(batch.token_ids[start:stop])[None],
                position_ids=self._tensor(batch.positions[start:stop])[None],
                use_cache=True,
                return_dict=True,
                logits_to_keep=self._tensor(batch.logit_rows[wanted] - start),
                **{self._cache_keyword: cache},
            )
            logits[self._tensor(wanted)] = output.logits[0].to(logits.dtype)
            self._scatter(self._pool, batch, start, stop, cache, past)
        return logits

    def _gather(self, pool: BlockPool, slots: np.ndarray[Any, np.dtype[np.int64]]) -> DynamicCache:
        """The past in the form that the model library takes: per layer ``[1, kv_heads, past, dim]``."""
        cache = DynamicCache(config=self._model.config)
        if len(slots):
            for layer in range(self.layout.num_layers):
                keys, values = pool.read(layer, slots)
                cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        return cache

    def _scatter(
        self, pool: BlockPool, batch: PackedBatch, start: int, stop: int, cache: DynamicCache, past: int
    ) -> None:
        """Store what the model appended to the cache, for those rows that the batch wants stored."""
        first, last = np.searchsorted(batch.write_rows, (start, stop))
        inside = self._tensor(batch.write_rows[first:last] - start + past)
        for layer in range(self.layout.num_layers):
            kept: Any = cache.layers[layer]
            if kept.keys.shape[2] != past + stop - start:
                raise EngineContractError(
                    f"layer {layer} left {kept.keys.shape[2]} tokens in the cache, expected {past + stop - start}"
                )
            keys, values = (kv[0].transpose(0, 1).index_select(0, inside) for kv in (kept.keys, kept.values))
            pool.write(layer, batch.write_slots[first:last], keys, values)

    def _tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._model.device)

    def identity(self) -> str:
        if self._identity is None:
            self._identity = model_identity(self._model)
        return self._identity

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool = None
            self._model.train(self._was_training)
