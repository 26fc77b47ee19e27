"""Who leaves first: pure functions over a few facts, without I/O, clocks or tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Candidates", "EvictionPolicy", "Floats", "Ints"]

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a policy may know of cached blocks; each array is ``[candidates]``.

    Attributes:
        last_used: logical time of the last use; larger is later.
        idle: requests since then.
        depth: blocks before it in its sequence.
        hits: how often it was matched since it was published.
        worth: computes the hits per block and request of keeping it, by what was learned, ``[candidates]``.
    """

    last_used: Ints
    idle: Ints
    depth: Ints
    hits: Ints
    worth: Callable[[], Floats]


class EvictionPolicy(ABC):
    """One method: the candidate with the smallest key leaves first."""

    @abstractmethod
    def sort_keys(self, candidates: Candidates) -> Floats:
        """A key for each candidate, ``[candidates]``; smaller leaves earlier.

        Of equal keys the one leaves first that was used longest ago, then the deeper one: a prefix is worth more than
        its end.
        """
