"""The task: what the decode kernel is told, as int64 addresses and sizes. Addresses and strides count bytes."""

from __future__ import annotations

__all__ = ["TASK_FIELDS", "TILE", "partial_floats", "work_floats"]

TILE = 64
"""Tokens per unit of work: small enough to spread one sequence over threads, large enough to pay for a partial one."""

TASK_FIELDS = (
    "thread_number", "thread_count", "barrier",
    "query", "query_row", "query_head", "key", "key_row", "key_head", "value", "value_row", "value_head", "out",
    "key_segments", "value_segments", "slots_per_segment", "block_size",
    "writes", "write_rows", "write_slots",
    "sequences", "decode_rows", "lengths", "tables", "table_width", "first_items",
    "items", "item_sequences", "partials", "work", "scale",
)  # fmt: skip
"""In order. The first three are functions of libgomp, zero to run on one thread. ``*_segments`` are addresses of one
address per segment. ``first_items`` has one entry more than there are sequences. ``scale`` is a float32 in the low
half."""


def partial_floats(v_dim: int) -> int:
    """Size of one partial softmax: weighted values, maximum, sum; whole cache lines."""
    return -(-(v_dim + 2) // 16) * 16


def work_floats(heads: int, k_dim: int) -> int:
    """Scratch of one thread, in float32: the scaled query and the scores of one tile; whole cache lines."""
    return -(-heads * (k_dim + TILE) // 16) * 16
