"""Blocks on their way back, for one request: loads in pieces, committed in order by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvos.residency.level import Level
from kvos.residency.mover import Transfer, TransferState
from kvos.sequences import SequenceCache
from kvos.tiers import BlockRequest, Loaded, PayloadBytes

__all__ = ["Restore", "RestoreEnd", "RestorePiece"]


class RestoreEnd(Enum):
    """How a restore ended."""

    COMPLETE = "everything that was found below came back"
    LATE = "the deadline passed"
    FAILED = "a block could not be read, or was damaged"
    MISSING = "a block had gone meanwhile"
    SWITCHED_OFF = "the tier that has the blocks hangs, or is left alone after failures"
    NOT_WORTH_IT = "computing them is expected to be faster"
    CANCELLED = "nobody wants it any more"


@dataclass(slots=True, eq=False)
class RestorePiece:
    """One load: neighbours of the sequence from block ``first`` on, from one tier, into a buffer of its own.

    Attributes:
        failed: tiers that failed in this restore already, shared by its pieces: one restore is one failure.
        data: ``[blocks, bytes_per_block]``; None before it was submitted, and once it was given back.
        dropped: nobody waits for it any more.
        is_trial: the tier's breaker let it through to see whether the tier works again.
    """

    level: Level
    first: int
    wanted: BlockRequest
    failed: set[Level]
    data: PayloadBytes | None = None
    transfer: Transfer[list[Loaded]] | None = None
    is_trial: bool = False
    dropped: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.wanted)

    @property
    def is_back(self) -> bool:
        ends = (TransferState.DONE, TransferState.CANCELLED)
        return self.transfer is not None and self.transfer.state in ends

    @property
    def results(self) -> list[Loaded] | None:
        """One per block; None if the call raised, or its answer makes no sense."""
        found = None if self.transfer is None else self.transfer.result
        return found if found is not None and len(found) == len(self.wanted) else None

    def drop(self) -> None:
        """Stop waiting for it."""
        self.dropped = True
        if self.transfer is not None and not self.is_back and self.transfer.cancel() and self.is_trial:
            self.level.loads.not_tried()


@dataclass(slots=True, eq=False)
class Restore:
    """What a request waits for. Engine thread only.

    Attributes:
        deadline: on the residency's clock; from then on the request computes.
        pieces: not committed yet, in order.
        rest: how it ends when all pieces are committed: why not more was found below.
        delivered: tiers that have brought a piece.
        restored_tokens: committed so far.
        shared_tokens: those that other requests published meanwhile, and that were taken over.
        end: None while it goes on.
    """

    sequence: SequenceCache
    deadline: float
    pieces: list[RestorePiece]
    rest: RestoreEnd = RestoreEnd.COMPLETE
    delivered: set[Level] = field(default_factory=set)
    restored_tokens: int = 0
    shared_tokens: int = 0
    end: RestoreEnd | None = field(default=None)

    @property
    def has_news(self) -> bool:
        """Whether the next piece has come back."""
        return not self.pieces or self.pieces[0].is_back

    def skip_to(self, block: int) -> None:
        """Blocks before this one need not come any more."""
        while self.pieces and self.pieces[0].end <= block:
            self.pieces.pop(0).drop()

    def finish(self, end: RestoreEnd) -> None:
        """Let go of what has not come back. Idempotent: the first end stays."""
        if self.end is not None:
            return
        for piece in self.pieces:
            piece.drop()
        self.pieces = []
        self.end = end
