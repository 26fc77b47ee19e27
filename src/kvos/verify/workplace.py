"""Runtimes to play on: the block size and the limits change from one group of rounds to the next."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvos.config import KvosConfig
from kvos.engine.probe import layout_from, probe_layers
from kvos.errors import InvalidInputError
from kvos.models.config_checks import context_of
from kvos.models.dtypes import short_name
from kvos.runtime import Runtime, open_runtime
from kvos.verify.below import always_restore

__all__ = ["ROUNDS_PER_RUNTIME", "Workplace", "group_of"]

ROUNDS_PER_RUNTIME = 10
"""Rounds that play in one home, so that blocks are recycled, shared and reclaimed, and found again after a restart."""

BLOCK_SIZES = (8, 16, 32)
POOL_TOKENS = 192
"""Small on purpose: a few sessions fill it, so cached blocks are reclaimed, and now and then there is none left."""
SHARED_TEXTS = 3
PREFILL_CHUNKS = (256, 13)
"""In whole, or in chunks whose edges lie inside blocks."""
CODECS: tuple[tuple[Literal["raw", "lossless"], Literal["raw", "lossless"]], ...] = (
    ("raw", "lossless"),
    ("lossless", "raw"),
    ("lossless", "lossless"),
    ("raw", "raw"),
)
"""Of host memory and disk; every two groups have both of both."""
HOST_POOLS, DISK_POOLS = 2, 6
"""Sizes of the tiers, in pools: now and then they have to let something go, too."""
DISK_EXTRA_BYTES = 1 << 20
"""What the disk tier takes beside blocks."""
RESTORE_DEADLINE_MS = 60_000
"""Far beyond what it takes: a restore that came too late would be computed, and show nothing."""


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

    def open(self, group: int, home: Path, size: int) -> Runtime:
        """The runtime for a group of rounds; the caller closes it.

        Args:
            home: what it keeps between restarts is in this folder.
            size: which block size, by a number that is taken modulo the sizes that there are.
        """
        chunk = PREFILL_CHUNKS[group % len(PREFILL_CHUNKS)]
        host, disk = CODECS[group % len(CODECS)]
        settings = replace(
            self._config,
            prefill_chunk_tokens=chunk,
            max_batch_tokens=max(64, chunk),
            max_running=32,
            host_codec=host,
            disk_codec=disk,
            restore_deadline_ms=RESTORE_DEADLINE_MS,
        )
        runtime = self._open(self._model, home, BLOCK_SIZES[size % len(BLOCK_SIZES)], settings, tiers=True)
        always_restore(runtime)
        return runtime

    def open_visitor(self, home: Path, size: int) -> Runtime:
        """A second runtime beside the first of ``size``, with another block size and no tiers; the caller closes it.

        It has the generic kernels, except where bits are compared: other kernels have other bits.
        """
        settings = self._config if self._config.deterministic else replace(self._config, kernels="generic")
        return self._open(self._visiting_model, home, BLOCK_SIZES[(size + 2) % len(BLOCK_SIZES)], settings, tiers=False)

    def _open(self, model: Any, home: Path, block_size: int, config: KvosConfig, *, tiers: bool) -> Runtime:
        block = layout_from(self._layers, block_size, model.dtype).bytes_per_block
        # Texts that sessions begin with are shared, so the pool needs room for a few of them.
        blocks = (POOL_TOKENS + SHARED_TEXTS * self.behind) // block_size
        chosen = replace(
            config,
            home=home,
            dtype=short_name(model.dtype),
            block_size=block_size,
            cache_bytes=max(4096, blocks * block),
            max_context_tokens=self.max_tokens,
            segment_bytes=max(4096, -(-blocks // 3) * block),
            host_cache_bytes=HOST_POOLS * blocks * block if tiers else 0,
            disk_cache_bytes=DISK_POOLS * blocks * block + DISK_EXTRA_BYTES if tiers else 0,
            publish_stats=False,
        )
        return open_runtime(model, tokenizer=self._tokenizer, config=chosen)

    def furnish(self, home: Path) -> None:
        """Make ``home`` a home of runtimes: new but for the compiled kernels, which take long to make."""
        home.mkdir()
        kernels = self._config.home / "kernels"
        with contextlib.suppress(OSError):  # compiled anew, then
            kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
            (home / "kernels").symlink_to(kernels)


def _sharing_weights(model: Any) -> Any:
    """Another model object over the same weights: an engine wants one for itself."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)
