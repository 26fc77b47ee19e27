"""Blocks that come back late, damaged, in part or not at all: the reply is right, nobody waits beyond the deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvos.residency import loads
from kvos.serving import FinishReason, WhyComputed
from kvos.testing import TierFault
from residency.tiered_bench import BLOCK, DEADLINE_S, PIECE, SOON, TieredBench, assert_right, memory
from serving.harness import some_ids

BLOCKS = 8
IDS = some_ids(BLOCKS * BLOCK + 3)
PIECES = BLOCKS // PIECE
PIECE_TOKENS = PIECE * BLOCK
HIT, HANG = TierFault.NONE, TierFault.HANG


@pytest.fixture
def open_bench() -> Iterator[Callable[..., TieredBench]]:
    opened: list[TieredBench] = []

    def open_one(**settings: Any) -> TieredBench:
        opened.append(TieredBench(**settings))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.close()


@pytest.fixture
def bench(open_bench: Callable[..., TieredBench]) -> TieredBench:
    """``IDS`` are in the tier and not on the device."""
    made = open_bench()
    made.stored(IDS)
    return made


def ends_late(bench: TieredBench) -> None:
    """Let the deadline of what waits pass; not a step is taken before."""
    bench.clock.advance(DEADLINE_S - 0.001)
    steps = bench.count("steps")
    bench.step(wait=False)
    assert bench.count("steps") == steps, "it did not wait as long as it may"
    bench.clock.advance(0.001)
    assert bench.core.patience_s() == 0
    bench.run()


def test_what_the_tier_has_comes_back_in_pieces_and_the_rest_is_computed(bench: TieredBench) -> None:
    session, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    usage = events.finished.usage
    assert (usage.restored_tokens, usage.reused_tokens, usage.computed_tokens) == (64, 64, 3)
    assert usage.why_computed is WhyComputed.NEW_TOKENS
    assert bench.tier.calls["load"] == PIECES
    bench.check(session)


def test_a_prompt_that_comes_back_whole_computes_its_last_token_for_the_logits_only(bench: TieredBench) -> None:
    _, events = bench.ask(IDS[:64])
    bench.run()
    assert_right(events, IDS[:64])
    usage = events.finished.usage
    assert (usage.restored_tokens, usage.computed_tokens, usage.why_computed) == (64, 0, WhyComputed.NOTHING)


# -- late ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivered", range(PIECES))
def test_what_has_not_come_by_the_deadline_is_computed(bench: TieredBench, delivered: int) -> None:
    bench.tier.spoil("load", *[HIT] * delivered, HANG)
    session, events = bench.ask(IDS)
    bench.wait_for(bench.tier, delivered + 1)
    ends_late(bench)
    assert_right(events, IDS)
    usage = events.finished.usage
    assert usage.restored_tokens == delivered * PIECE_TOKENS
    assert usage.computed_tokens == len(IDS) - usage.restored_tokens
    assert usage.why_computed is WhyComputed.TIER_LATE
    assert bench.count("restores_late") == 1
    bench.tier.release()
    bench.residency._levels[0].mover.close(20)
    bench.obey()
    assert bench.tier.calls["load"] == delivered + 1, "loads behind the late one were called off"
    bench.check(session)


def test_what_comes_late_does_not_land_in_blocks_that_others_have_got(open_bench: Callable[..., TieredBench]) -> None:
    bench = open_bench(max_blocks=12)
    bench.stored(IDS)
    bench.tier.spoil("load", HANG)
    session, _ = bench.ask(IDS)
    bench.wait_for(bench.tier, 1)
    bench.core.forget(session)
    other = some_ids(80, seed=5)
    heir, events = bench.ask(other)
    bench.run()
    bench.tier.release()
    bench.wait_for(bench.tier, 1)
    bench.step(wait=False)
    assert_right(events, other)
    bench.check(heir)


def test_while_a_call_hangs_nobody_else_waits_for_its_tier(bench: TieredBench) -> None:
    bench.tier.spoil("load", HANG)
    _, first = bench.ask(IDS)
    bench.wait_for(bench.tier, 1)
    ends_late(bench)
    assert first.finished.usage.why_computed is WhyComputed.TIER_LATE
    for session in tuple(bench.core.sessions):
        bench.core.forget(session)
    bench.empty()
    _, second = bench.ask(IDS)
    assert bench.core.patience_s() == 0
    bench.run()
    assert_right(second, IDS)
    assert second.finished.usage.why_computed is WhyComputed.TIER_OFF
    assert bench.residency.report()[0].switched_off


def test_a_tier_works_again_by_itself_when_its_call_has_returned(bench: TieredBench) -> None:
    bench.tier.spoil("load", HANG)
    session, _ = bench.ask(IDS)
    bench.wait_for(bench.tier, 1)
    ends_late(bench)
    bench.tier.release()
    bench.obey(wait=True)
    bench.core.forget(session)
    bench.empty()
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64
    assert not bench.residency.report()[0].switched_off


def test_others_go_on_while_one_waits(bench: TieredBench) -> None:
    other = some_ids(20, seed=7)
    _, decoding = bench.ask(other, 30)
    bench.step()
    bench.tier.spoil("load", HANG)
    _, waiting = bench.ask(IDS)
    bench.wait_for(bench.tier, 1)
    for _ in range(40):
        bench.step(wait=False)
    assert_right(decoding, other, 30)
    assert not waiting
    ends_late(bench)
    assert_right(waiting, IDS)


# -- failed, damaged, missing ------------------------------------------------------------------------------------------

FAULTS = {
    TierFault.FAIL: 0,
    TierFault.DAMAGED: 0,
    TierFault.VANISH: 0,
    TierFault.LAST_ROW: (PIECE - 1) * BLOCK,
    TierFault.RAISE: 0,
    TierFault.NONSENSE: 0,
}
"""How many tokens of such a piece are good."""


@pytest.mark.parametrize("before", [0, 1, PIECES - 1])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_cannot_be_read_is_computed_from_there_on(bench: TieredBench, fault: TierFault, before: int) -> None:
    bench.tier.spoil("load", *[HIT] * before, fault)
    session, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    usage = events.finished.usage
    assert usage.restored_tokens == before * PIECE_TOKENS + FAULTS[fault]
    assert usage.why_computed is WhyComputed.TIER_FAILED
    assert bench.count("restores_failed") == 1
    bench.check(session)


@pytest.mark.parametrize("fault", [TierFault.RAISE, TierFault.NONSENSE], ids=lambda fault: fault.name)
def test_a_tier_that_cannot_say_what_it_has_has_nothing(bench: TieredBench, fault: TierFault) -> None:
    bench.tier.spoil("contains", fault)
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 0


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, ValueError])
def test_what_finds_no_memory_on_the_device_is_computed(
    bench: TieredBench, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def full(*_: object) -> None:
        raise error("no memory to scatter blocks")

    monkeypatch.setattr(loads, "import_blocks", full)
    session, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.why_computed is WhyComputed.TIER_FAILED
    bench.check(session)


def test_a_bug_in_restoring_refuses_no_request(bench: TieredBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.residency._loads, "_find", lambda keys: 1 / 0)
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.why_computed is WhyComputed.TIER_FAILED


# -- cancelled at every step -------------------------------------------------------------------------------------------

ENDS: dict[str, Callable[[TieredBench, Any, Any], None]] = {
    "the request is cancelled": lambda bench, session, events: bench.core.cancel(events.request),
    "the session is closed": lambda bench, session, events: bench.core.forget(session),
    "the engine stops": lambda bench, session, events: bench.core.fail_all(RuntimeError("stopped")),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("delivered", range(PIECES + 1))
def test_an_end_at_any_moment_leaves_nothing_behind(bench: TieredBench, delivered: int, end: str) -> None:
    bench.tier.spoil("load", *[HIT] * delivered, HANG)
    session, events = bench.ask(IDS)
    if delivered < PIECES:
        bench.wait_for(bench.tier, delivered + 1)
    for _ in range(delivered):
        if session.sequence.num_computed < delivered * PIECE_TOKENS:
            bench.obey(wait=True)
            bench.core._move_blocks()
    assert session.sequence.num_computed == delivered * PIECE_TOKENS
    ENDS[end](bench, session, events)
    assert events.is_over
    bench.core.check_invariants()
    if end == "the request is cancelled":
        usage = events.finished.usage
        assert (events.finished.reason, usage.restored_tokens) == (FinishReason.CANCELLED, delivered * PIECE_TOKENS)
    assert bench.core.num_running == 0
    assert bench.manager.allocator.counts().reserved == 0
    bench.tier.release()
    again, after = bench.ask(IDS)
    bench.run()
    assert_right(after, IDS)
    assert after.finished.usage.computed_tokens == 3
    bench.check(again)
    most = PIECES if delivered == PIECES else delivered + 1 + PIECES - delivered
    assert bench.tier.calls["load"] <= most, "what nobody wanted any more was loaded"


def test_a_cancelled_trial_leaves_its_turn_to_the_next(bench: TieredBench) -> None:
    breaker = bench.residency._levels[0].loads
    for _ in range(3):
        breaker.failed()
    bench.clock.advance(5)
    bench.tier.spoil("store", HANG)
    blocker = bench.raw(some_ids(16, seed=3))
    bench.compute(blocker)
    bench.residency.keep(blocker.sequence.published())
    bench.residency.work()
    assert bench.tier.hanging.wait(SOON)
    session, _ = bench.ask(IDS)
    assert breaker.is_open, "a trial goes on"
    bench.core.forget(session)
    assert not breaker.is_open
    bench.tier.release()
    _, events = bench.ask(IDS)
    bench.run()
    assert events.finished.usage.restored_tokens == 64


# -- several at once ---------------------------------------------------------------------------------------------------


def test_two_requests_for_the_same_blocks_end_up_on_the_same_ones(bench: TieredBench) -> None:
    one, first = bench.ask(IDS)
    two, second = bench.ask(IDS)
    bench.run()
    for events in (first, second):
        assert_right(events, IDS)
        usage = events.finished.usage
        assert usage.restored_tokens + usage.shared_tokens == 64
        assert usage.computed_tokens == 3
    assert bench.table(one)[:BLOCKS] == bench.table(two)[:BLOCKS]
    bench.check(one)
    bench.check(two)


def test_what_another_request_has_computed_meanwhile_is_not_waited_for(bench: TieredBench) -> None:
    bench.tier.spoil("load", HANG)
    _, waiting = bench.ask(IDS)
    bench.wait_for(bench.tier, 1)
    _, quick = bench.ask(IDS[:40] + some_ids(10, seed=8))
    bench.core.moves.drop(bench.core._requests[quick.request])
    bench.step(wait=False)
    bench.step(wait=False)
    assert waiting == []
    bench.tier.release()
    bench.run()
    assert_right(waiting, IDS)
    usage = waiting.finished.usage
    assert usage.shared_tokens == 40
    assert usage.shared_tokens + usage.restored_tokens == 64


def test_blocks_behind_those_that_another_session_holds_come_back(bench: TieredBench) -> None:
    holder = bench.raw(IDS[:30])
    bench.reply(holder, max_tokens=1, ignore_eos=True)
    assert holder.sequence.num_computed == 30
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert (events.finished.usage.shared_tokens, events.finished.usage.restored_tokens) == (24, 40)


def test_each_block_comes_from_the_fastest_tier_that_has_it(open_bench: Callable[..., TieredBench]) -> None:
    bench = open_bench(tiers=(memory, memory))
    bench.stored(IDS)
    upper = bench.tiers[0]
    entries = list(upper.tier._blocks)  # type: ignore[attr-defined] # in the order of the sequence
    upper.drop(entries[3:5])
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64
    assert (upper.calls["load"], bench.tier.calls["load"]) == (2 + 2, 1)


def test_a_hole_in_all_tiers_ends_what_is_found(bench: TieredBench) -> None:
    keys = list(bench.tier.tier._blocks)  # type: ignore[attr-defined] # in the order of the sequence
    bench.tier.drop(keys[5:6])
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 40


def test_nothing_is_restored_behind_a_partial_block(bench: TieredBench) -> None:
    session = bench.raw(IDS[:20])
    bench.compute(session)
    bench.empty()
    loads_before = bench.tier.calls["load"]
    bench.handle(session).append_tokens(IDS[20:])
    events = bench.generate(session, max_tokens=3, ignore_eos=True)
    bench.run()
    assert_right(events, IDS)
    assert bench.tier.calls["load"] == loads_before


# -- worth it, or not --------------------------------------------------------------------------------------------------


def test_what_is_computed_faster_is_not_waited_for_until_the_tier_is_measured_as_faster(bench: TieredBench) -> None:
    level = bench.residency._levels[0]
    level.load_speed.add(1.0, 1.0)
    for calls in (0, 1):  # the second time a measurement is due, for which nobody waits
        session = bench.raw(IDS)
        bench.residency.prefill_speed.per_second = 1e6
        events = bench.generate(session, max_tokens=3, ignore_eos=True)
        assert bench.core.patience_s() == 0
        bench.run()
        assert_right(events, IDS)
        assert events.finished.usage.why_computed is WhyComputed.COMPUTING_IS_FASTER
        bench.wait_for(bench.tier, calls)
        assert bench.tier.calls["load"] == calls
        bench.core.forget(session)
        bench.empty()
        bench.clock.advance(loads.MEASURE_AGAIN_S)
    assert bench.count("restores_not_worth_it") == 2


def test_speed_is_learnt_from_what_came_and_not_from_what_was_missing(bench: TieredBench) -> None:
    level = bench.residency._levels[0]
    bench.tier.sleep = bench.clock.advance
    bench.tier.bytes_per_second = 64_000.0
    bench.tier.always("load", TierFault.VANISH)
    _, events = bench.ask(IDS)
    bench.run()
    bench.tier.always("load", TierFault.NONE)
    assert level.load_speed.per_second is None
    assert events.finished.usage.why_computed is WhyComputed.TIER_FAILED
    for session in tuple(bench.core.sessions):
        bench.core.forget(session)
    bench.stored(IDS)
    _, events = bench.ask(IDS)
    bench.run()
    assert level.load_speed.per_second == pytest.approx(64_000.0)


# -- breakers ----------------------------------------------------------------------------------------------------------


def fails(bench: TieredBench, times: int) -> None:
    """So many requests, each meeting a load that fails."""
    bench.tier.always("load", TierFault.FAIL)
    for _ in range(times):
        session, events = bench.ask(IDS)
        bench.run()
        assert_right(events, IDS)
        assert events.finished.usage.why_computed is WhyComputed.TIER_FAILED
        bench.core.forget(session)
        bench.empty()
    bench.tier.always("load", TierFault.NONE)


def test_a_tier_that_keeps_failing_is_left_alone_and_works_again_by_itself(bench: TieredBench) -> None:
    fails(bench, 3)
    calls = bench.tier.calls["load"]
    session, events = bench.ask(IDS)
    assert bench.core.patience_s() == 0
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.why_computed is WhyComputed.TIER_OFF
    assert bench.tier.calls["load"] == calls
    bench.core.forget(session)
    bench.empty()
    bench.clock.advance(5.0)
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64


def test_requests_for_what_the_tier_has_not_take_no_turn_of_a_trial(bench: TieredBench) -> None:
    fails(bench, 3)
    bench.clock.advance(5.0)
    stranger, events = bench.ask(some_ids(40, seed=9))
    bench.run()
    _, events = bench.ask(IDS)
    bench.run()
    assert events.finished.usage.restored_tokens == 64
    bench.check(stranger)


def test_stores_that_fail_do_not_keep_anybody_from_loading(bench: TieredBench) -> None:
    bench.tier.always("store", TierFault.FAIL)
    for seed in range(10, 14):
        session = bench.raw(some_ids(16, seed))
        bench.compute(session)
        bench.keep(session)
        bench.core.forget(session)
    assert bench.count("stores_failed") == 3
    assert bench.count("stores_skipped") == 2
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64
