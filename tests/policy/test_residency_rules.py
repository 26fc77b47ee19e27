"""Who leaves first, counted by hand."""

from __future__ import annotations

from kvos.policy.residency import ResidencyRules, Resident, ThrashGuard, leaving_order

RULES = ResidencyRules(min_stay_s=30, dense_stay_s=120)


def test_the_longest_idle_leaves_first_and_nobody_before_its_time() -> None:
    residents = [Resident(31), Resident(29), Resident(500), Resident(30)]
    assert leaving_order(residents, RULES, pressed=False) == [2, 0, 3]


def test_a_request_that_needs_room_takes_the_others_too_but_last() -> None:
    residents = [Resident(5), Resident(29), Resident(500), Resident(30)]
    assert leaving_order(residents, RULES, pressed=True) == [2, 3, 1, 0]


def test_a_dense_dialogue_stays_longer() -> None:
    dense = Resident(60, uses=(0.0, 50.0, 120.0))
    slow = Resident(60, uses=(0.0, 50.0, 121.0))
    few = Resident(60, uses=(100.0, 120.0))
    assert (dense.is_dense, slow.is_dense, few.is_dense) == (True, False, False)
    assert leaving_order([dense, slow, few], RULES, pressed=False) == [1, 2]
    assert leaving_order([dense, slow, few], RULES, pressed=True) == [1, 2, 0]
    assert leaving_order([Resident(120, dense.uses)], RULES, pressed=False) == [0]


def test_four_quick_returns_within_twenty_seconds_are_thrash() -> None:
    guard = ThrashGuard()
    assert [guard.returned(3, now) for now in (0, 7, 21, 22)] == [False] * 4  # the first is out of the window by then
    assert guard.returned(3, 23) is True
    assert guard.is_pausing(52.9)
    assert not guard.is_pausing(53)
    assert guard.times == 1


def test_late_returns_are_no_thrash() -> None:
    guard = ThrashGuard()
    assert not any(guard.returned(10.1, now) for now in range(100))


def test_a_pause_is_twice_as_long_if_thrash_goes_on_and_short_again_after_rest() -> None:
    guard = ThrashGuard(pause_s=30, most_s=50)

    def thrash(now: float) -> float:
        """How long the pause is that four quick returns bring."""
        for _ in range(4):
            guard.returned(1, now)
        return next(s for s in range(1000) if not guard.is_pausing(now + s))

    assert thrash(100) == 30
    assert thrash(140) == 50  # twice 30, but at most 50
    assert thrash(200) == 50
    assert thrash(2000) == 30
