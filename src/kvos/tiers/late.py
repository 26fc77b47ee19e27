"""A tier that could not be opened: it is tried again, so that it works once the cause is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvos.errors import InvalidConfigError
from kvos.tiers.base import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage

__all__ = ["LateTier"]

_logger = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Between two tries: nobody waits for them, and a full disk does not become empty within a second."""


class LateTier(Tier):
    """Holds nothing until ``open_tier`` succeeds, which stores try; from then on it is that tier. Any thread.

    Args:
        name, lossless: the tier's.
        capacity_bytes: what it may hold, once it is open.
        open_tier: raises InvalidConfigError as long as it cannot be opened.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        open_tier: Callable[[], Tier],
        *,
        lossless: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.lossless = lossless
        self._capacity = capacity_bytes
        self._open = open_tier
        self._clock = clock
        self._lock = threading.Lock()
        self._tier: Tier | None = None
        self._closed = False
        self._next_try = clock() + PAUSE_S
        self._failures = 1

    def store(self, batch: BlockBatch) -> list[Stored]:
        tier = self._tier or self._try()
        return [Stored.FAILED] * len(batch) if tier is None else tier.store(batch)

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        return [Loaded.MISS] * len(wanted) if self._tier is None else self._tier.load(wanted, out)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [False] * len(keys) if self._tier is None else self._tier.contains(keys)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        if self._tier is not None:
            self._tier.drop(keys)

    def usage(self) -> TierUsage:
        if self._tier is None:
            return TierUsage(self._capacity, 0, 0, {"open_errors": self._failures})
        return self._tier.usage()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._tier is not None:
                self._tier.close()

    def _try(self) -> Tier | None:
        """Open the tier, unless that failed just now."""
        with self._lock:
            if self._tier is None and not self._closed and self._clock() >= self._next_try:
                try:
                    self._tier = self._open()
                    _logger.warning("the %s cache could be opened after %d failures", self.name, self._failures)
                except InvalidConfigError as error:
                    self._failures += 1
                    self._next_try = self._clock() + PAUSE_S
                    _logger.warning("the %s cache still cannot be opened: %s", self.name, error)
            return self._tier
