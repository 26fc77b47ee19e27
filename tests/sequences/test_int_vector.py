"""A list that reads like an array."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.sequences.int_vector import IntVector


def test_it_grows_past_its_first_allocation_and_keeps_its_values() -> None:
    vector = IntVector(np.int64)
    for i in range(100):
        vector.extend(np.array([i, -i]))
    assert vector.view().tolist() == [value for i in range(100) for value in (i, -i)]


def test_truncate_only_shortens() -> None:
    vector = IntVector(np.int32, [1, 2, 3])
    vector.truncate(5)
    assert len(vector) == 3
    vector.truncate(1)
    assert vector.view().tolist() == [1]


def test_what_was_truncated_is_gone_for_good() -> None:
    vector = IntVector(np.int32, [1, 2, 3])
    vector.truncate(1)
    vector.extend(np.array([9], np.int32))
    assert vector.view().tolist() == [1, 9]


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_an_index_outside_is_an_error_and_not_a_wrap(index: int) -> None:
    vector = IntVector(np.int32, [1, 2, 3])
    vector.truncate(2)
    with pytest.raises(IndexError):
        vector[index]
    with pytest.raises(IndexError):
        vector[index] = 5


def test_a_view_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        IntVector(np.int32, [1, 2]).view()[0] = 5


def test_a_view_ends_at_the_length_however_far_it_was_asked_for() -> None:
    vector = IntVector(np.int32, [1, 2, 3, 4])
    vector.truncate(3)
    assert vector.view(1, 100).tolist() == [2, 3]
    assert vector.view(3).tolist() == []


def test_it_can_be_extended_by_its_own_view() -> None:
    vector = IntVector(np.int32, [1, 2])
    vector.extend(vector.view())
    assert vector.view().tolist() == [1, 2, 1, 2]
