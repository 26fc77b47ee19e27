"""One thread per tier: the most urgent first, what waits can be cancelled, and a call that hangs holds up nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from kvos.residency import Mover, Priority, TransferState
from kvos.testing import FakeClock

SOON = 10.0
"""Seconds for another thread to get there; a test waits for them only when it fails."""


class Gate:
    """A call that doesn't return until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        self._open.wait()
        return "through"

    def let_go(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.let_go()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mover(gate: Gate, clock: FakeClock) -> Iterator[Mover]:
    made = Mover("mover-under-test", clock)
    yield made
    gate.let_go()
    assert made.close(SOON)


def nothing() -> None:
    pass


def finish(mover: Mover) -> None:
    """Wait until everything that was submitted so far is over."""
    over = threading.Event()
    mover.submit(nothing, over.set, Priority.BACKGROUND)
    assert over.wait(SOON)


def test_the_most_urgent_goes_first_and_equals_in_their_order(mover: Mover, gate: Gate) -> None:
    mover.submit(gate, nothing, Priority.BACKGROUND)
    assert gate.entered.wait(SOON)
    order: list[str] = []
    for priority in (Priority.BACKGROUND, Priority.HIBERNATE, Priority.REQUEST):
        for number in range(2):
            mover.submit(lambda name=f"{priority.name} {number}": order.append(name), nothing, priority)
    gate.let_go()
    finish(mover)
    assert order == [f"{name} {n}" for name in ("REQUEST", "HIBERNATE", "BACKGROUND") for n in range(2)]


def test_what_waits_can_be_cancelled_and_never_begins(mover: Mover, gate: Gate) -> None:
    mover.submit(gate, nothing, Priority.REQUEST)
    assert gate.entered.wait(SOON)
    calls: list[str] = []
    cancelled = mover.submit(lambda: calls.append("made"), lambda: calls.append("told"), Priority.REQUEST)
    assert cancelled.cancel()
    assert cancelled.cancel(), "idempotent"
    gate.let_go()
    finish(mover)
    assert calls == []
    assert cancelled.state is TransferState.CANCELLED


def test_what_runs_goes_on_when_it_is_cancelled(mover: Mover, gate: Gate) -> None:
    told = threading.Event()
    transfer = mover.submit(gate, told.set, Priority.REQUEST)
    assert gate.entered.wait(SOON)
    assert not transfer.cancel()
    assert transfer.state is TransferState.RUNNING
    gate.let_go()
    assert told.wait(SOON)
    assert (transfer.state, transfer.result) == (TransferState.DONE, "through")
    assert not transfer.cancel(), "too late"


def test_how_long_a_call_takes_is_known_while_it_runs_and_afterwards(
    mover: Mover, gate: Gate, clock: FakeClock
) -> None:
    assert mover.running_s == 0
    transfer = mover.submit(gate, nothing, Priority.REQUEST)
    assert gate.entered.wait(SOON)
    clock.advance(7.0)
    assert mover.running_s == 7.0
    gate.let_go()
    finish(mover)
    assert transfer.seconds == 7.0


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit])
def test_a_call_that_raises_is_told_like_any_other_and_the_next_one_is_made(
    mover: Mover, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise error("a bug in a tier")

    told = threading.Event()
    with caplog.at_level(logging.ERROR, "kvos.residency.mover"):
        transfer = mover.submit(broken, told.set, Priority.REQUEST)
        assert told.wait(SOON)
    assert (transfer.state, transfer.result) == (TransferState.DONE, None)
    assert "a bug in a tier" in caplog.text
    assert mover.submit(lambda: 5, nothing, Priority.REQUEST).state is not TransferState.CANCELLED
    finish(mover)


def test_a_listener_that_raises_stops_nobody(mover: Mover, caplog: pytest.LogCaptureFixture) -> None:
    def deaf() -> None:
        raise RuntimeError("nobody listens")

    with caplog.at_level(logging.ERROR, "kvos.residency.mover"):
        mover.submit(nothing, deaf, Priority.REQUEST)
        finish(mover)
    assert "nobody listens" in caplog.text


def closing_mover(at_end: Callable[[], None] = nothing) -> Mover:
    return Mover("closing-mover", FakeClock(), at_end)


def test_closing_finishes_what_is_queued_then_ends_the_tier_and_takes_no_more() -> None:
    order: list[str] = []
    mover = closing_mover(lambda: order.append("end"))
    for number in range(3):
        mover.submit(lambda n=number: order.append(f"call {n}"), nothing, Priority.BACKGROUND)
    assert mover.close(SOON)
    assert order == ["call 0", "call 1", "call 2", "end"]
    assert mover.submit(nothing, nothing, Priority.REQUEST).state is TransferState.CANCELLED
    assert mover.close(0.0), "idempotent"
    assert order[-1] == "end"
    assert order.count("end") == 1


def test_closing_leaves_a_hung_call_behind_which_ends_the_tier_itself_when_it_returns(gate: Gate) -> None:
    ended = threading.Event()
    mover = closing_mover(ended.set)
    hung = mover.submit(gate, nothing, Priority.REQUEST)
    assert gate.entered.wait(SOON)
    assert not mover.close(0.05)
    assert hung.state is TransferState.RUNNING
    assert not ended.is_set()
    gate.let_go()
    assert ended.wait(SOON)
    assert mover.close(SOON)


def test_a_tier_that_hangs_or_fails_at_its_end_holds_nobody_up(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    hanging = closing_mover(lambda: gate() and None)
    assert not hanging.close(0.05)
    gate.let_go()
    assert hanging.close(SOON)

    def broken() -> None:
        raise OSError("the catalog has gone")

    with caplog.at_level(logging.ERROR, "kvos.residency.mover"):
        assert closing_mover(broken).close(SOON)
    assert "the catalog has gone" in caplog.text
