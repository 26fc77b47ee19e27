"""Where whole sessions are kept: the small protocol that the runtime hands in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvos.sessions.manifest import SessionManifest
from kvos.types import TokenIds

__all__ = ["SavedSession", "SessionStore"]


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session outside any pool, token by token, so that it fits any block size.

    Attributes:
        model: identity of the model whose KV this is.
        model_name: the same, for people.
        numeric_class: compute dtype and whatever else changes the bits.
        tokens: ``[num_tokens]``.
        keys: per layer ``[num_computed, kv_heads, k_dim]``; opaque to this layer. Empty if there is no usable KV.
        values: per layer ``[num_computed, kv_heads, v_dim]``.
        kv_problem: why KV that was saved cannot be used and is to be recomputed; None if all is well.
    """

    manifest: SessionManifest
    model: str
    model_name: str
    numeric_class: str
    tokens: TokenIds
    keys: Sequence[Any]
    values: Sequence[Any]
    kv_problem: str | None = None


class SessionStore(Protocol):
    """Sessions by name. Any thread; what ``put`` has returned from survives a crash."""

    def put(self, name: str, session: SavedSession) -> None:
        """Keep ``session`` under ``name``, in place of what was there; atomic."""

    def get(self, name: str) -> SavedSession:
        """What was kept.

        Raises:
            SessionNotFoundError: nothing is.
            SessionFileDamagedError: it is not what was written.
        """
        ...

    def names(self) -> tuple[str, ...]:
        """Everything that is kept, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Forget ``name``; raises SessionNotFoundError if it is not there."""
