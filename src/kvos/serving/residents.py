"""Which sessions keep their blocks on the device. Engine thread only.

A session that leaves gives its blocks back and keeps its tokens. Its full blocks stay findable, on the device until
they are reclaimed and in the tiers that have them, so its next request finds what is left, restores or computes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvos.policy.residency import ResidencyRules, Resident, ThrashGuard, leaving_order
from kvos.residency import StoreSummary
from kvos.sequences import BlockManager
from kvos.sessions.registry import SessionRegistry
from kvos.sessions.session import CacheSession, SessionState

__all__ = ["Residents"]

_logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Between two looks at who should leave."""

KEPT_USES = 3
NOTHING = np.array([], np.int64)


@dataclass(slots=True)
class _Stay:
    """What is known of a session.

    Attributes:
        uses: when it was used, latest last; seconds.
        left_at: when it left the device; None if it is there.
        by_wish: its caller sent it away, so that its return says nothing about who should leave by rule.
        stored: its blocks on their way below, before it leaves; with the revision that they belong to.
    """

    uses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_USES))
    left_at: float | None = None
    by_wish: bool = False
    stored: tuple[Future[StoreSummary], int] | None = None


class Residents:
    """Looks now and then who should leave, and makes room for who waits.

    Args:
        store: sends a session's blocks below, before they can be reclaimed; None if there is no tier for them.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        manager: BlockManager,
        sessions: SessionRegistry,
        rules: ResidencyRules,
        store: Callable[[CacheSession], Future[StoreSummary]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._sessions = sessions
        self._rules = rules
        self._store = store
        self._clock = clock
        self._stays: dict[CacheSession, _Stay] = {}
        self._last_look = clock()
        self._has_more = False
        self.guard = ThrashGuard()
        manager.relief = self.make_room

    def used(self, session: CacheSession) -> None:
        """A request on ``session`` begins or ends."""
        stay = self._stays.setdefault(session, _Stay())
        now = self._clock()
        stay.stored = None
        if stay.left_at is not None:
            self._manager.counters.add("sessions_returned")
            if not stay.by_wish and self.guard.returned(now - stay.left_at, now):
                self._manager.counters.add("thrash_pauses")
                _logger.warning("sessions come back as soon as they have left; nobody leaves by rule for a while")
            stay.left_at = None
            session.is_swapped_out = False
        if session.state is SessionState.BUSY:
            stay.uses.append(now)
        elif stay.uses:
            stay.uses[-1] = now

    def left(self, session: CacheSession) -> None:
        """``session`` was swapped out, by its caller's wish."""
        stay = self._stays.setdefault(session, _Stay())
        stay.left_at, stay.by_wish = self._clock(), True

    def forget(self, session: CacheSession) -> None:
        """Idempotent."""
        self._stays.pop(session, None)

    def make_room(self, blocks: int) -> None:
        """Have idle sessions leave, the longest idle first, until ``blocks`` can be had; nobody, if that can't be."""
        idle = self._idle()
        tables = [session.sequence.block_table() for session in idle]
        if self._manager.num_available + len(np.unique(np.concatenate([*tables, NOTHING]))) < blocks:
            return
        for i in leaving_order(self._facts(idle), self._rules, pressed=True):
            if self._manager.num_available >= blocks:
                return
            self._leave(idle[i])

    def seconds_to_look(self) -> float | None:
        """When ``look`` has something to do again; None if only a request can change that."""
        return max(0.0, self._last_look + LOOK_INTERVAL_S - self._clock()) if self._has_more else None

    def look(self) -> None:
        """Have those leave who should; does nothing if the last look was less than a second ago."""
        now = self._clock()
        if now - self._last_look < LOOK_INTERVAL_S:
            return
        self._last_look = now
        idle = self._idle()
        above = self._held() > self._rules.high
        too_many = self._num_resident(idle) - self._rules.sessions
        self._has_more = above or too_many > 0
        if not self._has_more or self.guard.is_pausing(now):
            return
        for i in leaving_order(self._facts(idle), self._rules, pressed=False):
            if too_many <= 0 and not (above and self._held() > self._rules.low):
                return
            self._go(idle[i])
            too_many -= 1

    def _go(self, session: CacheSession) -> None:
        """Let a session leave once its blocks are gathered for the tiers below."""
        stay = self._stays.setdefault(session, _Stay())
        revision = session.sequence.revision
        if self._store is None:
            self._leave(session)
        elif stay.stored is None or stay.stored[1] != revision:
            stay.stored = (self._store(session), revision)
        if stay.stored is not None and stay.stored[0].done():
            self._leave(session)

    def _leave(self, session: CacheSession) -> None:
        session.swap_out(session.sequence.revision)
        self._manager.counters.add("sessions_left")
        stay = self._stays.setdefault(session, _Stay())
        stay.left_at, stay.by_wish, stay.stored = self._clock(), False, None

    def _idle(self) -> list[CacheSession]:
        return [s for s in self._sessions if s.state is SessionState.IDLE and len(s.sequence.block_table())]

    def _num_resident(self, idle: list[CacheSession]) -> int:
        return len(idle) + sum(session.state is SessionState.BUSY for session in self._sessions)

    def _facts(self, sessions: Iterable[CacheSession]) -> list[Resident]:
        now = self._clock()
        facts = []
        for session in sessions:
            stay = self._stays.setdefault(session, _Stay())
            if not stay.uses:
                stay.uses.append(now)
            facts.append(Resident(now - stay.uses[-1], tuple(stay.uses)))
        return facts

    def _held(self) -> float:
        return self._manager.allocator.counts().held / self._manager.pool.max_blocks
