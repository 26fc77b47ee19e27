"""Drives an engine without the layers above: tables and slots by hand, in a pool where every unused slot is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaForCausalLM

from kvos.engine import Engine, PackedBatch
from kvos.storage import BlockPool

__all__ = ["Driver", "History", "Work", "plain_logits"]


@dataclass
class History:
    """One sequence: its tokens, its blocks, and how many tokens are computed."""

    ids: np.ndarray
    table: np.ndarray
    computed: int = 0


@dataclass(frozen=True)
class Work:
    """``rows`` new tokens of a sequence in the next step; ``write=False`` computes old ones again, stores nothing."""

    history: History
    rows: int
    write: bool = True


@dataclass
class Driver:
    """An engine, a poisoned pool of shuffled blocks, and the steps."""

    engine: Engine
    blocks: int = 60
    blocks_per_segment: int = 60
    seed: int = 0
    declared: int | None = None
    pool: BlockPool = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.pool = BlockPool(self.engine.layout, max_blocks=self.blocks, blocks_per_segment=self.blocks_per_segment)
        while self.pool.num_blocks < self.blocks:
            self.grow()
        self.engine.attach(self.pool)
        self._free = list(self.rng.permutation(self.blocks))

    def grow(self) -> None:
        self.pool.grow()
        for tensor in (*self.pool.segments[-1].keys, *self.pool.segments[-1].values):
            tensor.fill_(float("nan"))

    def history(self, tokens: int, *, prefix: History | None = None) -> History:
        """Random tokens in shuffled blocks; the full computed blocks of ``prefix`` are shared."""
        size = self.engine.layout.block_size
        ids = self.rng.integers(0, self.engine.info.vocab_size, tokens).astype(np.int32)
        shared = 0
        if prefix is not None:
            shared = min(prefix.computed, tokens) // size
            ids[: shared * size] = prefix.ids[: shared * size]
        own = [self._free.pop() for _ in range(-(-tokens // size) - shared)]
        table = np.array([*(prefix.table[:shared] if prefix is not None else ()), *own], dtype=np.int64)
        return History(ids, table, shared * size)

    def batch(self, work: list[Work], logit_rows: np.ndarray | None = None) -> PackedBatch:
        size = self.engine.layout.block_size
        tokens, positions, write_rows, write_slots, lengths = [], [], [], [], []
        starts = [0]
        for item in work:
            history = item.history
            start = history.computed if item.write else history.computed - item.rows
            place = np.arange(start, start + item.rows)
            tokens.append(history.ids[place])
            positions.append(place)
            if item.write:
                write_rows.append(starts[-1] + np.arange(item.rows))
                write_slots.append(history.table[place // size] * size + place % size)
            lengths.append(start + item.rows)
            starts.append(starts[-1] + item.rows)
        # Entries past a sequence's own length must not matter: they name a block that does not exist.
        tables = np.full((len(work), max(len(item.history.table) for item in work)), 10**6, dtype=np.int64)
        for row, item in enumerate(work):
            tables[row, : len(item.history.table)] = item.history.table
        none = np.array([], dtype=np.int64)
        return PackedBatch(
            token_ids=np.concatenate(tokens).astype(np.int32),
            positions=np.concatenate(positions),
            write_rows=np.concatenate([none, *write_rows]),
            write_slots=np.concatenate([none, *write_slots]),
            query_starts=np.array(starts),
            context_lengths=np.array(lengths),
            block_tables=tables,
            logit_rows=np.arange(starts[-1]) if logit_rows is None else logit_rows,
            declared_lengths=None if self.declared is None else np.full(len(work), self.declared),
        )

    def step(self, *work: Work) -> list[torch.Tensor]:
        """Run; returns logits ``[rows, vocab]`` of each piece of work."""
        logits = self.engine.forward(self.batch(list(work)))
        for item in work:
            item.history.computed += item.rows if item.write else 0
        return list(logits.split([item.rows for item in work]))

    def prefill(self, history: History, *chunks: int) -> torch.Tensor:
        """All tokens not yet computed, in chunks of these sizes and then the rest; logits of all of them."""
        parts = []
        for size in (*chunks, len(history.ids)):
            rows = min(size, len(history.ids) - history.computed)
            if rows:
                parts.extend(self.step(Work(history, rows)))
        return torch.cat(parts)


def plain_logits(model: LlamaForCausalLM, ids: np.ndarray) -> torch.Tensor:
    """``[tokens, vocab]`` of the untouched model in one go, without any cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
    return logits.float() if logits.dtype != torch.float64 else logits
