"""What lives in which tier, and when it moves. Engine thread only; tiers are called by their movers.

Down: published blocks are gathered between steps, a batch at a time, and stored in every tier below. Up: blocks behind
what a sequence has computed are loaded by address and committed like a forward pass that wrote them. Whatever goes
wrong, or takes too long, is computed instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvos.policy.transfer import SpeedEstimate
from kvos.residency.level import Level, TierReport
from kvos.residency.loads import Loads
from kvos.residency.mover import Priority
from kvos.residency.restore import Restore
from kvos.residency.staging import StagingBuffers
from kvos.residency.stores import Stores
from kvos.residency.tickets import StoreSummary
from kvos.sequences import BlockManager, IndexEntry, SequenceCache
from kvos.storage import Reservation
from kvos.tiers import Tier

__all__ = ["PIECE_BLOCKS", "Residency", "Wake"]

_logger = logging.getLogger(__name__)

PIECE_BLOCKS = 64
"""Blocks in one store: a few milliseconds of the engine thread to gather, and a file that is worth its sync."""

LOAD_BLOCKS = 16
"""Blocks in one load: while the engine thread writes one piece the next is read, into memory that is there already."""

IDLE_BUFFERS = 4
"""Staging buffers that are kept for the next transfers."""

DRAIN_LOOK_S = 0.05
"""Between two looks whether a tier hangs."""

Wake = Callable[[Callable[[], None], Callable[[], None]], None]
"""Runs the first on the engine thread, soon; or calls the second, once there is no engine thread any more."""

EXIT_PATIENCE_S = 5.0
"""Closing waits so long for stores that are under way, in all tiers together, and leaves a hung one behind."""


class Residency:
    """Moves blocks between the pool and the tiers below it.

    Args:
        manager: the pool's blocks.
        tiers: fast to slow; closed with this.
        restore_deadline_s: the longest that a request waits for blocks.
        clock: seconds, monotonic.
        piece_blocks: blocks in one store, and at most in one load.
    """

    def __init__(
        self,
        manager: BlockManager,
        tiers: Sequence[Tier],
        *,
        restore_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        piece_blocks: int = PIECE_BLOCKS,
    ) -> None:
        self._levels = [Level(tier, clock) for tier in tiers]
        self._deadline_s = restore_deadline_s
        self._wake: Wake | None = None
        self._process = os.getpid()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        block_bytes = manager.pool.layout.bytes_per_block
        loading = StagingBuffers(min(piece_blocks, LOAD_BLOCKS), block_bytes, IDLE_BUFFERS)
        self._loads = Loads(manager, self._levels, restore_deadline_s, clock, self._tell, loading)
        storing = StagingBuffers(piece_blocks, block_bytes, IDLE_BUFFERS)
        self._stores = Stores(manager, self._levels, self._tell, storing)

    def connect(self, wake: Wake) -> None:
        """Movers call ``wake`` from their threads."""
        self._wake = wake

    def _tell(self, work: Callable[[], None]) -> None:
        """Have the engine thread run ``work``; until there is one, whoever moves blocks does. Any thread."""
        if self._wake is None:
            self._news.put(work)
        else:
            self._wake(work, partial(self._news.put, work))

    def _hear(self) -> None:
        """Run what movers have told nobody yet."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Fast to slow; for measurements and tests."""
        return tuple(level.tier for level in self._levels)

    def wrap_tiers(self, wrap: Callable[[Tier], Tier]) -> None:
        """Put something between here and each tier; for measurements and tests. Nothing may be under way."""
        for level in self._levels:
            level.tier = wrap(level.tier)

    @property
    def prefill_speed(self) -> SpeedEstimate:
        """Tokens per second that the model computes, against which restores are weighed."""
        return self._loads.prefill_speed

    @prefill_speed.setter
    def prefill_speed(self, speed: SpeedEstimate) -> None:
        self._loads.prefill_speed = speed

    def begin_restore(self, sequence: SequenceCache) -> Restore | None:
        """Start loading what the tiers have of the tokens behind ``num_computed``; None if that is nothing.

        One that is not worth it, or whose tier is switched off, has ended already, and says so. Nothing is restored
        behind a partial block: it would have to be given up first, for what only a truncation or a fork inside
        a block leaves behind.
        """
        self._hear()
        return self._loads.begin(sequence)

    def advance(self, restore: Restore, reservation: Reservation | None) -> int:
        """Commit what has come back, in order; returns the tokens gained. Sets ``restore.end`` when it is over."""
        self._hear()
        return self._loads.advance(restore, reservation)

    @property
    def unfinished_stores(self) -> int:
        """Calls of ``keep`` whose blocks are not all below yet."""
        return self._stores.num_unfinished

    def patience_s(self, restores: Sequence[Restore]) -> float:
        """Seconds until the first of these restores has to be looked at; 0 if one has news."""
        return self._loads.patience_s(restores)

    def keep(self, entries: Sequence[IndexEntry], priority: Priority = Priority.BACKGROUND) -> Future[StoreSummary]:
        """Store published blocks in every tier, as far as they are not there; gathered by ``work``, later.

        The future comes to its end whatever the tiers do: one that hangs is given up.
        """
        return self._stores.keep(entries, priority)

    def work(self) -> bool:
        """Gather the next batch of blocks to be stored; False if there is nothing to do now."""
        self._hear()
        return self._stores.work()

    def seconds_to_give_up(self) -> float | None:
        """When ``work`` should look whether a store hangs; None if none is under way."""
        return self._stores.seconds_to_give_up()

    def report(self) -> tuple[TierReport, ...]:
        """Each tier, fast to slow. Any thread."""
        return tuple(level.report(self._deadline_s) for level in self._levels)

    def close(self) -> None:
        """Give what is to go below a few seconds, close the tiers, tell who waits. After the engine thread's end.

        A tier that hangs is left behind with its thread, and closes itself should its call return.
        """
        deadline = time.monotonic() + EXIT_PATIENCE_S
        self._drain(deadline)
        for level in self._levels:
            level.mover.stop()
        for level in self._levels:
            if not level.mover.close(deadline - time.monotonic()):
                _logger.warning("the %s tier hangs; it is left behind", level.tier.name)
        self._stores.close()

    def _drain(self, deadline: float) -> None:
        """Store what still waits: the last turn of a short-lived process is as worth keeping as any other."""
        if os.getpid() != self._process:  # a forked child has no movers, and nothing of its own to store
            return
        while self._stores.num_unfinished and (left := deadline - time.monotonic()) > 0:
            if not self.work():
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=min(left, DRAIN_LOOK_S))()
