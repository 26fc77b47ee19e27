"""The run that a model has to pass when it is opened: through every guard, against its own eager attention.

A model of a tested type runs a few tokens. One that nobody has tested, or that somebody has changed, runs two sequences
past its windows, packed and in chunks of several sizes, so that what kvos does not know about it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvos.engine.attention import AttentionLayer
from kvos.engine.base import PackedBatch
from kvos.engine.probe import failing_plainly
from kvos.errors import UnsupportedModelError
from kvos.models.config_checks import context_of
from kvos.storage import BlockPool, KVLayout
from kvos.types import TokenIds

__all__ = ["Trial"]

SHORT_TOKENS = 5
SHORT_CHUNKS = (2, 2, 1)
LONG_TOKENS = 64
LONG_CHUNKS = (5, 16, 33)
MIDDLE_CHUNK = 256
"""Rows of the chunks up to the last few tokens, which come one by one."""
SINGLES = 4
BEHIND_WINDOW = 24
"""Tokens that a thorough trial runs on when the longest window is full."""
FIRST_ROWS, LAST_ROWS = 64, 64
"""Rows whose logits are compared; those between would only take memory, ``tokens * vocab`` of it."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Of the largest logit, whatever the model's noise. A short trial is there to find a wrong mask, position or cap."""

NOISE_FACTOR = 4.0
LEAST_NOISE = {torch.float64: 2.5e-6, torch.float32: 2.5e-5, torch.bfloat16: 0.004, torch.float16: 0.001}
"""A thorough trial allows so many times what the plain model's own runs differ by, and at least this: in half precision
half a unit in the last place of the largest logit."""

Run = Callable[[PackedBatch, BlockPool], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Token ids, and what the untouched model says to them.

    Attributes:
        sequences: ids, each ``[tokens]``; they run packed, side by side.
        rows: of each sequence, whose logits are compared; sorted.
        chunks: rows of a sequence per step; the last size goes on to the end.
        expected: ``[rows, vocab]`` for each sequence.
        limit: how far logits may be off, as a share of the largest.
    """

    sequences: tuple[TokenIds, ...]
    rows: tuple[npt.NDArray[np.int64], ...]
    chunks: tuple[int, ...]
    expected: tuple[torch.Tensor, ...]
    limit: float

    @classmethod
    def of(cls, model: PreTrainedModel, layers: Sequence[AttentionLayer], *, thorough: bool) -> Trial:
        """Ask the untouched model, with eager attention; it is left as it was.

        Raises:
            UnsupportedModelError: its context ends before a thorough trial has passed its windows, or it fails in its
                own forward.
        """
        context = context_of(model.config)
        lengths: tuple[int, ...] = (min(SHORT_TOKENS, context),)
        chunks: tuple[int, ...] = SHORT_CHUNKS
        if thorough:
            windows = [layer.window for layer in layers if layer.window is not None and layer.window < context]
            window = max(windows, default=0)
            longest = max(LONG_TOKENS, window + BEHIND_WINDOW)
            if longest > context:
                raise UnsupportedModelError(
                    f"a model that is untested, or was changed by hooks or classes of its own, has to run {longest} "
                    f"tokens, past its window of {window}, to show that it agrees with itself; its context ends at "
                    f"{context}"
                )
            lengths = (longest, longest - 7)
            chunks = (*LONG_CHUNKS, *_middle(longest - sum(LONG_CHUNKS) - SINGLES), 1)
        sequences = tuple(_ids(n, number, model.config.vocab_size) for number, n in enumerate(lengths))
        rows = tuple(_compared(n) for n in lengths)
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            with failing_plainly(type(model).__name__):
                expected = tuple(_plain_logits(model, ids, at) for ids, at in zip(sequences, rows, strict=True))
                limit = _TOLERANCE[model.dtype]
                if thorough:
                    plain = all(layer.softcap is None and not layer.has_sinks for layer in layers)
                    noise = _noise(model, sequences[0][:LONG_TOKENS], fused=plain)
                    limit = min(limit, NOISE_FACTOR * max(noise, LEAST_NOISE[model.dtype]))
        finally:
            model.set_attn_implementation(before)
        return cls(sequences, rows, chunks, expected, limit)

    @torch.inference_mode()
    def check(self, run: Run, layout: KVLayout, device: torch.device, name: str) -> None:
        """Run the sequences through ``run``, in a pool of their own.

        Raises:
            UnsupportedModelError: other logits than expected.
            EngineContractError: a guard's.
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
            places = [np.searchsorted(self.rows[n], (done[n], ends[n])) for n in running]
            logits = run(self._batch(tables, size, running, done, ends), pool)
            parts = logits.split([int(last - first) for first, last in places])
            for n, part, (first, last) in zip(running, parts, places, strict=True):
                self._compare(part, self.expected[n][first:last], name)
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
        wanted = [
            start + np.flatnonzero(np.isin(place, self.rows[n]))
            for n, place, start in zip(running, places, starts[:-1], strict=True)
        ]
        return PackedBatch(
            token_ids=np.concatenate([self.sequences[n][place] for n, place in zip(running, places, strict=True)]),
            positions=np.concatenate(places),
            write_rows=np.arange(starts[-1]),
            write_slots=np.concatenate(slots),
            query_starts=starts,
            context_lengths=np.array([ends[n] for n in running]),
            block_tables=tables[running],
            logit_rows=np.concatenate(wanted),
            declared_lengths=np.array([len(self.sequences[n]) for n in running]),
        )

    def _compare(self, logits: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        if len(expected) == 0:
            return
        difference = _relative(logits, expected)
        if not difference <= self.limit:  # true for NaN
            raise UnsupportedModelError(
                f"{name}: logits through kvos differ from the plain model's by {difference:.2g} of the largest, and "
                f"{self.limit:.2g} is the limit; the model does something that depends on other tokens and that kvos "
                "does not know, or is too noisy in this dtype to tell (then fp32 opens)"
            )


def _middle(rows: int) -> tuple[int, ...]:
    """``rows`` in chunks of bounded size; at least one row."""
    full, rest = divmod(max(rows, 1), MIDDLE_CHUNK)
    return (MIDDLE_CHUNK,) * full + ((rest,) if rest else ())


def _compared(tokens: int) -> npt.NDArray[np.int64]:
    rows = np.arange(tokens)
    return rows[(rows < FIRST_ROWS) | (rows >= tokens - LAST_ROWS)]


def _ids(n: int, number: int, vocab_size: int) -> TokenIds:
    """Ids that look random and are the same everywhere."""
    return np.asarray((np.arange(1, n + 1) * 7919 + 104729 * (number + 1)) % 65537 % vocab_size, dtype=np.int32)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, ids: TokenIds, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    keep = torch.from_numpy(rows).to(model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True, logits_to_keep=keep).logits[0]
    return logits if len(logits) == len(rows) else logits[keep]  # a forward may ignore what to keep


def _noise(model: PreTrainedModel, ids: TokenIds, *, fused: bool) -> float:
    """How far plain runs lie apart when only the arithmetic differs: fewer tokens, one token more, fused attention.

    ``fused``: the library's fused attention may be asked, since the model has nothing that it is known to leave out.
    """
    rows = np.arange(len(ids) // 2)
    runs = [_plain_logits(model, ids[:n], rows) for n in (len(ids), len(ids) - 1, len(rows) + 1)]
    if fused and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
        runs.append(_plain_logits(model, ids, rows))
        model.set_attn_implementation("eager")
    return max(_relative(run, runs[0]) for run in runs[1:])


def _relative(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())
