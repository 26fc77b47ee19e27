"""Sessions whose blocks are brought back before anybody asks for them. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvos.errors import KvosError
from kvos.residency import Residency, Restore, RestoreEnd
from kvos.sequences import BlockManager, SequenceCache
from kvos.sessions.session import CacheSession, SessionState

__all__ = ["Prewarms"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prewarm:
    """One session's. Blocks are restored into a fork, so that the session itself may be used at any time.

    Attributes:
        due: when to begin; seconds on the clock.
        fork: holds what has come back until the session takes it over; None before it began.
    """

    session: CacheSession
    due: float
    fork: SequenceCache | None = None
    restore: Restore | None = None
    over: Future[None] = field(default_factory=Future)


class Prewarms:
    """Restores ahead of need, as far as there is room that nobody has to leave for.

    Args:
        clock: seconds, monotonic; the one that the residency's deadlines are on.
    """

    def __init__(
        self, manager: BlockManager, residency: Residency, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._manager = manager
        self._residency = residency
        self._clock = clock
        self._coming: list[_Prewarm] = []

    def add(self, session: CacheSession, after_s: float) -> Future[None]:
        """Bring the session's blocks back in ``after_s`` seconds; a second call replaces the first.

        Returns:
            Done when it is over, whatever came back.
        """
        self.forget(session)
        prewarm = _Prewarm(session, self._clock() + after_s)
        self._coming.append(prewarm)
        return prewarm.over

    def forget(self, session: CacheSession) -> None:
        """Idempotent."""
        for prewarm in [prewarm for prewarm in self._coming if prewarm.session is session]:
            self._end(prewarm)

    def end_all(self) -> None:
        """Give up whatever has not come back. Idempotent."""
        for prewarm in tuple(self._coming):
            self._end(prewarm)

    def seconds_to_next(self) -> float | None:
        """Until ``advance`` has something to do; None if there is nothing."""
        waits = [
            max(0.0, prewarm.due - self._clock())
            if prewarm.restore is None
            else self._residency.patience_s([prewarm.restore])
            for prewarm in self._coming
        ]
        return min(waits, default=None)

    def advance(self) -> None:
        """Begin what is due, take in what has come back, hand over what is complete."""
        for prewarm in tuple(self._coming):
            try:
                self._advance(prewarm)
            except (KvosError, RuntimeError, MemoryError) as error:  # nobody waits for it, and a request will see
                _logger.warning("session %s could not be prewarmed: %s", prewarm.session.id, error)
                self._end(prewarm)

    def _advance(self, prewarm: _Prewarm) -> None:
        if prewarm.restore is None:
            if self._clock() < prewarm.due:
                return
            if not self._begin(prewarm):
                self._end(prewarm)
                return
        if prewarm.restore is not None:
            self._residency.advance(prewarm.restore, None)
            if prewarm.restore.end is None:
                return
        self._take_over(prewarm)
        self._end(prewarm)

    def _begin(self, prewarm: _Prewarm) -> bool:
        """False if the session is in use, or there is no room for it now."""
        session = prewarm.session
        if session.state is not SessionState.IDLE:
            return False
        if self._manager.num_available < session.sequence.blocks_needed(session.sequence.num_pending):
            return False
        prewarm.fork = session.sequence.fork(label=f"prewarming of session {session.id}")
        prewarm.fork.adopt_prefix()
        prewarm.restore = self._residency.begin_restore(prewarm.fork)
        return True

    @staticmethod
    def _take_over(prewarm: _Prewarm) -> None:
        """The fork's blocks are published, so the session finds them; later they might have been reclaimed."""
        session = prewarm.session
        if session.state is SessionState.IDLE and session.sequence.num_pending:
            session.sequence.adopt_prefix()
            session.is_swapped_out = False

    def _end(self, prewarm: _Prewarm) -> None:
        self._coming.remove(prewarm)
        if prewarm.restore is not None and prewarm.restore.end is None:
            prewarm.restore.finish(RestoreEnd.CANCELLED)
        if prewarm.fork is not None:
            prewarm.fork.release()
        if prewarm.over.set_running_or_notify_cancel():
            prewarm.over.set_result(None)
