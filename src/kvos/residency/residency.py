"""What lives in which tier, and when it moves. Engine thread only; tiers are called by their movers.

Down: published blocks are gathered between steps, a batch at a time, and stored in every tier below. Up: blocks behind
what a sequence has computed are loaded by address and committed like a forward pass that wrote them. Whatever goes
wrong, or takes too long, is computed instead.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvos.errors import KvosError
from kvos.policy.transfer import SpeedEstimate, TransferCosts
from kvos.residency.breaker import CircuitBreaker
from kvos.residency.mover import Mover, Priority
from kvos.residency.restore import Restore, RestoreEnd, RestorePiece
from kvos.residency.staging import StagingBuffers
from kvos.residency.stores import StoreSummary, StoreTicket
from kvos.sequences import BlockManager, IndexEntry, SequenceCache
from kvos.storage import Reservation, export_blocks, import_blocks
from kvos.tiers import BlockBatch, BlockKey, BlockRequest, Loaded, PayloadBytes, Stored, Tier, TierUsage

__all__ = ["Residency", "TierReport"]

_logger = logging.getLogger(__name__)

PIECE_BLOCKS = 64
"""Blocks in one transfer: a few milliseconds of the engine thread to gather, and a file that is worth its sync."""

MOST_UNDER_WAY = 2
"""Stores of one tier that have been gathered and not come back: bounds the memory of staging buffers."""

IDLE_BUFFERS = 4
"""Staging buffers that are kept for the next transfers."""

LEAST_PATIENCE_S = 0.1
"""A request waits at least so long for blocks that looked cheaper than computing; small times are noise."""

EXIT_PATIENCE_S = 5.0
"""Closing waits so long for stores that are under way, and leaves a hung one behind."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier, as ``kvos stats`` shows it. ``bytes_per_second`` is of loads, None before the first."""

    name: str
    lossless: bool
    usage: TierUsage
    bytes_per_second: float | None
    switched_off: bool


class _Level:
    """A tier with its mover, breaker and speed."""

    def __init__(self, tier: Tier, clock: Callable[[], float]) -> None:
        self.tier = tier
        self.mover = Mover(f"kvos-{tier.name}", clock)
        self.breaker = CircuitBreaker(clock)
        self.load_speed = SpeedEstimate()  # bytes
        self.stores_under_way = 0


