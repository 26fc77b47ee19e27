"""The estimator against a known distribution, counted life by life."""

from __future__ import annotations

import numpy as np
import pytest

from kvos.policy.returns import ReturnHistory, age_edges, gittins_index, hazards


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
    bucket = ReturnHistory(1).bucket(np.array([0, 1, 8, 9, int(edges[-1]) * 100]))
    assert bucket.tolist() == [0, 0, 7, 7, len(edges) - 1]


def test_lives_are_counted_where_they_ended_or_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.policy.returns.TRUST", 0.0)
    history = ReturnHistory(2)
    zeros = np.zeros(4, dtype=np.int64)
    history.end(zeros[:2], zeros[:2] + 3, returned=True)
    history.end(zeros[:1], zeros[:1] + 6, returned=False)
    history.learn(zeros[:1], zeros[:1] + 9, now=9)
    assert history.returned[0, history.bucket(np.array([3]))[0]] == 2
    assert history.lost[0].sum() == 1
    # half of four return at an age of three requests: two lives a place for 2.5, two for a whole 3
    assert history.worth(zeros[:1], zeros[:1])[0] == pytest.approx(2 / (2 * 2.5 + 2 * 3))
    assert history.worth(zeros[:1] + 1, zeros[:1])[0] == 0


def test_nothing_is_worth_anything_before_something_was_learned() -> None:
    assert ReturnHistory(2).worth(np.array([0, 1]), np.array([0, 1000])).tolist() == [0, 0]


def test_learning_becomes_rarer_up_to_a_bound() -> None:
    history = ReturnHistory(1)
    none = np.zeros(0, dtype=np.int64)

    def pause(now: int) -> int:
        history.learn(none, none, now)
        return next(later for later in range(now, now + 1000) if history.is_due(later)) - now

    assert [pause(now) for now in (0, 63, 640, 10**6)] == [1, 1, 11, 257]


def test_old_lives_fade_when_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvos.policy.returns.LIVES_KEPT", 10)
    history = ReturnHistory(1)
    ages = np.full(8, 5)
    none = ages[:0]
    history.end(np.zeros_like(ages), ages, returned=True)
    history.learn(none, none, now=1)
    assert history.returned.sum() == 8
    history.end(np.zeros_like(ages), ages, returned=False)
    history.learn(none, none, now=2)
    assert (history.returned.sum(), history.lost.sum()) == (4, 4)
