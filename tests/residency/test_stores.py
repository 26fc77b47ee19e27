"""Blocks on their way down through tiers that are full, fail or hang: whoever waits is told, and told the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvos.residency import StoreSummary, stores
from kvos.sessions import CacheSession
from kvos.testing import TierFault
from residency.tiered_bench import BLOCK, PIECE, SOON, TieredBench, assert_right, memory
from serving.harness import some_ids

IDS = some_ids(8 * BLOCK + 3)
PIECES = 8 // PIECE


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
    return open_bench()


def computed(bench: TieredBench, ids: list[int] = IDS) -> CacheSession:
    session = bench.raw(ids)
    bench.compute(session)
    return session


def blocks_in(bench: TieredBench) -> int:
    return bench.tier.usage().blocks


def test_what_is_there_already_is_not_gathered_again(bench: TieredBench) -> None:
    session = computed(bench)
    assert bench.keep(session) == StoreSummary(8, 8)
    calls = bench.tier.calls["store"]
    assert bench.keep(session) == StoreSummary(8, 8)
    assert bench.tier.calls["store"] == calls == PIECES


def test_a_slow_tier_gets_pieces_that_a_load_need_not_wait_long_for(
    open_bench: Callable[..., TieredBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "LEAST_BLOCKS", 1)
    bench = open_bench(piece=8, max_blocks=64)
    size = bench.manager.pool.layout.bytes_per_block
    bench.tier.sleep = bench.clock.advance
    bench.tier.bytes_per_second = 20 * size  # two blocks in the time that a store should take
    bench.keep(computed(bench))
    assert bench.tier.calls["store"] == 1, "nothing is known of it yet"
    bench.keep(computed(bench, some_ids(8 * BLOCK + 3, seed=5)))
    assert bench.tier.calls["store"] == 1 + 4


def test_blocks_that_were_reclaimed_before_they_were_gathered_are_not_stored(bench: TieredBench) -> None:
    session = computed(bench)
    future = bench.residency.keep(session.sequence.published())
    bench.core.forget(session)
    bench.empty()
    other = computed(bench, some_ids(12 * BLOCK, seed=1))  # in the blocks that the session had
    bench.settle()
    assert future.result(0) == StoreSummary(8, 0)
    assert blocks_in(bench) == 0
    bench.check(other)


def test_blocks_that_are_reclaimed_halfway_are_stored_as_far_as_they_were_gathered(bench: TieredBench) -> None:
    session = computed(bench)
    future = bench.residency.keep(session.sequence.published())
    assert bench.residency.work()
    bench.core.forget(session)
    bench.empty()
    computed(bench, some_ids(12 * BLOCK, seed=1))
    bench.settle()
    assert future.result(0) == StoreSummary(8, PIECE)
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == PIECE * BLOCK


@pytest.mark.parametrize(
    ("fault", "safe"),
    [
        (TierFault.FAIL, 0),
        (TierFault.RAISE, 0),
        (TierFault.FULL, 0),
        (TierFault.LAST_ROW, 1),
        (TierFault.NONSENSE, 0),
    ],
)
def test_what_could_not_be_stored_is_not_called_safe(bench: TieredBench, fault: TierFault, safe: int) -> None:
    bench.tier.spoil("store", fault)
    session = computed(bench)
    assert bench.keep(session) == StoreSummary(8, 8 - PIECE + safe)
    assert bench.count("stores_failed") == int(fault is not TierFault.FULL)
    assert bench.keep(session) == StoreSummary(8, 8), "the next time it works"
    bench.core.forget(session)
    bench.empty()
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64


def test_a_tier_that_keeps_failing_is_spared_and_gets_blocks_again_by_itself(bench: TieredBench) -> None:
    bench.tier.always("store", TierFault.FAIL)
    session = computed(bench)
    assert bench.keep(session).safe == 0
    calls = bench.tier.calls["store"]
    assert calls >= 3
    assert bench.keep(session).safe == 0
    assert bench.tier.calls["store"] == calls
    skipped = bench.count("stores_skipped")
    assert skipped >= 8
    bench.tier.heal()
    assert bench.keep(session).safe == 0, "the pause is not over"
    bench.clock.advance(5.0)
    bench.keep(session)  # the first piece is a trial, those behind it may still be skipped
    bench.settle()
    assert bench.keep(session) == StoreSummary(8, 8)


def test_no_memory_to_gather_is_a_store_less_and_nothing_else(
    bench: TieredBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no memory to gather blocks")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "export_blocks", full)
        session = computed(bench)
        assert bench.keep(session) == StoreSummary(8, 0)
    assert bench.count("stores_failed") == PIECES
    assert bench.keep(session) == StoreSummary(8, 8)


# -- hung tiers --------------------------------------------------------------------------------------------------------


def gather(bench: TieredBench) -> None:
    while bench.residency.work():
        pass


def test_a_hung_store_is_given_up_and_whoever_waits_is_told(bench: TieredBench) -> None:
    bench.tier.spoil("store", TierFault.HANG)
    session = computed(bench)
    future = bench.residency.keep(session.sequence.published())
    gather(bench)
    assert bench.tier.hanging.wait(SOON)
    assert not future.done()
    bench.clock.advance(stores.STORE_PATIENCE_S - 0.001)
    gather(bench)
    assert not future.done()
    assert 0 < (bench.core.moves.patience_s([]) or 0) < 0.01, "the engine thread looks again by itself"
    bench.clock.advance(0.001)
    assert bench.core.moves.patience_s([]) == 0
    gather(bench)
    assert future.result(0) == StoreSummary(8, 0)
    assert bench.core.moves.patience_s([]) is None
    assert len(bench.residency._levels[0].storing) == 1, "only the call that hangs keeps its buffer"
    bench.tier.release()
    bench.obey(wait=True)
    assert bench.residency._levels[0].storing == []
    assert blocks_in(bench) == PIECE
    assert bench.keep(session) == StoreSummary(8, 8), "it works again by itself"


def test_a_tier_that_hangs_keeps_no_blocks_from_the_others(open_bench: Callable[..., TieredBench]) -> None:
    bench = open_bench(tiers=(memory, memory))
    bench.tier.spoil("store", TierFault.HANG)
    session = computed(bench)
    future = bench.residency.keep(session.sequence.published())
    gather(bench)
    assert bench.tier.hanging.wait(SOON)
    bench.clock.advance(stores.STORE_PATIENCE_S)
    while not future.done():
        gather(bench)
        bench.obey(wait=not future.done())
    assert future.result(0) == StoreSummary(8, 0)
    while bench.tiers[0].usage().blocks < 8:
        gather(bench)
        bench.obey(wait=True)
    bench.core.forget(session)
    bench.empty()
    _, events = bench.ask(IDS)
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 64


def test_nothing_waits_for_stores_after_the_end(bench: TieredBench) -> None:
    bench.tier.spoil("store", TierFault.HANG)
    future = bench.residency.keep(computed(bench).sequence.published())
    gather(bench)
    assert bench.tier.hanging.wait(SOON)
    bench.residency._stores.close()
    assert future.cancelled()
    assert bench.residency.unfinished_stores == 0


# -- half out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gathered", range(3))
def test_a_session_that_is_wanted_while_it_is_half_out_goes_on_where_it_is(bench: TieredBench, gathered: int) -> None:
    session = computed(bench)
    revision = session.sequence.revision
    bench.tier.spoil("store", *[TierFault.NONE] * max(0, gathered - 1), TierFault.HANG)
    storing = bench.core.moves.hibernate(session)
    assert storing is not None
    for _ in range(gathered):
        bench.residency.work()
    events = bench.generate(session, max_tokens=3, ignore_eos=True)
    bench.step(wait=False)
    bench.tier.heal()
    bench.run()
    assert_right(events, IDS)
    assert events.finished.usage.restored_tokens == 0, "it had not left yet"
    bench.settle()
    assert storing.result(0).safe == 8
    bench.core.swap_out(session, revision)
    assert session.sequence.num_computed > 0, "it has new tokens since, and stays"
    bench.check(session)


def test_a_session_that_has_left_while_its_last_blocks_were_still_on_their_way_is_right(bench: TieredBench) -> None:
    session = computed(bench)
    bench.tier.spoil("store", TierFault.NONE, TierFault.NONE, TierFault.HANG)
    storing = bench.core.moves.hibernate(session)
    assert storing is not None
    for _ in range(3):
        while not bench.residency.work():
            bench.obey(wait=True)
    assert bench.tier.hanging.wait(SOON)
    bench.core.swap_out(session, session.sequence.revision)
    bench.empty()
    bench.clock.advance(1.0)
    bench.residency.prefill_speed.per_second = None
    events = bench.generate(session, max_tokens=3, ignore_eos=True)
    bench.clock.advance(5.0)
    bench.run()
    assert_right(events, IDS)
    bench.tier.heal()
    bench.settle()
    assert storing.result(0).safe >= 3 * PIECE
    bench.check(session)
