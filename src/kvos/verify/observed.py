"""What a runtime delivered, written down so that it can be compared later: plain values, nothing of kvos' cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import torch

__all__ = ["Fault", "FaultKind", "LogitRecord", "Observation", "TokenRecord"]


class FaultKind(Enum):
    """In what way a runtime was wrong."""

    LOGITS = "logits differ from a run without cache"
    TOKENS = "a generated token differs from a run without cache"
    BOOKKEEPING = "a session holds other tokens than it was given"
    INVARIANT = "the cache contradicts itself"
    LOST = "blocks that were stored below are lost"
    ERROR = "an operation raised an error that it should not"


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that was wrong in a history.

    Attributes:
        operation: index of the operation that showed it.
    """

    kind: FaultKind
    operation: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class LogitRecord:
    """Logits that were delivered behind tokens ``start`` to the end of ``ids``.

    Attributes:
        ids: every token from the first on.
        logits: ``[len(ids) - start, vocab]``.
    """

    operation: int
    ids: tuple[int, ...]
    start: int
    logits: torch.Tensor

    @property
    def first_row(self) -> int:
        """The first row of the reference that this is compared with."""
        return self.start


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Tokens ``start`` to the end of ``ids`` were generated, greedily, behind those before them."""

    operation: int
    ids: tuple[int, ...]
    start: int

    @property
    def first_row(self) -> int:
        """The first row of the reference that this is compared with: the one in front of the first token."""
        return self.start - 1


@dataclass(slots=True)
class Observation:
    """Everything that came out of a history.

    Attributes:
        fault: what was wrong without looking at any logits, if something was; the history ended there.
        done: how often each kind of operation did something.
    """

    records: list[LogitRecord | TokenRecord] = field(default_factory=list)
    fault: Fault | None = None
    done: Counter[str] = field(default_factory=Counter)
