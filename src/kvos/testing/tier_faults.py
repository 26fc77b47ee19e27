"""A tier that is full, slow, hung, unreadable or forgetful when a test wants it to be."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from kvos.tiers import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage

__all__ = ["FaultyTier", "TierFault"]


class TierFault(Enum):
    """What goes wrong in one call of a tier. What a verb can't do wrong in this way it does right."""

    NONE = "nothing"
    FULL = "store: every row is NO_ROOM"
    FAIL = "store, load: every row is FAILED"
    DAMAGED = "load: every row is DAMAGED, dropped, and its buffer holds garbage"
    VANISH = "load: every row has just been dropped, so it is a MISS"
    LAST_ROW = "store, load: the last row is FAILED, the others are as they should be"
    RAISE = "a bug: the call raises, after it has scribbled over its buffer"
    NONSENSE = "a bug: the answer has one row too few"
    HANG = "the call waits until ``release`` or ``close``, and then goes on rightly"


class FaultyTier(Tier):
    """Another tier, but for the calls that a test spoils. Any thread.

    Faults are per verb: ``"store"``, ``"load"`` or ``"contains"`` (which can only ``RAISE`` or give ``NONSENSE``).
    ``spoil`` says what goes wrong in the next calls, ``always`` what goes wrong until it is told otherwise.

    Attributes:
        tier: what does the work; closed with this one.
        calls: how often each verb was called, hung calls included.
        hanging: set while a call hangs; a test may wait for it.
        bytes_per_second: how fast loads and stores are; None for as fast as ``tier``.
        sleep: what passes the time of a slow call; a test with a clock of its own replaces it.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.lossless = tier.lossless
        self.calls = {"store": 0, "load": 0, "contains": 0}
        self.hanging = threading.Event()
        self.bytes_per_second: float | None = None
        self.sleep: Callable[[float], None] = time.sleep
        self.closed = threading.Event()
        self._next: dict[str, deque[TierFault]] = {verb: deque() for verb in self.calls}
        self._always = dict.fromkeys(self.calls, TierFault.NONE)
        self._lock = threading.Lock()
        self._released = threading.Event()

    # -- what goes wrong -----------------------------------------------------------------------------------------

    def spoil(self, verb: str, *faults: TierFault) -> None:
        """The next calls of ``verb`` go wrong like this, one after the other, before what ``always`` says."""
        with self._lock:
            self._next[verb].extend(faults)

    def always(self, verb: str, fault: TierFault) -> None:
        """From now on every call of ``verb`` goes wrong like this; ``TierFault.NONE`` ends it."""
        with self._lock:
            self._always[verb] = fault

    def release(self) -> None:
        """Let every call go on that hangs now; later ones hang again, if they are to."""
        with self._lock:
            released, self._released = self._released, threading.Event()
            self.hanging.clear()
        released.set()

    def heal(self) -> None:
        """Nothing goes wrong any more, and what hangs goes on."""
        with self._lock:
            for verb, planned in self._next.items():
                planned.clear()
                self._always[verb] = TierFault.NONE
            self.bytes_per_second = None
        self.release()

    def _fault(self, verb: str) -> TierFault:
        with self._lock:
            self.calls[verb] += 1
            fault = self._next[verb].popleft() if self._next[verb] else self._always[verb]
            released = self._released
            if fault is TierFault.HANG:
                self.hanging.set()
        if fault is TierFault.HANG:
            released.wait()
        return fault

    def _take_time(self, nbytes: int) -> None:
        if self.bytes_per_second is not None:
            self.sleep(nbytes / self.bytes_per_second)

    # -- the verbs -----------------------------------------------------------------------------------------------

    def store(self, batch: BlockBatch) -> list[Stored]:
        fault = self._fault("store")
        self._take_time(batch.data.nbytes)
        if fault is TierFault.RAISE:
            raise RuntimeError("a bug in store, planted by a test")
        if fault is TierFault.FULL:
            return [Stored.NO_ROOM] * len(batch)
        if fault is TierFault.FAIL:
            return [Stored.FAILED] * len(batch)
        if fault is TierFault.LAST_ROW:
            return [*self.tier.store(_without_last(batch)), Stored.FAILED]
        results = self.tier.store(batch)
        return results[:-1] if fault is TierFault.NONSENSE else results

    def load(self, wanted: BlockRequest, out: PayloadBytes) -> list[Loaded]:
        fault = self._fault("load")
        self._take_time(out.nbytes)
        if fault in (TierFault.DAMAGED, TierFault.VANISH):
            self.tier.drop(wanted.keys)
        if fault in (TierFault.DAMAGED, TierFault.FAIL, TierFault.RAISE):
            out[:] = 255
        if fault is TierFault.RAISE:
            raise RuntimeError("a bug in load, planted by a test")
        if fault is TierFault.DAMAGED:
            return [Loaded.DAMAGED] * len(wanted)
        if fault is TierFault.FAIL:
            return [Loaded.FAILED] * len(wanted)
        results = self.tier.load(wanted, out)
        if fault is TierFault.LAST_ROW:
            out[-1] = 255
            return [*results[:-1], Loaded.FAILED]
        return results[:-1] if fault is TierFault.NONSENSE else results

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        fault = self._fault("contains")
        if fault is TierFault.RAISE:
            raise RuntimeError("a bug in contains, planted by a test")
        found = self.tier.contains(keys)
        return found[:-1] if fault is TierFault.NONSENSE else found

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self.tier.drop(keys)

    def usage(self) -> TierUsage:
        return self.tier.usage()

    def close(self) -> None:
        """Close the tier, and let go of what hangs."""
        self.heal()
        self.tier.close()
        self.closed.set()


def _without_last(batch: BlockBatch) -> BlockBatch:
    blocks = batch.blocks
    return BlockBatch(BlockRequest(blocks.keys[:-1], blocks.parents[:-1], blocks.tokens[:-1]), batch.data[:-1])
