"""All open sessions, by name. Engine thread only."""

from __future__ import annotations

from collections.abc import Iterator

from kvos.errors import SessionExistsError, SessionNotFoundError
from kvos.sessions.session import CacheSession
from kvos.sessions.spans import BlockSpan
from kvos.types import SessionId

__all__ = ["SessionRegistry"]


class SessionRegistry:
    """Names to sessions, and from a block back to everybody who has tokens in it."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, CacheSession] = {}
        self._unnamed = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[CacheSession]:
        return iter(tuple(self._sessions.values()))

    def free_name(self, wish: str | None, stem: str = "session") -> SessionId:
        """``wish`` if it is free, or a new name made from ``stem`` if there is no wish.

        Raises:
            SessionExistsError: an open session has that name.
        """
        if wish is not None:
            if SessionId(wish) in self._sessions:
                raise SessionExistsError(f"a session named {wish!r} is open already; close it, or choose another name")
            return SessionId(wish)
        while True:
            self._unnamed += 1
            name = SessionId(f"{stem}-{self._unnamed}")
            if name not in self._sessions:
                return name

    def add(self, session: CacheSession) -> None:
        """Make ``session`` findable under its id, which ``free_name`` gave."""
        self._sessions[session.id] = session

    def remove(self, session: CacheSession) -> None:
        """The pair of ``add``. Idempotent, even when another session has got the name meanwhile."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    def get(self, name: str) -> CacheSession:
        """Raises SessionNotFoundError if no open session has this name."""
        session = self._sessions.get(SessionId(name))
        if session is None:
            known = ", ".join(sorted(self._sessions)) or "none"
            raise SessionNotFoundError(f"no open session is named {name!r}; open are: {known}")
        return session

    def find(self, name: str, tenant: str) -> CacheSession | None:
        """The open session of this name, if there is one and it is the tenant's."""
        session = self._sessions.get(SessionId(name))
        return session if session is not None and session.tenant == tenant else None

    def spans_in_block(self, block: int) -> tuple[BlockSpan, ...]:
        """Every session's spans that have tokens in ``block``."""
        return tuple(part for session in self for part in session.spans_in_block(block))

    def check_invariants(self) -> None:
        """Raises AssertionError if a session is filed under another name, or a session contradicts itself."""
        for name, session in self._sessions.items():
            assert session.id == name
            session.check_invariants()
