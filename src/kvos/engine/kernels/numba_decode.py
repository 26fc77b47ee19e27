"""Decode attention over block tables, compiled by Numba: one call per layer for all one-row sequences.

For float32 on the CPU. A sequence's context is cut into tiles of ``TILE`` tokens. Tiles are spread over threads; each
gives a partial softmax (weighted values, maximum, sum), and a last phase joins a sequence's tiles in order (flash
decoding, Dao et al. 2023). So a sequence's result depends neither on its neighbours nor on the number of threads.

::

    phase 1   rows to store       ->  slots            each phase is spread over the threads,
    phase 2   (sequence, tile)    ->  partial softmax  with a barrier between
    phase 3   (sequence, head)    ->  out

The kernel takes one argument, the address of a *task* (``task.py``). Nothing in it can raise or allocate, so its
machine code stands on its own and can be kept (``object_code.py``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvos.engine.kernels.task import TASK_FIELDS, TILE, partial_floats, work_floats
from kvos.engine.kernels.vectors import call_address, divide, load_float, load_int, prefetch, store_float, vector_ops

__all__ = ["compile_decode"]

(
    _THREAD_NUMBER, _THREAD_COUNT, _BARRIER,
    _QUERY, _QUERY_ROW, _QUERY_HEAD, _KEY, _KEY_ROW, _KEY_HEAD, _VALUE, _VALUE_ROW, _VALUE_HEAD, _OUT,
    _KEY_SEGMENTS, _VALUE_SEGMENTS, _SLOTS_PER_SEGMENT, _BLOCK_SIZE,
    _WRITES, _WRITE_ROWS, _WRITE_SLOTS,
    _SEQUENCES, _DECODE_ROWS, _LENGTHS, _TABLES, _TABLE_WIDTH, _FIRST_ITEMS,
    _ITEMS, _ITEM_SEQUENCES, _PARTIALS, _WORK, _SCALE,
) = (8 * place for place in range(len(TASK_FIELDS)))  # fmt: skip

_MASKED = np.float32(-1e30)
"""Score of a place past the end of a tile: its weight is exactly zero."""


def compile_decode(kv_heads: int, group: int, k_dim: int, v_dim: int) -> Any:
    """The kernel ``void decode(task)`` for one head geometry, as a Numba ``cfunc``. Takes seconds."""
    heads = kv_heads * group
    store_keys = _store_phase(kv_heads, k_dim, _KEY, _KEY_ROW, _KEY_HEAD, _KEY_SEGMENTS)
    store_values = _store_phase(kv_heads, v_dim, _VALUE, _VALUE_ROW, _VALUE_HEAD, _VALUE_SEGMENTS)
    attend = _attend_phase(kv_heads, group, k_dim, v_dim)
    join = _join_phase(heads, v_dim)

    @cfunc(types.void(types.int64), nopython=True, error_model="numpy")  # type: ignore[untyped-decorator]
    def decode(task: int) -> None:
        thread, threads = 0, 1
        barrier = load_int(task + _BARRIER)
        if barrier != 0:
            thread, threads = (
                call_address(load_int(task + _THREAD_NUMBER)),
                call_address(load_int(task + _THREAD_COUNT)),
            )
        store_keys(task, thread, threads)
        store_values(task, thread, threads)
        if barrier != 0:
            call_address(barrier)
        attend(task, thread, threads)
        if barrier != 0:
            call_address(barrier)
        join(task, thread, threads)

    return decode


def _store_phase(kv_heads: int, dim: int, source: int, row: int, head: int, segments: int) -> Any:
    copy = vector_ops(dim).copy

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def store(task: int, thread: int, threads: int) -> None:
        count, size = load_int(task + _WRITES), load_int(task + _SLOTS_PER_SEGMENT)
        rows, slots = load_int(task + _WRITE_ROWS), load_int(task + _WRITE_SLOTS)
        for i in range(divide(count * thread, threads), divide(count * (thread + 1), threads)):
            slot = load_int(slots + 8 * i)
            segment = divide(slot, size)
            target = load_int(load_int(task + segments) + 8 * segment) + (slot - segment * size) * (4 * kv_heads * dim)
            values = load_int(task + source) + load_int(rows + 8 * i) * load_int(task + row)
            for h in range(kv_heads):
                copy(target + 4 * dim * h, values + h * load_int(task + head))

    return store


def _attend_phase(kv_heads: int, group: int, k_dim: int, v_dim: int) -> Any:
    heads, partial = kv_heads * group, 4 * partial_floats(v_dim)
    key_row, value_row = 4 * kv_heads * k_dim, 4 * kv_heads * v_dim
    keys, values, tile = vector_ops(k_dim), vector_ops(v_dim), vector_ops(TILE)
    scale_query, dot, add, add_four = keys.scale, keys.dot, values.add, values.add_four
    thread_work = 4 * work_floats(heads, k_dim)
    fetch_key, fetch_values = prefetch(key_row), prefetch(4 * value_row)
    clear, soften, total = values.clear, tile.soften, tile.total

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def place(task: int, segments: int, sequence: int, token: int, row: int) -> Any:
        """Address of a token's row."""
        block_size, size = load_int(task + _BLOCK_SIZE), load_int(task + _SLOTS_PER_SEGMENT)
        index = divide(token, block_size)
        block = load_int(load_int(task + _TABLES) + 8 * (sequence * load_int(task + _TABLE_WIDTH) + index))
        slot = block * block_size + token - index * block_size
        segment = divide(slot, size)
        return load_int(load_int(task + segments) + 8 * segment) + (slot - segment * size) * row

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def score(task: int, sequence: int, start: int, count: int, work: int) -> None:
        """Scaled query and scores of a tile into ``work``; meanwhile fetches what is read next."""
        run = load_int(task + _BLOCK_SIZE)
        run = run if run < TILE else TILE
        scores = work + 4 * heads * k_dim
        row = load_int(load_int(task + _DECODE_ROWS) + 8 * sequence) * load_int(task + _QUERY_ROW)
        for h in range(heads):
            source = load_int(task + _QUERY) + row + h * load_int(task + _QUERY_HEAD)
            scale_query(work + 4 * k_dim * h, source, load_float(task + _SCALE))
            for t in range(count, TILE):
                store_float(scores + 4 * (TILE * h + t), _MASKED)
        following = place(task, _KEY_SEGMENTS, sequence, start, key_row)
        for block in range(divide(count + run - 1, run)):
            at, first = following, block * run
            last = first + run if first + run < count else count
            if last < count:
                following = place(task, _KEY_SEGMENTS, sequence, start + last, key_row)
            else:
                following = place(task, _VALUE_SEGMENTS, sequence, start, value_row)
            for t in range(first, last):
                fetch_key(following + key_row * (t - first))
                for h in range(kv_heads):
                    for g in range(group):
                        head = h * group + g
                        store_float(scores + 4 * (TILE * head + t), dot(work + 4 * k_dim * head, at + 4 * k_dim * h))
                at += key_row

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def weigh(task: int, sequence: int, start: int, count: int, out: int, scores: int, next_keys: int) -> None:
        """Partial softmax of a tile from its scores; meanwhile fetches what is read next, at last ``next_keys``."""
        run = load_int(task + _BLOCK_SIZE)
        run = run if run < TILE else TILE
        for h in range(heads):
            clear(out + partial * h)
            store_float(out + partial * h + 4 * v_dim, soften(scores + 4 * TILE * h))
            store_float(out + partial * h + 4 * v_dim + 4, total(scores + 4 * TILE * h))
        following = place(task, _VALUE_SEGMENTS, sequence, start, value_row)
        for block in range(divide(count + run - 1, run)):
            at, first = following, block * run
            last = first + run if first + run < count else count
            following = place(task, _VALUE_SEGMENTS, sequence, start + last, value_row) if last < count else next_keys
            quads = first + ((last - first) & -4)
            for t in range(first, quads, 4):
                fetch_values(following + value_row * (t - first))
                for h in range(kv_heads):
                    for g in range(group):
                        head = h * group + g
                        add_four(out + partial * head, at + 4 * v_dim * h, value_row, scores + 4 * (TILE * head + t))
                at += 4 * value_row
            for t in range(quads, last):
                for head in range(heads):
                    weight = load_float(scores + 4 * (TILE * head + t))
                    add(out + partial * head, at + 4 * v_dim * divide(head, group), weight)
                at += value_row

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def attend(task: int, thread: int, threads: int) -> None:
        items, work = load_int(task + _ITEMS), load_int(task + _WORK) + thread * thread_work
        last_item = divide(items * (thread + 1), threads)
        for item in range(divide(items * thread, threads), last_item):
            sequence = load_int(load_int(task + _ITEM_SEQUENCES) + 8 * item)
            start = (item - load_int(load_int(task + _FIRST_ITEMS) + 8 * sequence)) * TILE
            left = load_int(load_int(task + _LENGTHS) + 8 * sequence) - start
            count = left if left < TILE else TILE
            score(task, sequence, start, count, work)
            next_keys = 0
            if item + 1 < last_item:
                other = load_int(load_int(task + _ITEM_SEQUENCES) + 8 * (item + 1))
                token = (item + 1 - load_int(load_int(task + _FIRST_ITEMS) + 8 * other)) * TILE
                next_keys = place(task, _KEY_SEGMENTS, other, token, key_row)
            out = load_int(task + _PARTIALS) + item * heads * partial
            weigh(task, sequence, start, count, out, work + 4 * heads * k_dim, next_keys)

    return attend


