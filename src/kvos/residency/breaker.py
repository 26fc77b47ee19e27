"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens after ``failures`` in a row, for ``pause_s``, twice as long each time up to ``most_s``. Any thread.

    When the pause is over, one attempt is let through: its success closes the breaker, its failure opens it again.

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
        self._open_until: float | None = None
        self._lock = threading.Lock()
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone now; asking lets nothing through."""
        with self._lock:
            return self._open_until is not None and self._clock() < self._open_until

    def allow(self) -> bool:
        """Whether to try now. After a pause this says yes once, until the outcome is known or another pause is over."""
        with self._lock:
            if self._open_until is None:
                return True
            now = self._clock()
            if now < self._open_until:
                return False
            self._open_until = now + self._pause
            return True

    def succeeded(self) -> None:
        """An attempt went well."""
        with self._lock:
            self._in_a_row, self._open_until, self._pause = 0, None, self._first_pause

    def failed(self) -> None:
        """An attempt failed, or came too late."""
        with self._lock:
            self._in_a_row += 1
            if self._open_until is not None:
                self._pause = min(2 * self._pause, self._most)
            elif self._in_a_row < self._limit:
                return
            else:
                self.times_opened += 1
            self._open_until = self._clock() + self._pause
