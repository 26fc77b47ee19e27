"""A tier that takes longer than it has to, as a worn or busy disk would."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvos.tiers import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage

__all__ = ["SlowTier"]


class SlowTier(Tier):
    """Another tier, whose stores and loads take ``times`` as long. Any thread.

    Args:
        tier: does the work; closed with this one.
    """

    def __init__(self, tier: Tier, times: float) -> None:
        self.name = tier.name
        self._tier = tier
        self._times = times

    def store(self, batch: BlockBatch) -> list[Stored]:
        begin = time.perf_counter()
        results = self._tier.store(batch)
        self._wait_since(begin)
        return results

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        begin = time.perf_counter()
        results = self._tier.load(wanted, out)
        self._wait_since(begin)
        return results

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._tier.contains(keys)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._tier.drop(keys)

    def usage(self) -> TierUsage:
        return self._tier.usage()

    def close(self) -> None:
        self._tier.close()

    def _wait_since(self, begin: float) -> None:
        time.sleep((self._times - 1) * (time.perf_counter() - begin))
