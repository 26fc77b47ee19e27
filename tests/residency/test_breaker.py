"""A tier that keeps failing is left alone, and tried again after pauses that double."""

from __future__ import annotations

import pytest

from kvos.residency import CircuitBreaker
from kvos.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(clock, failures=3, pause_s=5.0, most_s=18.0)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_it_opens_after_so_many_failures_in_a_row(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open
    assert breaker.times_opened == 1


def test_a_success_in_between_begins_the_row_anew(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_open


def test_after_the_pause_one_trial_goes_through_and_the_others_wait_for_its_outcome(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    fail(breaker, 3)
    clock.advance(4.9)
    assert breaker.is_open
    clock.advance(0.1)
    assert not breaker.is_open
    assert breaker.begin_trial()
    assert breaker.is_open
    assert not breaker.begin_trial()
    breaker.succeeded()
    assert not breaker.is_open
    assert not breaker.begin_trial(), "a closed breaker has no trials"


def test_asking_takes_nobodys_turn(breaker: CircuitBreaker, clock: FakeClock) -> None:
    fail(breaker, 3)
    clock.advance(5.0)
    assert [breaker.is_open for _ in range(10)] == [False] * 10
    assert breaker.begin_trial()


def test_pauses_double_up_to_the_longest_and_a_success_makes_the_next_one_short(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    fail(breaker, 3)
    for pause in (5.0, 10.0, 18.0, 18.0):
        clock.advance(pause - 0.1)
        assert breaker.is_open
        clock.advance(0.1)
        assert breaker.begin_trial()
        breaker.failed()
    clock.advance(18.0)
    assert breaker.begin_trial()
    breaker.succeeded()
    fail(breaker, 3)
    clock.advance(5.0)
    assert not breaker.is_open


def test_failures_that_began_before_it_opened_change_nothing(breaker: CircuitBreaker, clock: FakeClock) -> None:
    fail(breaker, 10)  # ten requests waited for the same hung disk
    clock.advance(5.0)
    assert not breaker.is_open
    assert breaker.times_opened == 1


def test_a_trial_that_never_says_how_it_went_counts_as_none_after_another_pause(
    breaker: CircuitBreaker, clock: FakeClock
) -> None:
    fail(breaker, 3)
    clock.advance(5.0)
    assert breaker.begin_trial()
    clock.advance(4.9)
    assert breaker.is_open
    clock.advance(0.1)
    assert breaker.begin_trial()


def test_a_trial_that_was_called_off_leaves_the_turn_to_the_next(breaker: CircuitBreaker, clock: FakeClock) -> None:
    fail(breaker, 3)
    breaker.not_tried()
    assert breaker.is_open, "only a trial can be called off"
    clock.advance(5.0)
    assert breaker.begin_trial()
    breaker.not_tried()
    assert not breaker.is_open
    assert breaker.begin_trial()
