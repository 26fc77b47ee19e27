"""The yardstick: oldest first."""

from __future__ import annotations

import numpy as np

from kvos.policy import LRU, Candidates
from kvos.policy.base import Floats, Ints


def candidates(last_used: list[int], hits: list[int]) -> Candidates:
    def worth() -> Floats:
        raise AssertionError("LRU learns nothing")

    return Candidates(ints(last_used), ints([0, 0]), ints([5, 0]), ints(hits), worth)


def ints(values: list[int]) -> Ints:
    return np.array(values)


def test_what_was_used_longest_ago_leaves_first_however_often_it_was_hit() -> None:
    later, sooner = LRU().sort_keys(candidates(last_used=[4, 3], hits=[0, 9]))
    assert sooner < later


def test_equal_ages_are_equal() -> None:
    one, other = LRU().sort_keys(candidates(last_used=[7, 7], hits=[0, 9]))
    assert one == other
