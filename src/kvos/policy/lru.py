"""Least recently used: the yardstick for every other policy."""

from __future__ import annotations

import numpy as np

from kvos.policy.base import Candidates, EvictionPolicy, Floats

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """Oldest use first."""

    def sort_keys(self, candidates: Candidates) -> Floats:
        return candidates.last_used.astype(np.float64)
