"""Blocks on their way back, for one request: loads in pieces, committed in order by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvos.residency.mover import Transfer, TransferState
from kvos.sequences import SequenceCache
from kvos.tiers import Loaded, PayloadBytes

__all__ = ["Restore", "RestoreEnd", "RestorePiece"]


class RestoreEnd(Enum):
    """How a restore ended."""

    COMPLETE = "everything that was found below came back"
    LATE = "the deadline passed"
    FAILED = "a block could not be read, or was damaged"
    MISSING = "a block had gone meanwhile"
    CANCELLED = "nobody wants it any more"


@dataclass(slots=True)
class RestorePiece:
    """One load: ``blocks`` neighbours of the sequence, from one tier, into a buffer of its own."""

    tier: int
    blocks: int
    data: PayloadBytes
    transfer: Transfer[list[Loaded]]


@dataclass(slots=True, eq=False)
class Restore:
    """What a request waits for. Engine thread only.

    Attributes:
        deadline: on the residency's clock; from then on the request computes.
        pieces: not committed yet, in order.
        restored_tokens: committed so far.
        end: None while it goes on.
    """

    sequence: SequenceCache
    deadline: float
    pieces: list[RestorePiece]
    restored_tokens: int = 0
    end: RestoreEnd | None = field(default=None)

    @property
    def has_news(self) -> bool:
        """Whether the next piece has come back."""
        return not self.pieces or self.pieces[0].transfer.state in (TransferState.DONE, TransferState.CANCELLED)

    def finish(self, end: RestoreEnd) -> None:
        """Let go of what has not come back."""
        for piece in self.pieces:
            piece.transfer.cancel()
        self.pieces = []
        self.end = end
