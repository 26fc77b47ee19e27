"""First in, first out, in batches, around the end of the ring."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvos.storage.free_queue import FreeQueue


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_what_came_first_leaves_first() -> None:
    queue = FreeQueue()
    queue.push(ids(5, 3))
    queue.push(ids(9))
    assert queue.peek(2).tolist() == [5, 3]


def test_peek_takes_nothing_out() -> None:
    queue = FreeQueue()
    queue.push(ids(1, 2))
    queue.peek(2)
    assert queue.to_array().tolist() == [1, 2]


def test_drop_takes_the_oldest_out() -> None:
    queue = FreeQueue()
    queue.push(ids(1, 2, 3))
    queue.drop(2)
    assert (len(queue), queue.to_array().tolist()) == (1, [3])


def test_order_survives_growth_of_a_ring_that_has_wrapped() -> None:
    queue = FreeQueue()
    queue.push(np.arange(16))
    queue.drop(10)
    queue.push(np.arange(100, 108))  # wraps: 6 + 8 of 16
    queue.push(np.arange(200, 300))  # grows
    assert queue.to_array().tolist() == [*range(10, 16), *range(100, 108), *range(200, 300)]


def test_what_is_returned_does_not_change_later() -> None:
    queue = FreeQueue()
    queue.push(ids(1, 2))
    taken = queue.peek(2)
    queue.drop(2)
    queue.push(np.arange(50, 90))
    assert taken.tolist() == [1, 2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_it_behaves_like_a_deque(steps: list[tuple[bool, int]]) -> None:
    queue, model, next_id = FreeQueue(), deque[int](), 0
    for push, n in steps:
        if push:
            queue.push(np.arange(next_id, next_id + n))
            model.extend(range(next_id, next_id + n))
            next_id += n
        else:
            n = min(n, len(model))
            assert queue.peek(n).tolist() == [model.popleft() for _ in range(n)]
            queue.drop(n)
        assert queue.to_array().tolist() == list(model)
        assert len(queue) == len(model)
