"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

__all__ = ["CircuitBreaker"]


class _State(Enum):
    CLOSED = "attempts go through"
    OPEN = "none does, until the pause is over"
    TRYING = "one goes on after the pause, and its outcome is not known yet"


class CircuitBreaker:
    """Opens after ``failures`` in a row, for ``pause_s``, twice as long each time up to ``most_s``. Any thread.

    Asking (``is_open``) changes nothing, so that who asks and then has nothing to try takes nobody's turn. When the
    pause is over, the first attempt is a trial: its success closes the breaker, its failure opens it again. Failures of
    attempts that began before it opened change nothing.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, clock: Callable[[], float], *, failures: int = 3, pause_s: float = 5.0, most_s: float = 300.0
    ) -> None:
        self._clock = clock
        self._limit = failures
        self._first_pause, self._most = pause_s, most_s
        self._pause = pause_s
        self._in_a_row = 0
        self._state = _State.CLOSED
        self._until = 0.0
        self._lock = threading.Lock()
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the tier is to be left alone now."""
        with self._lock:
            return self._state is not _State.CLOSED and self._clock() < self._until

    def begin_trial(self) -> bool:
        """An attempt is made now: True if it is the one after a pause, until whose outcome the breaker stays open.

        An attempt that never says how it went counts as none when another pause is over.
        """
        with self._lock:
            now = self._clock()
            if self._state is _State.CLOSED or now < self._until:
                return False
            self._state, self._until = _State.TRYING, now + self._pause
            return True

    def succeeded(self) -> None:
        """An attempt went well."""
        with self._lock:
            self._state, self._in_a_row, self._pause = _State.CLOSED, 0, self._first_pause

    def failed(self) -> None:
        """An attempt failed, or came too late."""
        with self._lock:
            if self._state is _State.OPEN:
                return
            if self._state is _State.TRYING:
                self._pause = min(2 * self._pause, self._most)
            else:
                self._in_a_row += 1
                if self._in_a_row < self._limit:
                    return
                self.times_opened += 1
            self._state, self._until = _State.OPEN, self._clock() + self._pause

    def not_tried(self) -> None:
        """A trial was called off before it began: the next attempt is one."""
        with self._lock:
            if self._state is _State.TRYING:
                self._state, self._until = _State.OPEN, self._clock()
