"""What a runtime wires together, as its sessions see it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path

from kvos.config import tenant_folder_name
from kvos.engine import Engine
from kvos.errors import EngineStoppedError, InvalidInputError, TierTimeoutError
from kvos.residency import StoreSummary
from kvos.runtime.session_file import FileSessionStore
from kvos.sequences import BlockManager, PrefixRoot, SequenceCache
from kvos.serving import EngineCore, EngineThread
from kvos.sessions import CacheSession, ChatRenderer, SessionLimits, SessionStore
from kvos.types import OwnerId, SessionId, shown

__all__ = ["RuntimeParts"]

HIBERNATE_DEADLINE_S = 60.0
"""Gigabytes are written within this; a tier that takes longer hangs."""

MAX_NAME = 200
"""Characters of a session's or tenant's name."""


class RuntimeParts:
    """One of everything. Attributes may be read from any thread; methods say where they run.

    ``lasting`` says that blocks may outlive the process, so that their addresses carry the model's whole identity;
    ``exactness`` is ``KvosConfig.exactness``.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        thread: EngineThread,
        renderer: ChatRenderer,
        limits: SessionLimits,
        sessions_folder: Path,
        lasting: bool = False,
        exactness: str = "exact",
    ) -> None:
        self.engine = engine
        self.thread = thread
        self.renderer = renderer
        self.limits = limits
        self._sessions_folder = sessions_folder
        self._lasting = lasting
        self.exactness = exactness
        self._owners: dict[str, OwnerId] = {}
        self._identity: str | None = None
        self._identity_lock = threading.Lock()

    def numeric_class(self, declared: int) -> str:
        """What gives equal tokens other keys in a session that declared this length.

        The compute dtype, for a model whose positions depend on the length what that makes of them, whether bits are
        promised, and whether a tier may give back something else than was computed.
        """
        parts = [str(self.engine.info.compute_dtype).removeprefix("torch.")]
        positions = self.engine.position_class(declared)
        if positions:
            parts.append(f"positions: {positions}")
        if self.engine.arithmetic:
            parts.append(self.engine.arithmetic)
        if self.exactness != "exact":
            parts.append(self.exactness)
        return ", ".join(parts)

    def identity(self) -> str:
        """The model's identity. Any thread; reads all weights the first time."""
        with self._identity_lock:
            if self._identity is None:
                self._identity = self.engine.identity()
            return self._identity

    def get_ready(self) -> None:
        """What opening a session needs and takes long, the first time. Any thread but the engine's."""
        if self._lasting:
            self.identity()

    def hibernated(self, tenant: str) -> SessionStore:
        """Where a tenant's sessions are described while their blocks are in lower tiers. Any thread."""
        folder = self._sessions_folder.with_name("hibernated")
        return FileSessionStore(folder / tenant_folder_name(check_name("tenant", tenant)), "hibernated")

    def store(self, tenant: str) -> SessionStore:
        """Where a tenant's sessions are saved by name. Any thread."""
        return FileSessionStore(self._sessions_folder / tenant_folder_name(check_name("tenant", tenant)))

    def open_session(
        self, core: EngineCore, name: str | None, tenant: str, max_tokens: int | None = None
    ) -> CacheSession:
        """A new empty session that may grow to ``max_tokens``, or to the runtime's limit. Engine thread.

        A session that comes from a runtime with more room keeps the length that it declared there.
        """
        session_id = core.sessions.free_name(name)
        limits = self.limits
        if max_tokens is not None:
            limits = SessionLimits(min(max_tokens, limits.max_tokens), limits.vocab_size, declared=max_tokens)
        sequence = self._new_sequence(core.manager, session_id, tenant, limits.declared)
        session = CacheSession(session_id, sequence, limits, tenant=tenant)
        session.is_named = name is not None
        core.sessions.add(session)
        return session

    def _new_sequence(self, manager: BlockManager, session_id: SessionId, tenant: str, declared: int) -> SequenceCache:
        owner = self._owners.setdefault(tenant, OwnerId(len(self._owners) + 1))
        numbers = self.numeric_class(declared)
        # Blocks that outlive the process need the model's identity; within one there is one model.
        model = self.identity() if self._lasting else self.engine.info.model_name
        root = PrefixRoot(model=model, tenant=tenant, numeric_class=numbers)
        return SequenceCache(manager, root, owner=owner, label=f"session {session_id}")

    def outcome(self, storing: Future[StoreSummary]) -> StoreSummary:
        """Wait for stores that somebody asked for, but no longer than a hung tier deserves. Any thread."""
        try:
            return storing.result(HIBERNATE_DEADLINE_S)
        except (TimeoutError, CancelledError) as error:
            raise TierTimeoutError(
                f"the lower tiers have not taken the session's blocks within {HIBERNATE_DEADLINE_S:.0f} s, or the "
                "runtime was closed meanwhile; the session is as before. See Runtime.tiers() and try again"
            ) from error

    def run(self, work: Callable[[EngineCore], object]) -> None:
        """Send a command without waiting for it; after the runtime's end there is nothing left to do. Any thread."""
        with contextlib.suppress(EngineStoppedError):
            self.thread.submit(work)


def check_name(what: str, name: str) -> str:
    """Raises InvalidInputError unless ``name`` is text that can name a session or a tenant."""
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidInputError(f"a {what}'s name is 1 to {MAX_NAME} printable characters, got {shown(name)}")
    return name
