"""Who leaves first, is moving worth it: pure functions. Knows no I/O, clocks or tensors."""

from kvos.policy.base import EvictionCandidate, EvictionPolicy
from kvos.policy.lru import LRU

__all__ = ["LRU", "EvictionCandidate", "EvictionPolicy"]