def _join_phase(heads: int, v_dim: int) -> Any:
    partial = 4 * partial_floats(v_dim)
    ops = vector_ops(v_dim)
    scale, add = ops.scale, ops.add

    @njit(inline="always")  # type: ignore[untyped-decorator]
    def join(task: int, thread: int, threads: int) -> None:
        units = load_int(task + _SEQUENCES) * heads
        for unit in range(divide(units * thread, threads), divide(units * (thread + 1), threads)):
            sequence = divide(unit, heads)
            h = unit - sequence * heads
            bounds = load_int(task + _FIRST_ITEMS) + 8 * sequence
            first, last = load_int(bounds), load_int(bounds + 8)
            top = _MASKED
            for item in range(first, last):
                here = load_float(load_int(task + _PARTIALS) + (item * heads + h) * partial + 4 * v_dim)
                top = here if here > top else top
            row = load_int(load_int(task + _DECODE_ROWS) + 8 * sequence)
            out = load_int(task + _OUT) + (row * heads + h) * (4 * v_dim)
            total = np.float32(0.0)
            for item in range(first, last):
                source = load_int(task + _PARTIALS) + (item * heads + h) * partial
                weight = np.exp(load_float(source + 4 * v_dim) - top)
                total += weight * load_float(source + 4 * v_dim + 4)
                if item == first:
                    scale(out, source, weight)
                else:
                    add(out, source, weight)
            scale(out, out, np.float32(1.0) / total)

    return join
