"""From scheduled rows of many sequences to one packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvos.engine import PackedBatch
from kvos.sequences import WritePlan
from kvos.serving.request import Request

__all__ = ["Scheduled", "StepBudget", "pack"]


@dataclass(frozen=True, slots=True)
class StepBudget:
    """How much one step may do.

    Attributes:
        tokens: new tokens of all sequences.
        prefill_chunk: new tokens of one sequence.
        sequences: sequences in one step.
        prefill_beside_decodes: prompt tokens of all sequences while others decode, who wait for the step to end.
    """

    tokens: int
    prefill_chunk: int
    sequences: int
    prefill_beside_decodes: int = 64


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Rows ``start`` to ``end`` of one request's sequence in one step.

    Attributes:
        plan: where the KV of the last rows goes; None if all of these rows are cached already.
        logits_from: first row (as token index) whose logits are wanted; ``end`` for none.
    """

    request: Request
    start: int
    end: int
    plan: WritePlan | None
    logits_from: int

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def pack(scheduled: Sequence[Scheduled]) -> PackedBatch:
    """One row after another; sequences keep the order of ``scheduled``."""
    sequences = [item.request.session.sequence for item in scheduled]
    starts = np.zeros(len(scheduled) + 1, np.int64)
    np.cumsum([item.num_rows for item in scheduled], out=starts[1:])
    plans = [(first, item, item.plan) for first, item in zip(starts[:-1], scheduled, strict=True) if item.plan]
    tables = [sequence.block_table() for sequence in sequences]
    block_tables = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    return PackedBatch(
        token_ids=np.concatenate([s.tokens(i.start, i.end) for s, i in zip(sequences, scheduled, strict=True)]),
        positions=np.concatenate([s.positions(i.start, i.end) for s, i in zip(sequences, scheduled, strict=True)]),
        write_rows=_joined([first + np.arange(p.start - i.start, i.num_rows) for first, i, p in plans]),
        write_slots=_joined([plan.slots for _, _, plan in plans]),
        query_starts=starts,
        context_lengths=np.array([item.end for item in scheduled], np.int64),
        block_tables=block_tables,
        declared_lengths=np.array([item.request.session.limits.declared for item in scheduled], np.int64),
        logit_rows=_joined(
            [
                first + np.arange(item.logits_from - item.start, item.num_rows)
                for first, item in zip(starts[:-1], scheduled, strict=True)
            ]
        ),
    )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
