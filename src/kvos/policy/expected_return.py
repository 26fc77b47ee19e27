"""The default: what is least likely to be asked for again, for the place and time it takes, leaves first."""

from __future__ import annotations

from kvos.policy.base import Candidates, EvictionPolicy, Floats

__all__ = ["ExpectedReturn"]


class ExpectedReturn(EvictionPolicy):
    """Least worth first, by what was learned; LRU as long as nothing was."""

    def sort_keys(self, candidates: Candidates) -> Floats:
        return candidates.worth()
