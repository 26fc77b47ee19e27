"""Down: which blocks wait to be stored, which are under way, and who wants to know when they are there.

Engine thread only, but for the tiers' calls.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from kvos.residency.level import Level, StorePiece
from kvos.residency.mover import Priority
from kvos.residency.staging import StagingBuffers
from kvos.residency.tickets import StoreSummary, StoreTicket
from kvos.sequences import BlockManager, IndexEntry
from kvos.storage import export_blocks
from kvos.tiers import BlockBatch, BlockKey, BlockRequest, PayloadBytes, Stored

__all__ = ["Stores"]

_logger = logging.getLogger(__name__)

MOST_UNDER_WAY = 2
"""Stores of one tier that have been gathered and not come back: bounds the memory of staging buffers."""

STORE_CALL_S = 0.1
"""What one store should take at most: a load that somebody waits for comes behind it."""

LEAST_BLOCKS = 8
"""In a piece, however slow the tier: smaller files are all syncs and headers."""

STORE_PATIENCE_S = 20.0
"""A call that takes longer hangs: whoever waits for a store is told that it failed, and other tiers go on without."""


class Stores:
    """Tickets of published blocks, stored in every tier in pieces.

    Args:
        levels: fast to slow; a block is safe when the last one has it.
        wake: runs what it is given on the engine thread, soon; any thread may call it.
        staging: where blocks are gathered; a piece has as many as a buffer.
    """

    def __init__(
        self,
        manager: BlockManager,
        levels: Sequence[Level],
        wake: Callable[[Callable[[], None]], None],
        staging: StagingBuffers,
    ) -> None:
        self._manager = manager
        self._levels = levels
        self._wake = wake
        self._staging = staging
        self._piece_blocks = staging.blocks
        self._waiting: deque[tuple[StoreTicket, Priority]] = deque()
        self._unfinished: set[StoreTicket] = set()

    def keep(self, entries: Sequence[IndexEntry], priority: Priority) -> Future[StoreSummary]:
        """See ``Residency.keep``."""
        ticket = StoreTicket(tuple(entries))
        if not self._levels or not entries:
            ticket.next = len(entries)
            ticket.finish_if_done()
            return ticket.future
        self._unfinished.add(ticket)
        if priority is Priority.BACKGROUND:
            self._waiting.append((ticket, priority))
        else:
            self._waiting.appendleft((ticket, priority))
        return ticket.future

    @property
    def num_unfinished(self) -> int:
        """Tickets that somebody may still wait for."""
        return len(self._unfinished)

    def work(self) -> bool:
        """Gather the next batch of blocks to be stored; False if there is nothing to do now."""
        self._give_up_on_hung()
        if not self._waiting or any(self._is_full(level) for level in self._levels):
            return False
        ticket, priority = self._waiting[0]
        piece = ticket.entries[ticket.next : ticket.next + self._blocks_now()]
        ticket.next += len(piece)
        if ticket.is_gathered:
            self._waiting.popleft()
        for level in self._levels:
            there = level.contains([BlockKey(entry.address) for entry in piece])
            # A block that was reclaimed meanwhile has other content now.
            index = self._manager.index
            new = [e for e, has in zip(piece, there, strict=True) if not has and index.entry_of(e.block) is e]
            if level is self._levels[-1]:
                ticket.safe += sum(there)
            if new:
                self._store(level, new, ticket, priority)
        self._finish_if_done(ticket)
        return True

    def _blocks_now(self) -> int:
        """Blocks in the next piece: fewer for a slow tier, since a request's load waits until a store is over."""
        speeds = [level.store_speed.per_second for level in self._levels]
        slowest = min((speed for speed in speeds if speed is not None), default=None)
        if slowest is None:
            return self._piece_blocks
        fit = int(slowest * STORE_CALL_S / self._manager.pool.layout.bytes_per_block)
        return min(self._piece_blocks, max(LEAST_BLOCKS, fit))

    @staticmethod
    def _is_full(level: Level) -> bool:
        return len(level.storing) >= MOST_UNDER_WAY and not level.hangs(STORE_PATIENCE_S)

    def _finish_if_done(self, ticket: StoreTicket) -> None:
        ticket.finish_if_done()
        if ticket.future.done():
            self._unfinished.discard(ticket)

    def _store(self, level: Level, entries: list[IndexEntry], ticket: StoreTicket, priority: Priority) -> None:
        if level.hangs(STORE_PATIENCE_S) or level.stores.is_open:
            self._manager.counters.add("stores_skipped", len(entries))
            return
        wanted = BlockRequest(
            tuple(BlockKey(entry.address) for entry in entries),
            tuple(BlockKey(entry.root if entry.parent is None else entry.parent.address) for entry in entries),
            np.stack([entry.tokens for entry in entries]),
        )
        try:
            blocks = np.array([entry.block for entry in entries], np.int64)
            batch = BlockBatch(wanted, export_blocks(self._manager.pool, blocks, self._staging.take(len(blocks))))
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            _logger.warning("no memory to gather blocks for the %s tier: %s", level.tier.name, error)
            self._manager.counters.add("stores_failed")
            return
        piece = StorePiece(ticket, level.stores.begin_trial())
        level.storing.append(piece)
        ticket.under_way += 1
        done = partial(self._stored, level, piece, batch.data)
        piece.transfer = level.mover.submit(lambda: level.tier.store(batch), lambda: self._wake(done), priority)

    def _stored(self, level: Level, piece: StorePiece, data: PayloadBytes) -> None:
        """A store came back. Engine thread."""
        self._staging.give(data)
        level.storing.remove(piece)
        answer = None if piece.transfer is None else piece.transfer.result
        outcome = answer if answer is not None and len(answer) == len(data) else []
        safe = sum(result in (Stored.STORED, Stored.PRESENT) for result in outcome)
        self._manager.counters.add("blocks_stored", safe)
        if piece.transfer is not None:
            written = outcome.count(Stored.STORED) * self._manager.pool.layout.bytes_per_block
            level.store_speed.add(written, piece.transfer.seconds)
        if piece.given_up:
            return
        if not outcome or Stored.FAILED in outcome:
            level.stores.failed()
            self._manager.counters.add("stores_failed")
        else:
            level.stores.succeeded()
        piece.ticket.under_way -= 1
        if level is self._levels[-1]:
            piece.ticket.safe += safe
        self._finish_if_done(piece.ticket)

    # -- hung tiers ----------------------------------------------------------------------------------------------

    def seconds_to_give_up(self) -> float | None:
        """See ``Residency.seconds_to_give_up``."""
        waits = [
            max(0.0, STORE_PATIENCE_S - level.mover.running_s)
            for level in self._levels
            if any(not piece.given_up for piece in level.storing)
        ]
        return min(waits, default=None)

    def _give_up_on_hung(self) -> None:
        for level in self._levels:
            if level.hangs(STORE_PATIENCE_S):
                for piece in [piece for piece in level.storing if not piece.given_up]:
                    self._give_up(level, piece)

    def _give_up(self, level: Level, piece: StorePiece) -> None:
        """Its ticket goes on without it. One that has begun keeps its buffer until its call returns."""
        piece.given_up = True
        if piece.transfer is not None and piece.transfer.cancel():
            level.storing.remove(piece)
            if piece.is_trial:
                level.stores.not_tried()
        else:
            level.stores.failed()
        _logger.warning("the %s tier hangs: blocks are not stored there for now", level.tier.name)
        self._manager.counters.add("stores_failed")
        piece.ticket.under_way -= 1
        self._finish_if_done(piece.ticket)

    def close(self) -> None:
        """Nobody waits any longer for what is not stored by now."""
        for ticket in self._unfinished:
            ticket.future.cancel()
        self._unfinished.clear()
        self._waiting.clear()