class Residency:
    """Moves blocks between the pool and the tiers below it.

    Args:
        manager: the pool's blocks.
        tiers: fast to slow; closed with this.
        restore_deadline_s: the longest that a request waits for blocks.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        manager: BlockManager,
        tiers: Sequence[Tier],
        *,
        restore_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._levels = [_Level(tier, clock) for tier in tiers]
        self._wake: Callable[[Callable[[], None]], None] = _run_here
        self._deadline_s = restore_deadline_s
        self._clock = clock
        self._staging = StagingBuffers(PIECE_BLOCKS, manager.pool.layout.bytes_per_block, IDLE_BUFFERS)
        self._tickets: deque[tuple[StoreTicket, Priority]] = deque()
        self._unfinished: set[StoreTicket] = set()
        self.prefill_speed = SpeedEstimate()  # tokens

    def connect(self, wake: Callable[[Callable[[], None]], None]) -> None:
        """``wake`` runs what it is given on the engine thread, soon; movers call it from their threads."""
        self._wake = wake

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Fast to slow; for measurements and tests."""
        return tuple(level.tier for level in self._levels)

    def wrap_tiers(self, wrap: Callable[[Tier], Tier]) -> None:
        """Put something between here and each tier; for measurements and tests. Nothing may be under way."""
        for level in self._levels:
            level.tier = wrap(level.tier)

    # -- up ------------------------------------------------------------------------------------------------------

    def begin_restore(self, sequence: SequenceCache) -> Restore | None:
        """Start loading what the tiers have of the tokens behind ``num_computed``; None if that is nothing, or not
        worth it."""
        size = self._manager.block_size
        first, end = sequence.num_computed // size, sequence.num_tokens // size
        if sequence.num_computed % size or first >= end or not self._levels:
            return None
        keys = [BlockKey(address) for address in sequence.addresses(first, end)]
        runs = self._runs(keys[1:])
        blocks = sum(n for _, n in runs)
        if not blocks or not (costs := self._costs(runs)).worth_restoring:
            self._manager.counters.add("restores_not_worth_it", int(blocks > 0))
            return None
        deadline = self._clock() + costs.patience_s(self._deadline_s, LEAST_PATIENCE_S)
        tokens = sequence.tokens(first * size, (first + blocks) * size).reshape(blocks, size).copy()
        restore = Restore(sequence, deadline, [])
        start = 0
        for level, n in runs:
            for piece in range(start, start + n, PIECE_BLOCKS):
                stop = min(piece + PIECE_BLOCKS, start + n)
                wanted = BlockRequest(tuple(keys[piece + 1 : stop + 1]), tuple(keys[piece:stop]), tokens[piece:stop])
                restore.pieces.append(self._load(level, wanted))
            start += n
        self._manager.counters.add("restores")
        return restore

    def _runs(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """``(level, blocks)`` that cover the longest prefix of ``keys`` that tiers have, the fastest tier for each."""
        runs: list[tuple[int, int]] = []
        done = 0
        open_levels = [i for i, level in enumerate(self._levels) if level.breaker.allow()]
        found = {i: self._levels[i].tier.contains(keys) for i in open_levels}
        while done < len(keys):
            level = next((i for i in open_levels if found[i][done]), None)
            if level is None:
                break
            stop = next((k for k in range(done, len(keys)) if not found[level][k]), len(keys))
            runs.append((level, stop - done))
            done = stop
        return runs

    def _costs(self, runs: list[tuple[int, int]]) -> TransferCosts:
        layout = self._manager.pool.layout
        blocks = sum(n for _, n in runs)
        each = [self._levels[level].load_speed.seconds_for(n * layout.bytes_per_block) for level, n in runs]
        known = [seconds for seconds in each if seconds is not None]
        restore_s = sum(known) if len(known) == len(each) else None
        return TransferCosts(restore_s, self.prefill_speed.seconds_for(blocks * layout.block_size))

    def _load(self, number: int, wanted: BlockRequest) -> RestorePiece:
        level = self._levels[number]
        data = self._staging.take(len(wanted))
        transfer = level.mover.submit(
            lambda: level.tier.load(wanted, data), lambda: self._wake(_nothing), Priority.REQUEST
        )
        return RestorePiece(number, len(wanted), data, transfer)

    def advance(self, restore: Restore, reservation: Reservation | None) -> int:
        """Commit what has come back, in order; returns the tokens gained. Sets ``restore.end`` when it is over."""
        gained = 0
        while restore.end is None:
            if not restore.pieces:
                restore.finish(RestoreEnd.COMPLETE)
            elif restore.has_news:
                gained += self._commit(restore, restore.pieces.pop(0), reservation)
            elif self._clock() < restore.deadline:
                break
            else:
                self._levels[restore.pieces[0].tier].breaker.failed()
                self._manager.counters.add("restores_late")
                restore.finish(RestoreEnd.LATE)
        return gained

    def _commit(self, restore: Restore, piece: RestorePiece, reservation: Reservation | None) -> int:
        level, results = self._levels[piece.tier], piece.transfer.result
        if results is None:
            level.breaker.failed()
            restore.finish(RestoreEnd.FAILED)
            return 0
        good = next((i for i, result in enumerate(results) if result is not Loaded.HIT), len(results))
        if Loaded.FAILED in results:
            level.breaker.failed()
        else:
            level.breaker.succeeded()
            level.load_speed.add(piece.data.nbytes, piece.transfer.seconds)
        if good < len(results):
            self._manager.counters.add("restores_failed")
            lost = results[good] is Loaded.MISS
            restore.finish(RestoreEnd.MISSING if lost else RestoreEnd.FAILED)
        return self._write(restore, piece, good, reservation) if good else 0

    def _write(self, restore: Restore, piece: RestorePiece, good: int, reservation: Reservation | None) -> int:
        size = self._manager.block_size
        try:
            plan = restore.sequence.prepare_write(good * size, reservation)
        except KvosError as error:  # the request itself will meet it again, and report it
            _logger.warning("blocks that were read find no room: %s", error)
            restore.finish(RestoreEnd.FAILED)
            return 0
        try:
            import_blocks(self._manager.pool, plan.slots[::size] // size, piece.data[:good])
        except BaseException:
            restore.sequence.abandon_write(plan)
            raise
        self._staging.give(piece.data)
        restore.sequence.complete_write(plan)
        restore.restored_tokens += good * size
        self._manager.counters.add("tokens_restored", good * size)
        return good * size

    # -- down ----------------------------------------------------------------------------------------------------

    def keep(self, entries: Sequence[IndexEntry], priority: Priority = Priority.BACKGROUND) -> Future[StoreSummary]:
        """Store published blocks in every tier, as far as they are not there; gathered by ``work``, later."""
        ticket = StoreTicket(tuple(entries))
        if not self._levels or not entries:
            ticket.next = len(entries)
            ticket.finish_if_done()
            return ticket.future
        self._unfinished.add(ticket)
        if priority is Priority.BACKGROUND:
            self._tickets.append((ticket, priority))
        else:
            self._tickets.appendleft((ticket, priority))
        return ticket.future

    def work(self) -> bool:
        """Gather the next batch of blocks to be stored; False if there is nothing to do now."""
        if not self._tickets or any(level.stores_under_way >= MOST_UNDER_WAY for level in self._levels):
            return False
        ticket, priority = self._tickets[0]
        piece = ticket.entries[ticket.next : ticket.next + PIECE_BLOCKS]
        ticket.next += len(piece)
        if ticket.is_gathered:
            self._tickets.popleft()
        last = len(self._levels) - 1
        for number, level in enumerate(self._levels):
            there = level.tier.contains([BlockKey(entry.address) for entry in piece])
            # A block that was reclaimed meanwhile has other content now.
            index = self._manager.index
            new = [e for e, has in zip(piece, there, strict=True) if not has and index.entry_of(e.block) is e]
            if number == last:
                ticket.safe += sum(there)
            if not new:
                continue
            if not level.breaker.allow():
                self._manager.counters.add("stores_skipped", len(new))
                continue
            self._store(number, new, ticket, priority)
        self._finish_if_done(ticket)
        return True

    def _finish_if_done(self, ticket: StoreTicket) -> None:
        ticket.finish_if_done()
        if ticket.future.done():
            self._unfinished.discard(ticket)

    def _store(self, number: int, entries: list[IndexEntry], ticket: StoreTicket, priority: Priority) -> None:
        level = self._levels[number]
        wanted = BlockRequest(
            tuple(BlockKey(entry.address) for entry in entries),
            tuple(BlockKey(entry.root if entry.parent is None else entry.parent.address) for entry in entries),
            np.stack([entry.tokens for entry in entries]),
        )
        blocks = np.array([entry.block for entry in entries], np.int64)
        data = export_blocks(self._manager.pool, blocks, self._staging.take(len(entries)))
        batch = BlockBatch(wanted, data)
        level.stores_under_way += 1
        ticket.under_way += 1
        results: list[list[Stored]] = []
        work = lambda: results.append(level.tier.store(batch))  # noqa: E731 - it closes over what is local here
        done = partial(self._stored, number, ticket, data, results)
        level.mover.submit(work, lambda: self._wake(done), priority)

    def _stored(self, number: int, ticket: StoreTicket, data: PayloadBytes, results: list[list[Stored]]) -> None:
        """A store came back. Engine thread."""
        level = self._levels[number]
        self._staging.give(data)
        level.stores_under_way -= 1
        ticket.under_way -= 1
        outcome = results[0] if results else []
        safe = sum(result in (Stored.STORED, Stored.PRESENT) for result in outcome)
        if number == len(self._levels) - 1:
            ticket.safe += safe
        self._manager.counters.add("blocks_stored", safe)
        if not outcome or Stored.FAILED in outcome:
            level.breaker.failed()
            self._manager.counters.add("stores_failed")
        else:
            level.breaker.succeeded()
        self._finish_if_done(ticket)

    # -- reading and end -----------------------------------------------------------------------------------------

    @property
    def unfinished_stores(self) -> int:
        """Calls of ``keep`` whose blocks are not all below yet."""
        return len(self._unfinished)

    def patience_s(self, restores: Sequence[Restore]) -> float:
        """Seconds until the first of these restores has to be looked at; 0 if one has news."""
        if any(restore.has_news for restore in restores):
            return 0.0
        return max(0.0, min(restore.deadline for restore in restores) - self._clock())

    def report(self) -> tuple[TierReport, ...]:
        """Each tier, fast to slow. Any thread."""
        return tuple(
            TierReport(
                level.tier.name,
                level.tier.lossless,
                level.tier.usage(),
                level.load_speed.per_second,
                level.breaker.is_open,
            )
            for level in self._levels
        )

    def close(self) -> None:
        """Give what is under way a few seconds, close the tiers, tell who waits. After the engine thread's end."""
        for level in self._levels:
            if level.mover.close(EXIT_PATIENCE_S):
                level.tier.close()
            else:
                _logger.warning("the %s tier hangs; it is left behind", level.tier.name)
        for ticket in self._unfinished:
            ticket.future.cancel()
        self._unfinished.clear()


def _run_here(work: Callable[[], None]) -> None:
    """Until an engine thread is there, a mover's own thread has to do."""
    work()


def _nothing() -> None:
    """The engine thread looks at restores by itself, once it is awake."""
