"""Requests that wait for lower tiers, sessions whose blocks go there, tables that are compacted. Engine thread only."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future

from kvos.errors import EngineContractError
from kvos.residency import Priority, Residency, RestoreEnd, StoreSummary, Wake
from kvos.sequences import BlockManager, Compactor
from kvos.serving.prewarm import Prewarms
from kvos.serving.request import Request
from kvos.sessions.session import CacheSession, SessionState

__all__ = ["BlockMoves"]

_logger = logging.getLogger(__name__)

HITS_WORTH_STORING = 2
"""Blocks of a session that nobody named are stored once they were shared so often: they will be again."""

LEAST_MEASURED_TOKENS = 32
"""A shorter prefill takes about as long as a single token."""


class BlockMoves:
    """What the engine's core does between steps with blocks that exist: bring back, store below, move together.

    Args:
        residency: the tiers below; None if there are none.
        compactor: None leaves tables as they are.
    """

    def __init__(self, manager: BlockManager, residency: Residency | None, compactor: Compactor | None) -> None:
        self.residency = residency
        self._manager = manager
        self._compactor = compactor
        self.prewarms = None if residency is None else Prewarms(manager, residency)

    def connect(self, wake: Wake) -> None:
        """See ``Residency.connect``."""
        if self.residency is not None:
            self.residency.connect(wake)

    def begin(self, request: Request) -> None:
        """Start loading what lower tiers have of a request's prompt."""
        if self.residency is None:
            return
        try:
            request.restore = self.residency.begin_restore(request.session.sequence)
        except Exception:  # a bug, and no reason to refuse a request that can be computed
            _logger.exception("nothing is restored for session %s", request.session.id)
            request.restore_end = RestoreEnd.FAILED
        self._end(request)

    def advance(self, request: Request) -> int:
        """Take in what has come back for a request; returns the tokens that it gained."""
        restore = request.restore
        if restore is None or self.residency is None:
            return 0
        shared = restore.shared_tokens
        gained = self.residency.advance(restore, request.reservation)
        if gained:
            request.restored = restore.restored_tokens
            request.shared += restore.shared_tokens - shared
            request.skip_rows(gained)
            request.first_row = request.next_row
            request.met_eviction = request.session.sequence.next_was_evicted()
        self._end(request)
        return gained

    @staticmethod
    def _end(request: Request) -> None:
        """Let a request go on whose restore has ended."""
        restore = request.restore
        if restore is not None and restore.end is not None:
            request.restore, request.restore_end = None, restore.end

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more. Idempotent."""
        if request.restore is not None:
            request.restore.finish(RestoreEnd.CANCELLED)
            request.restore = None

    def patience_s(self, requests: Iterable[Request]) -> float | None:
        """How long the engine thread may wait for commands: 0 if there is something to do, None if nothing will be."""
        restores = [request.restore for request in requests]
        waiting = [restore for restore in restores if restore is not None]
        if self.residency is None or self.prewarms is None or len(waiting) < len(restores):
            return 0.0 if restores else None
        waits = [
            self.prewarms.seconds_to_next(),
            self.residency.seconds_to_give_up(),
            self.residency.patience_s(waiting) if waiting else None,
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def work(self) -> bool:
        """Gather a batch of what lower tiers are to get, or compact a table; False if there is nothing to do now."""
        if self.prewarms is not None:
            self.prewarms.advance()
        return (self.residency is not None and self.residency.work()) or self._compact()

    def _compact(self) -> bool:
        try:
            return self._compactor is not None and self._compactor.run(self._manager) > 0
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            _logger.warning("no memory to compact a table, it stays scattered: %s", error)
            return False

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how fast a step without decodes was; one of a few tokens says little, and counts while no other has."""
        if self.residency is None:
            return
        speed = self.residency.prefill_speed
        if tokens >= LEAST_MEASURED_TOKENS or speed.per_second is None:
            speed.add(tokens, seconds)

    def keep(self, session: CacheSession) -> None:
        """Have the lower tiers store what a session has published, if it will be wanted again, by all that is known."""
        if self.residency is None:
            return
        entries = session.sequence.published()
        if not session.is_named:
            entries = entries[: int((self._manager.index.hits(entries) >= HITS_WORTH_STORING).sum())]
        self.residency.keep(entries)

    def store(self, session: CacheSession) -> Future[StoreSummary]:
        """Store all that a session has published, since it is about to leave. Only with a residency."""
        if self.residency is None:
            raise EngineContractError("there is no tier to store blocks in")
        return self.residency.keep(session.sequence.published())

    def prewarm(self, session: CacheSession, after_s: float) -> Future[None] | None:
        """Bring a session's blocks back ahead of need; None without a tier: there is nothing to bring.

        Raises:
            SessionClosedError: see ``CacheSession``.
        """
        if session.state is SessionState.CLOSED:
            session.check_idle()
        return None if self.prewarms is None else self.prewarms.add(session, after_s)

    def forget(self, session: CacheSession) -> None:
        """The session is about to be closed. Idempotent."""
        if self.prewarms is not None:
            self.prewarms.forget(session)

    def stop(self) -> None:
        """End what goes on ahead of need; who waits for it hears so. Idempotent."""
        if self.prewarms is not None:
            self.prewarms.end_all()

    def hibernate(self, session: CacheSession) -> Future[StoreSummary] | None:
        """Store all that an idle session has published; None if there is no tier for it.

        Raises:
            SessionBusyError, SessionClosedError: see ``CacheSession``.
        """
        session.check_idle()
        if self.residency is None:
            return None
        return self.residency.keep(session.sequence.published(), Priority.HIBERNATE)
