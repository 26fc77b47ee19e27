"""The run that a model has to pass when it is opened: through every guard, against its own eager attention.

A model of a tested type runs a few tokens. One that nobody has tested runs two sequences past its windows, packed and
in chunks of several sizes, so that what kvos does not know about it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from kvos.engine.base import PackedBatch
from kvos.engine.probe import AttentionLayer
from kvos.errors import EngineContractError, UnsupportedModelError
from kvos.storage import BlockPool, KVLayout
from kvos.types import TokenIds

__all__ = ["Trial"]

SHORT = (5,)
SHORT_CHUNKS = (2, 2, 1)
LONG_TOKENS = 64
LONG_CHUNKS = (5, 16, 33)
"""Then all but the last few tokens at once, and those one by one."""
SINGLES = 4
BEHIND_WINDOW = 24
"""Tokens that a thorough trial runs on when the longest window is full."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Of the largest logit. Wide: the run is there to find a wrong mask, scale or position, not to measure noise."""

Run = Callable[[PackedBatch, BlockPool], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Token ids, and what the untouched model says to them.

    Attributes:
        sequences: ids, each ``[tokens]``; they run packed, side by side.
        chunks: rows of a sequence per step; the last size goes on to the end.
        expected: ``[tokens, vocab]`` for each sequence.
    """

    sequences: tuple[TokenIds, ...]
    chunks: tuple[int, ...]
    expected: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[AttentionLayer], *, thorough: bool) -> Trial:
        """Ask the untouched model, with eager attention; it is left as it was.

        Raises:
            UnsupportedModelError: its context ends before a thorough trial has passed its windows.
        """
        lengths: tuple[int, ...] = SHORT
        chunks: tuple[int, ...] = SHORT_CHUNKS
        if thorough:
            window = max((layer.window or 0 for layer in layers), default=0)
            longest = max(LONG_TOKENS, window + BEHIND_WINDOW)
            limit = getattr(model.config, "max_position_embeddings", longest)
            if longest > limit:
                raise UnsupportedModelError(
                    f"an untested model has to run {longest} tokens, past its window of {window}, to show that it "
                    f"agrees with itself; its context ends at {limit}"
                )
            lengths = (longest, longest - 7)
            chunks = (*LONG_CHUNKS, max(1, longest - sum(LONG_CHUNKS) - SINGLES), 1)
        vocab = model.config.vocab_size
        sequences = tuple(_ids(n, number, vocab) for number, n in enumerate(lengths))
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            expected = tuple(_plain_logits(model, ids) for ids in sequences)
        finally:
            model.set_attn_implementation(before)
        return cls(sequences, chunks, expected)

    @torch.inference_mode()
    def check(self, run: Run, layout: KVLayout, device: torch.device, name: str) -> None:
        """Run the sequences through ``run``, in a pool of their own.

        Raises:
            EngineContractError: other logits than expected; or a guard's.
        """
        size = layout.block_size
        tables = self._tables(size)
        blocks = tables.size
        pool = BlockPool(layout, max_blocks=blocks, blocks_per_segment=blocks, device=device)
        pool.grow()
        done = [0] * len(self.sequences)
        step = 0
        while any(at < len(ids) for at, ids in zip(done, self.sequences, strict=True)):
            rows = self.chunks[min(step, len(self.chunks) - 1)]
            ends = [min(at + rows, len(ids)) for at, ids in zip(done, self.sequences, strict=True)]
            running = [n for n, end in enumerate(ends) if end > done[n]]
            logits = run(self._batch(tables, size, running, done, ends), pool)
            parts = logits.split([ends[n] - done[n] for n in running])
            for n, part in zip(running, parts, strict=True):
                _compare(part, self.expected[n][done[n] : ends[n]], layout.dtype, name)
            done, step = ends, step + 1

    def _tables(self, size: int) -> np.ndarray:
        """One block table per sequence, ``[sequences, blocks]``; neighbours interleave."""
        blocks = -(-max(map(len, self.sequences)) // size)
        return np.arange(len(self.sequences) * blocks).reshape(blocks, -1).T.copy()

    def _batch(
        self, tables: np.ndarray, size: int, running: list[int], done: list[int], ends: list[int]
    ) -> PackedBatch:
        places = [np.arange(done[n], ends[n]) for n in running]
        slots = [tables[n][place // size] * size + place % size for n, place in zip(running, places, strict=True)]
        starts = np.cumsum([0, *map(len, places)])
        return PackedBatch(
            token_ids=np.concatenate([self.sequences[n][place] for n, place in zip(running, places, strict=True)]),
            positions=np.concatenate(places),
            write_rows=np.arange(starts[-1]),
            write_slots=np.concatenate(slots),
            query_starts=starts,
            context_lengths=np.array([ends[n] for n in running]),
            block_tables=tables[running],
            logit_rows=np.arange(starts[-1]),
        )


def _ids(n: int, number: int, vocab_size: int) -> TokenIds:
    """Ids that look random and are the same everywhere."""
    return np.asarray((np.arange(1, n + 1) * 7919 + 104729 * (number + 1)) % 65537 % vocab_size, dtype=np.int32)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, ids: TokenIds) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return logits


def _compare(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE[dtype]:  # true for NaN
        raise EngineContractError(
            f"{name}: logits through kvos differ from the plain model's by {difference:.2g} of the largest; the model "
            "does something in attention that kvos does not know"
        )
