"""Runtimes to play on: the block size and the limits change from one group of rounds to the next."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from kvos.config import KvosConfig
from kvos.engine.probe import layout_from, probe_layers
from kvos.errors import InvalidInputError
from kvos.models.config_checks import context_of
from kvos.models.dtypes import short_name
from kvos.runtime import Runtime, open_runtime

__all__ = ["ROUNDS_PER_RUNTIME", "Workplace", "group_of"]

ROUNDS_PER_RUNTIME = 10
"""Rounds that one runtime lives for, so that its blocks are recycled, shared and reclaimed."""

BLOCK_SIZES = (8, 16, 32)
POOL_TOKENS = 192
"""Small on purpose: a few sessions fill it, so cached blocks are reclaimed, and now and then there is none left."""
SHARED_TEXTS = 3
PREFILL_CHUNKS = (256, 13)
"""In whole, or in chunks whose edges lie inside blocks."""


def group_of(number: int) -> int:
    """The group of rounds that share a runtime with round ``number``."""
    return number // ROUNDS_PER_RUNTIME


class Workplace:
    """Opens runtimes over one model object, one at a time, and a visitor beside it.

    Args:
        model: a Transformers model that nobody else uses meanwhile.
        config: what is not about block size and limits is taken from here.
        behind: tokens that sessions of raw tokens begin with, so that what happens comes behind them.

    Raises:
        InvalidInputError: the model's context has no room behind so many tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, config: KvosConfig, behind: int = 0) -> None:
        self.vocab_size: int = model.config.vocab_size
        self.behind = behind
        context = context_of(model.config)
        if config.max_context_tokens is not None:
            context = min(context, config.max_context_tokens)
        if behind > max(0, context - POOL_TOKENS):
            raise InvalidInputError(
                f"behind is {behind}; a context of {context} tokens leaves room for {max(0, context - POOL_TOKENS)}"
            )
        self.max_tokens = min(context, behind + POOL_TOKENS)
        self._layers = probe_layers(model)
        self._model = model
        self._visiting_model = _sharing_weights(model)
        self._tokenizer = tokenizer
        self._config = config

    def open(self, group: int) -> Runtime:
        """The runtime for a group of rounds; the caller closes it."""
        chunk = PREFILL_CHUNKS[group % len(PREFILL_CHUNKS)]
        settings = replace(self._config, prefill_chunk_tokens=chunk, max_batch_tokens=max(64, chunk), max_running=32)
        return self._open(self._model, BLOCK_SIZES[group % len(BLOCK_SIZES)], settings)

    def open_visitor(self, group: int) -> Runtime:
        """A second runtime beside the first, with another block size; the caller closes it.

        It has the generic kernels, except where bits are compared: other kernels have other bits.
        """
        settings = self._config if self._config.deterministic else replace(self._config, kernels="generic")
        return self._open(self._visiting_model, BLOCK_SIZES[(group + 2) % len(BLOCK_SIZES)], settings)

    def _open(self, model: Any, block_size: int, config: KvosConfig) -> Runtime:
        block = layout_from(self._layers, block_size, model.dtype).bytes_per_block
        # Texts that sessions begin with are shared, so the pool needs room for a few of them.
        blocks = (POOL_TOKENS + SHARED_TEXTS * self.behind) // block_size
        chosen = replace(
            config,
            dtype=short_name(model.dtype),
            block_size=block_size,
            cache_bytes=max(4096, blocks * block),
            max_context_tokens=self.max_tokens,
            segment_bytes=max(4096, -(-blocks // 3) * block),
            disk_cache_bytes=0,
        )
        return open_runtime(model, tokenizer=self._tokenizer, config=chosen)


def _sharing_weights(model: Any) -> Any:
    """Another model object over the same weights: an engine wants one for itself."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)
