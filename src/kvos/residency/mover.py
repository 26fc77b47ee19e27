"""Transfers in the background: one thread per tier, the most urgent first. Knows bytes and tiers, no sequences.

A transfer works on a buffer of its own, so whoever has stopped waiting for it just lets go: the buffer lives until the
tier's call returns, and nothing that comes late lands anywhere.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Generic, TypeVar

__all__ = ["Mover", "Priority", "Transfer", "TransferState"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Priority(IntEnum):
    """Smaller goes first."""

    REQUEST = 0
    """Somebody waits for it."""
    HIBERNATE = 1
    """A caller waits, but no tokens do."""
    BACKGROUND = 2


class TransferState(Enum):
    """Where a transfer is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    """It had not begun, and never will."""


class Transfer(Generic[T]):
    """One call of a tier. Any thread may read it or cancel it; its mover's thread runs it.

    Attributes:
        result: what the call returned, once ``state`` is DONE; None if it raised.
        seconds: how long the call took.
    """

    def __init__(self, work: Callable[[], T], done: Callable[[], None]) -> None:
        self.state = TransferState.QUEUED
        self.result: T | None = None
        self.seconds = 0.0
        self._work: Callable[[], T] | None = work
        self._done = done
        self._lock = threading.Lock()

    def cancel(self) -> bool:
        """Don't begin it: False if it has begun, and goes on, and nobody needs its result. ``done`` is not called."""
        with self._lock:
            if self.state is TransferState.QUEUED:
                self.state = TransferState.CANCELLED
                self._work = None
            return self.state is TransferState.CANCELLED

    def run(self, clock: Callable[[], float]) -> None:
        """Make the call, unless cancelled; then tell. The mover's thread only."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return
            self.state = TransferState.RUNNING
        begun = clock()
        try:
            self.result = work()
        except BaseException:  # a tier's verbs don't raise: this is a bug there, and no reason to stop moving
            _logger.exception("a transfer failed")
        self.seconds = clock() - begun
        with self._lock:
            self.state = TransferState.DONE
        self._done()


class Mover:
    """A daemon thread that runs transfers one after the other, by priority. Any thread may submit.

    Args:
        name: of the thread.
        clock: seconds, monotonic.
        at_end: called on the mover's thread behind the last transfer, so that what hangs there hangs nobody else.
    """

    def __init__(self, name: str, clock: Callable[[], float], at_end: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._at_end = at_end
        self._queue: queue.PriorityQueue[tuple[int, int, Transfer[object] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._gate = threading.Lock()
        self._closing = False
        self._running_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], done: Callable[[], None], priority: Priority) -> Transfer[T]:
        """Run ``work`` when its turn comes, then call ``done`` on the mover's thread. Once closed, it is cancelled."""
        transfer = Transfer(work, done)
        with self._gate:
            if self._closing:
                transfer.cancel()
            else:
                self._queue.put((priority, next(self._numbers), transfer))  # type: ignore[arg-type] # read as object
        return transfer

    @property
    def running_s(self) -> float:
        """How long the call that is being made has taken so far; 0 if there is none."""
        since = self._running_since
        return 0.0 if since is None else self._clock() - since

    def stop(self) -> None:
        """Take no more transfers; the thread ends when those in the queue are over. Doesn't wait. Idempotent."""
        with self._gate:
            if not self._closing:
                self._closing = True
                self._queue.put((Priority.BACKGROUND + 1, next(self._numbers), None))

    def close(self, patience_s: float) -> bool:
        """``stop``, and wait ``patience_s`` for the end: whether it came. A hung call is left behind."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, patience_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (transfer := self._queue.get()[2]) is not None:
            self._running_since = self._clock()
            try:
                transfer.run(self._clock)
            except Exception:  # what ``done`` raised is the listener's, the next transfer is somebody else's
                _logger.exception("nobody could be told of a transfer's end")
            self._running_since = None
            del transfer  # with its result
        try:
            self._at_end()
        except Exception:  # a tier that can't be closed well is closed all the same
            _logger.exception("a tier could not be closed well")
