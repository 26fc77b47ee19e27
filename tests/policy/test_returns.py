"""The estimator against a known distribution, counted life by life."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.policy.returns import ReturnEstimator, age_edges, gittins_index, hazards


def brute_force_index(hazard: list[float], widths: list[float], start: int) -> float:
    """Walk every outcome of every horizon."""
    best = 0.0
    for horizon in range(start + 1, len(hazard) + 1):
        returns = time = passed = 0.0
        alive = 1.0
        for chance, width in zip(hazard[start:horizon], widths[start:horizon], strict=True):
            returns += alive * chance
            time += alive * chance * (passed + width / 2)
            alive *= 1 - chance
            passed += width
        best = max(best, returns / (time + alive * passed))
    return best


@pytest.mark.parametrize(
    "hazard", [[0.5, 0.25, 0.0, 0.1], [0.0, 0.0, 0.9, 0.01], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]
)
def test_the_index_is_the_best_over_all_horizons(hazard: list[float]) -> None:
    widths = [1.0, 1.0, 2.0, 4.0]
    expected = [brute_force_index(hazard, widths, start) for start in range(4)]
    np.testing.assert_allclose(gittins_index(np.array([hazard]), np.array(widths))[0], expected, rtol=1e-12)


def test_what_surely_returns_leaves_nothing_to_value_behind_it() -> None:
    found = gittins_index(np.array([[0.0, 1.0, 0.5]]), np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(found, [[0.5, 1.0, 0.0]])


def test_hazards_count_those_that_reached_the_bucket() -> None:
    # 10 lives: 2 return in the first bucket, 2 are last seen there, 3 return in the second, 3 pass it
    found = hazards(np.array([[2.0, 3.0, 0.0]]), np.array([[2.0, 0.0, 3.0]]))
    np.testing.assert_allclose(found, [[2 / 9, 3 / 6, 0.0]])


def test_a_class_without_lives_has_the_chances_of_all() -> None:
    found = hazards(np.array([[1.0], [0.0]]), np.array([[2.0], [0.0]]), trust=4.0)
    np.testing.assert_allclose(found[1], [0.5])


def test_buckets_cover_every_age_without_gaps() -> None:
    edges = age_edges()
    assert edges[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (np.diff(edges) > 0).all()
    bucket = ReturnEstimator(1).bucket(np.array([0, 1, 8, 9, int(edges[-1]) * 100]))
    assert bucket.tolist() == [0, 0, 7, 7, len(edges) - 1]


def test_lives_are_counted_where_they_ended_or_are_now() -> None:
    estimator = ReturnEstimator(2, trust=0.0)
    zeros = np.zeros(4, dtype=np.int64)
    estimator.begin(zeros, 0)
    estimator.end(zeros[:2], zeros[:2], 3, returned=True)
    estimator.end(zeros[:1], zeros[:1], 6, returned=False)
    worth = estimator.index(9)
    assert estimator.returned[0, estimator.bucket(np.array([3]))[0]] == 2
    assert estimator.lost[0].sum() == 1
    assert estimator.open.sum() == 1
    # half of four return at an age of three requests: two lives a place for 2.5, two for a whole 3
    assert worth[0, 0] == pytest.approx(2 / (2 * 2.5 + 2 * 3))
    assert not worth[1].any()


def test_times_grow_beyond_what_was_reserved() -> None:
    estimator = ReturnEstimator(1)
    estimator.begin(np.zeros(3, dtype=np.int64), 5000)
    assert estimator.open[0, 5000] == 3
    assert not estimator.index(5001).any()
