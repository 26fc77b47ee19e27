"""Idle sessions leave the device when they should, come back right, and nobody waits for them."""

from __future__ import annotations

import pytest

from kvos.policy.residency import ResidencyRules
from kvos.serving.residents import Residents
from kvos.sessions.session import CacheSession
from serving.harness import Bench, plain_greedy, some_ids


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bench_with(clock: Clock, max_blocks: int = 20, **rules: float) -> Bench:
    bench = Bench(max_blocks=max_blocks)
    chosen = ResidencyRules(**rules)  # type: ignore[arg-type] # counts and shares
    bench.core.residents = Residents(bench.manager, bench.core.sessions, chosen, None, clock)
    return bench


def opened(bench: Bench, clock: Clock, tokens: int, seed: int, name: str) -> CacheSession:
    session = bench.raw(some_ids(tokens, seed), name)
    bench.compute(session)
    clock.now += 1
    return session


def look(bench: Bench, clock: Clock, later: float) -> None:
    clock.now += later
    bench.core.idle_work()


def names_out(bench: Bench) -> set[str]:
    return {session.id for session in bench.core.sessions if session.is_swapped_out}


def test_above_the_high_watermark_the_longest_idle_leave_down_to_the_low_one(clock: Clock) -> None:
    bench = bench_with(clock)  # 20 blocks: 85 % are 17, 60 % are 12
    for i in range(4):
        opened(bench, clock, 32, i, f"s{i}")
    look(bench, clock, 60)
    assert names_out(bench) == set(), "16 blocks are not above 85 %"
    opened(bench, clock, 16, 9, "last")
    look(bench, clock, 60)
    assert names_out(bench) == {"s0", "s1"}, "18 held; without two sessions of 4 there are 10"
    assert bench.count("sessions_left") == 2


def test_who_was_used_lately_stays_unless_a_request_needs_the_room(clock: Clock) -> None:
    bench = bench_with(clock)
    old = opened(bench, clock, 80, 0, "old")
    clock.now += 25
    new = opened(bench, clock, 72, 1, "new")
    look(bench, clock, 2)
    assert names_out(bench) == set()
    late = bench.raw(some_ids(64, 2), "late")
    reply = bench.reply(late, max_tokens=4, ignore_eos=True)
    assert list(reply.tokens) == plain_greedy(some_ids(64, 2), 4)
    assert names_out(bench) == {"old"}
    assert not new.is_swapped_out
    look(bench, clock, 31)
    again = bench.reply(old, max_tokens=4, ignore_eos=True)
    assert list(again.tokens) == plain_greedy(some_ids(80, 0), 4)
    assert bench.count("sessions_returned") == 1
    assert not old.is_swapped_out


def test_beyond_the_number_of_sessions_the_least_recently_used_leave(clock: Clock) -> None:
    bench = bench_with(clock, max_blocks=100, sessions=3)
    sessions = [opened(bench, clock, 16, i, f"s{i}") for i in range(5)]
    bench.reply(sessions[0], max_tokens=2)
    look(bench, clock, 60)
    assert names_out(bench) == {"s1", "s2"}


def test_the_engine_thread_wakes_up_for_it_only_while_somebody_has_to_leave(clock: Clock) -> None:
    bench = bench_with(clock, sessions=1)
    opened(bench, clock, 16, 0, "one")
    look(bench, clock, 5)
    assert bench.core.patience_s() is None
    opened(bench, clock, 16, 1, "two")
    look(bench, clock, 5)
    assert names_out(bench) == set(), "both were used within 30 s"
    assert bench.core.patience_s() == pytest.approx(1.0)
    look(bench, clock, 30)
    assert names_out(bench) == {"one"}
    look(bench, clock, 1)
    assert bench.core.patience_s() is None


def test_what_has_left_is_found_again_without_computing_while_its_blocks_are_there(clock: Clock) -> None:
    bench = bench_with(clock, sessions=1)
    first = opened(bench, clock, 40, 0, "first")
    opened(bench, clock, 8, 1, "second")
    look(bench, clock, 60)
    assert first.is_swapped_out
    assert first.sequence.tokens().tolist() == some_ids(40, 0)
    usage = bench.reply(first, max_tokens=1).usage
    assert (usage.reused_tokens, usage.computed_tokens) == (40, 0)  # its last logits are known


def test_nobody_leaves_for_a_request_that_will_not_fit_anyway(clock: Clock) -> None:
    bench = bench_with(clock)
    busy = opened(bench, clock, 80, 0, "busy")
    opened(bench, clock, 16, 1, "idle")
    bench.generate(busy)
    late = bench.raw(some_ids(150, 2), "late")
    with pytest.raises(Exception, match="out of KV blocks"):
        bench.generate(late)
    assert names_out(bench) == set()


def test_thrash_makes_it_stop_for_a_while(clock: Clock) -> None:
    bench = bench_with(clock, sessions=1, min_stay_s=0.0, dense_stay_s=0.0)
    sessions = [opened(bench, clock, 16, i, f"s{i}") for i in range(2)]
    for turn in range(12):
        look(bench, clock, 1.5)
        bench.reply(sessions[turn % 2], max_tokens=1, ignore_eos=True)
    assert bench.count("thrash_pauses") == 1
    left = bench.count("sessions_left")
    look(bench, clock, 5)
    assert bench.count("sessions_left") == left
    look(bench, clock, 30)
    assert bench.count("sessions_left") == left + 1


def test_who_was_sent_away_by_its_caller_and_comes_back_is_no_thrash(clock: Clock) -> None:
    bench = bench_with(clock, sessions=1)
    session = opened(bench, clock, 16, 0, "sent away")
    for _ in range(12):
        bench.core.swap_out(session, session.sequence.revision)
        bench.reply(session, max_tokens=1, ignore_eos=True)
    assert bench.count("thrash_pauses") == 0
    assert bench.count("sessions_returned") == 12


def test_who_was_to_leave_but_has_changed_since_has_not_left(clock: Clock) -> None:
    bench = bench_with(clock)
    session = opened(bench, clock, 16, 0, "changed")
    bench.core.swap_out(session, session.sequence.revision - 1)
    bench.reply(session, max_tokens=1, ignore_eos=True)
    assert not session.is_swapped_out
    assert bench.count("sessions_returned") == 0
