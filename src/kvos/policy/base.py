"""Who leaves first: pure functions over a few facts, without I/O, clocks or tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["EvictionCandidate", "EvictionPolicy"]


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """What a policy may know of a cached block.

    Attributes:
        last_used: logical time of the last match or release; larger is later.
        depth: blocks before it in its sequence.
        hits: how often it was matched since it was published.
    """

    last_used: int
    depth: int
    hits: int


class EvictionPolicy(ABC):
    """One method: the candidate with the smallest key leaves first."""

    @abstractmethod
    def sort_key(self, candidate: EvictionCandidate) -> tuple[float, ...]:
        """A key that orders candidates; smaller leaves earlier."""
