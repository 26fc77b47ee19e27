"""The model without any cache: what everything is compared with, and how much that varies by itself.

The model object here must be one that no kvos engine has open: attention and linear layers are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.mkldnn import MkldnnLinear

from kvos.config import KvosConfig
from kvos.engine import PackedBatch, TransformersEngine
from kvos.engine.probe import probe_layers
from kvos.engine.rope import declared_length
from kvos.storage import BlockPool

__all__ = ["FreshRuns", "NoiseFloor", "Reference", "cover", "spread"]

MIN_PAIRS = 8
LINEAR_CHUNKS = (1, 3, 8)
"""Rows of a linear layer's call: the matrix kernels for few rows add up in another order than those for many."""

Forward = Callable[[torch.Tensor], torch.Tensor]


class Reference:
    """Plain runs of a Transformers model, one sequence a call, ``use_cache=False``.

    Args:
        declared: the length that sequences declare, for models whose positions depend on it.
    """

    def __init__(self, model: Any, declared: int | None = None) -> None:
        self._model = model.eval()
        self._declared = declared
        if any(layer.softcap is not None or layer.has_sinks for layer in probe_layers(model)):
            model.set_attn_implementation("eager")  # the fused ones of the library have ignored a soft cap before
        self._device = model.device
        self.vocab_size: int = model.config.vocab_size
        self.dtype: torch.dtype = model.dtype

    def logits(self, ids: tuple[int, ...], first_row: int = 0) -> torch.Tensor:
        """Logits behind tokens ``first_row`` to the end of ``ids``: ``[rows, vocab]``, never below float32."""
        return self._run([ids], keep=len(ids) - first_row)[0]

    @torch.inference_mode()
    def _run(self, rows: list[tuple[int, ...]], *, keep: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = torch.tensor(rows, dtype=torch.long, device=self._device)
        given = {} if mask is None else {"attention_mask": mask.to(self._device)}
        with declared_length(self._model, self._declared):
            output = self._model(input_ids=tokens, use_cache=False, logits_to_keep=keep, **given)
        logits: torch.Tensor = output.logits.cpu()
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def num_other_shapes(self) -> int:
        """How many runs ``other_shapes`` makes."""
        return 5 + len(LINEAR_CHUNKS) + int(self._may_pack)

    @property
    def _may_pack(self) -> bool:
        return self.dtype == torch.float32 and self._device.type == "cpu" and torch.backends.mkldnn.is_available()

    def other_shapes(self, ids: tuple[int, ...], first_row: int, salt: int) -> Iterator[torch.Tensor]:
        """The rows of ``logits(ids, first_row)`` from runs of other shapes and by the library's other kernels.

        Eager attention; oneDNN's linear layers where kvos may use them, packed; copies in a batch; rows behind; a
        padded and a longer sequence in one batch; linear layers in chunks; and, last, the first half only.
        """
        n, copies = len(ids), 2 + salt % 3
        more = tuple((salt * 31 + 7 * i) % self.vocab_size for i in range(1, 6 + salt % 7))
        with self._attention("eager"):
            yield self.logits(ids, first_row)
        if self._may_pack:
            with self._linears(_by_onednn):
                yield self.logits(ids, first_row)
        yield self._run([ids] * copies, keep=n - first_row)[-1]
        longer = n + len(more)
        yield self._run([ids + more], keep=longer - first_row)[0, : n - first_row]
        padding = torch.ones(2, longer, dtype=torch.long)
        padding[0, n:] = 0
        yield self._run([ids + (0,) * len(more), ids + more], keep=longer - first_row, mask=padding)[0, : n - first_row]
        for rows in LINEAR_CHUNKS:
            # As in chunked prefill and, one by one, in decoding.
            with self._linears(partial(_chunked, rows=rows)):
                yield self.logits(ids, first_row)
        half = max(first_row + 1, n // 2)
        yield self._run([ids[:half]], keep=half - first_row)[0]

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation(name)
        try:
            yield
        finally:
            self._model.set_attn_implementation(before)

    @contextmanager
    def _linears(self, forward_of: Callable[[nn.Linear], Forward]) -> Iterator[None]:
        """Linear layers compute by what ``forward_of`` makes of each."""
        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        for linear in linears:
            vars(linear)["forward"] = forward_of(linear)
        try:
            yield
        finally:
            for linear in linears:
                del vars(linear)["forward"]


def _by_onednn(linear: nn.Linear) -> Forward:
    forward: Forward = MkldnnLinear(linear, torch.float32).forward
    return forward


def _chunked(linear: nn.Linear, *, rows: int) -> Forward:
    """The layer, given ``rows`` tokens at a time."""
    whole: Forward = linear.forward
    return lambda x: torch.cat([whole(part) for part in x.split(rows, dim=-2)], dim=-2)


class FreshRuns:
    """What kvos itself computes where nothing is cached, in one piece, alone: bits to compare with.

    Args:
        model: one that no engine has open; a deterministic engine takes it.
        max_tokens: the longest sequence, and the length that sequences declare.
        config: kernels, and whether an untested model may run.
    """

    def __init__(self, model: Any, max_tokens: int, config: KvosConfig) -> None:
        self._engine = TransformersEngine(
            model, deterministic=True, kernels=config.kernels, untested=config.untested_models
        )
        blocks = self._engine.layout.blocks_for(max_tokens)
        pool = BlockPool(self._engine.layout, max_blocks=blocks, blocks_per_segment=blocks, device=model.device)
        pool.grow()
        self._engine.attach(pool)
        self._max_tokens = max_tokens
        self.vocab_size: int = model.config.vocab_size
        self.dtype: torch.dtype = model.dtype

    def logits(self, ids: tuple[int, ...], first_row: int = 0) -> torch.Tensor:
        """Logits behind tokens ``first_row`` to the end of ``ids``: ``[rows, vocab]``, never below float32."""
        n = len(ids)
        batch = PackedBatch(
            token_ids=np.array(ids, np.int32),
            positions=np.arange(n),
            write_rows=np.arange(n),
            write_slots=np.arange(n),
            query_starts=np.array([0, n]),
            context_lengths=np.array([n]),
            block_tables=np.arange(self._engine.layout.blocks_for(n))[None],
            logit_rows=np.arange(first_row, n),
            declared_lengths=np.array([self._max_tokens]),
        )
        return self._engine.forward(batch).clone()


class NoiseFloor:
    """How far runs without a cache lie apart, for the same ids at the same positions, when only the arithmetic differs.

    Attributes:
        value: the largest difference of a logit between any two of them.
        pairs: pairs of runs that were compared, ``sequences`` of how many sequences.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._measured: set[tuple[int, ...]] = set()
        self.value = 0.0
        self.pairs = 0

    @property
    def sequences(self) -> int:
        return len(self._measured)

    def measure(self, ids: tuple[int, ...], first_row: int) -> None:
        """Take rows ``first_row`` to the end of ``ids`` into account; does nothing for what it has seen."""
        if ids in self._measured:
            return
        runs = [self._reference.logits(ids, first_row)]
        runs += self._reference.other_shapes(ids, first_row, salt=self.sequences)
        self.value = max(self.value, spread(runs))
        self.pairs += len(list(combinations(runs, 2)))
        self._measured.add(ids)


def spread(runs: list[torch.Tensor]) -> float:
    """The largest difference between any two of ``runs``, each ``[rows, vocab]``, over the rows that both have."""
    pairs = [(one[: len(two)], two[: len(one)]) for one, two in combinations(runs, 2)]
    if len(pairs) < MIN_PAIRS:
        raise ValueError(f"a noise floor needs at least {MIN_PAIRS} pairs of runs, got {len(pairs)}")
    return max(float((one - two).abs().max()) for one, two in pairs)


def cover(sequences: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The fewest of ``sequences`` such that each is a prefix of one of them: in a causal model its rows are theirs."""
    kept: list[tuple[int, ...]] = []
    for ids in sorted(set(sequences), reverse=True):  # a longer one comes right before its prefixes
        if not kept or kept[-1][: len(ids)] != ids:
            kept.append(ids)
    return kept
