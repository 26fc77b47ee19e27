"""Least recently used: the yardstick for every other policy."""

from __future__ import annotations

from kvos.policy.base import EvictionCandidate, EvictionPolicy

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """Oldest use first; of equally old blocks the deeper one, since a prefix is worth more than its end."""

    def sort_key(self, candidate: EvictionCandidate) -> tuple[float, ...]:
        return (candidate.last_used, -candidate.depth)
