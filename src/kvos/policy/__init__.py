"""Who leaves first, is moving worth it: pure functions. Knows no I/O, clocks or tensors."""

from kvos.policy.base import Candidates, EvictionPolicy
from kvos.policy.expected_return import ExpectedReturn
from kvos.policy.lru import LRU
from kvos.policy.order import EvictionOrder

__all__ = ["LRU", "POLICIES", "Candidates", "EvictionOrder", "EvictionPolicy", "ExpectedReturn"]

POLICIES: dict[str, type[EvictionPolicy]] = {"expected-return": ExpectedReturn, "lru": LRU}
"""By the name that settings and the command line take; the first is the default."""
