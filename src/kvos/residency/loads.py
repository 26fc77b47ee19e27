"""Up: which blocks of a sequence come from which tier, how long anybody waits for them, and how they are committed.

Engine thread only, but for the tiers' calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvos.policy.transfer import SpeedEstimate, TransferCosts
from kvos.residency.level import Level
from kvos.residency.mover import Priority
from kvos.residency.restore import Restore, RestoreEnd, RestorePiece
from kvos.residency.staging import StagingBuffers
from kvos.sequences import BlockManager, SequenceCache
from kvos.storage import Reservation, import_blocks
from kvos.tiers import BlockKey, BlockRequest, Loaded, PayloadBytes
from kvos.types import TokenIds

__all__ = ["Loads"]

_logger = logging.getLogger(__name__)

PIECES_AHEAD = 4
"""Loads of one request that are under way at once: the tier is never idle, and staging buffers stay small."""

LEAST_PATIENCE_S = 0.1
"""A request waits at least so long for blocks that looked cheaper than computing; small times are noise."""

MEASURE_AGAIN_S = 30.0
"""So often a tier that was measured as too slow gets a load that nobody waits for: it may be faster now."""

Run = tuple[Level, int]
"""So many blocks from this tier."""


class Loads:
    """Restores of all requests.

    Args:
        levels: fast to slow.
        deadline_s: the longest that a request waits.
        staging: where loads go to; a piece has as many blocks as a buffer.
        clock: seconds, monotonic.
        wake: runs what it is given on the engine thread, soon; any thread may call it.
    """

    def __init__(
        self,
        manager: BlockManager,
        levels: Sequence[Level],
        deadline_s: float,
        clock: Callable[[], float],
        wake: Callable[[Callable[[], None]], None],
        staging: StagingBuffers,
    ) -> None:
        self._manager = manager
        self._levels = levels
        self._deadline_s = deadline_s
        self._clock = clock
        self._wake = wake
        self._staging = staging
        self._piece_blocks = staging.blocks
        self.prefill_speed = SpeedEstimate()  # tokens

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin(self, sequence: SequenceCache) -> Restore | None:
        """See ``Residency.begin_restore``."""
        size = self._manager.block_size
        first, end = sequence.num_computed // size, sequence.num_tokens // size
        if sequence.num_computed % size or first >= end or not self._levels:
            return None
        keys = [BlockKey(address) for address in sequence.addresses(first, end)]
        runs, rest = self._find(keys[1:])
        if not runs:
            return None if rest is RestoreEnd.COMPLETE else Restore(sequence, 0.0, [], end=rest)
        blocks = sum(n for _, n in runs)
        tokens = sequence.tokens(first * size, (first + blocks) * size).reshape(blocks, size).copy()
        restore = Restore(sequence, 0.0, self._pieces(runs, first, keys, tokens), rest)
        costs = self._costs(runs)
        if not costs.worth_restoring:
            self._manager.counters.add("restores_not_worth_it")
            self._measure_again(restore)
            restore.pieces = []
            restore.finish(RestoreEnd.NOT_WORTH_IT)
            return restore
        restore.deadline = self._clock() + costs.patience_s(self._deadline_s, LEAST_PATIENCE_S)
        self._send_ahead(restore)
        self._manager.counters.add("restores")
        return restore

    def _find(self, keys: Sequence[BlockKey]) -> tuple[list[Run], RestoreEnd]:
        """Runs that cover the longest prefix of ``keys`` that tiers have, the fastest tier for each, and why no more.

        A tier is left out while a call of it takes longer than any request would wait, and while its breaker is open.
        """
        found = {level: level.contains(keys) for level in self._levels}
        usable = [level for level in self._levels if not level.loads.is_open and not level.hangs(self._deadline_s)]
        runs: list[Run] = []
        for block in range(len(keys)):
            level = next((level for level in usable if found[level][block]), None)
            if level is None:
                elsewhere = any(has[block] for has in found.values())
                return runs, RestoreEnd.SWITCHED_OFF if elsewhere else RestoreEnd.COMPLETE
            if runs and runs[-1][0] is level:
                runs[-1] = (level, runs[-1][1] + 1)
            else:
                runs.append((level, 1))
        return runs, RestoreEnd.COMPLETE

    def _pieces(self, runs: list[Run], first: int, keys: Sequence[BlockKey], tokens: TokenIds) -> list[RestorePiece]:
        """Loads that bring ``runs``, from block ``first`` on; ``keys[i]`` is that of the block before ``tokens[i]``."""
        pieces: list[RestorePiece] = []
        failed: set[Level] = set()
        start = 0
        for level, n in runs:
            for piece in range(start, start + n, self._piece_blocks):
                stop = min(piece + self._piece_blocks, start + n)
                wanted = BlockRequest(tuple(keys[piece + 1 : stop + 1]), tuple(keys[piece:stop]), tokens[piece:stop])
                pieces.append(RestorePiece(level, first + piece, wanted, failed))
            start += n
        return pieces

    def _costs(self, runs: list[Run]) -> TransferCosts:
        layout = self._manager.pool.layout
        blocks = sum(n for _, n in runs)
        each = [level.load_speed.seconds_for(n * layout.bytes_per_block) for level, n in runs]
        known = [seconds for seconds in each if seconds is not None]
        restore_s = sum(known) if len(known) == len(each) else None
        return TransferCosts(restore_s, self.prefill_speed.seconds_for(blocks * layout.block_size))

    def _measure_again(self, restore: Restore) -> None:
        """Load the first piece of each tier for nobody, if that was not done lately."""
        first = {piece.level: piece for piece in reversed(restore.pieces)}
        for level, piece in first.items():
            if self._clock() - level.measured_at >= MEASURE_AGAIN_S:
                piece.dropped = True
                self._send(piece, Priority.BACKGROUND)

    # -- loading -------------------------------------------------------------------------------------------------

    def _send_ahead(self, restore: Restore) -> None:
        for piece in restore.pieces[:PIECES_AHEAD]:
            if piece.transfer is None:
                self._send(piece, Priority.REQUEST)

    def _send(self, piece: RestorePiece, priority: Priority) -> None:
        level = piece.level
        data = self._staging.take(len(piece.wanted))
        level.measured_at = self._clock()
        piece.is_trial = level.loads.begin_trial()
        piece.data = data
        piece.transfer = level.mover.submit(
            lambda: level.tier.load(piece.wanted, data), lambda: self._wake(partial(self._loaded, piece)), priority
        )

    def _loaded(self, piece: RestorePiece) -> None:
        """A load came back, wanted or not: learn from it."""
        level, results, transfer = piece.level, piece.results, piece.transfer
        if piece.dropped:
            self._give_back(piece)
        if results is not None and transfer is not None:
            level.load_speed.add(results.count(Loaded.HIT) * self._bytes_per_block, transfer.seconds)
        if results is None or Loaded.FAILED in results:
            self._failed(piece)
        elif level not in piece.failed:
            level.loads.succeeded()

    def _give_back(self, piece: RestorePiece) -> None:
        """Its transfer is over, and nobody reads its buffer any more."""
        if piece.data is not None:
            self._staging.give(piece.data)
            piece.data = None

    @staticmethod
    def _failed(piece: RestorePiece) -> None:
        if piece.level not in piece.failed:
            piece.failed.add(piece.level)
            piece.level.loads.failed()

    @property
    def _bytes_per_block(self) -> int:
        return self._manager.pool.layout.bytes_per_block

    # -- committing ----------------------------------------------------------------------------------------------

    def advance(self, restore: Restore, reservation: Reservation | None) -> int:
        """See ``Residency.advance``."""
        sequence = restore.sequence
        before = sequence.num_computed
        if restore.end is None:
            restore.shared_tokens += sequence.adopt_prefix()  # somebody else may have been faster
            restore.skip_to(sequence.num_computed // self._manager.block_size)
        while restore.end is None:
            self._send_ahead(restore)
            if not restore.pieces:
                restore.finish(restore.rest)
            elif restore.has_news:
                piece = restore.pieces.pop(0)
                self._commit(restore, piece, reservation)
                self._give_back(piece)
            elif self._clock() < restore.deadline:
                break
            else:
                self._give_up(restore)
        return sequence.num_computed - before

    def _give_up(self, restore: Restore) -> None:
        """The deadline has passed. A tier that has brought something is slow for so much; one that has not, failed."""
        late = restore.pieces[0]
        if late.level not in restore.delivered:
            self._failed(late)
        self._manager.counters.add("restores_late")
        restore.finish(RestoreEnd.LATE)

    def _commit(self, restore: Restore, piece: RestorePiece, reservation: Reservation | None) -> None:
        results = piece.results
        if results is None or piece.data is None:
            self._manager.counters.add("restores_failed")
            restore.finish(RestoreEnd.FAILED)
            return
        restore.delivered.add(piece.level)
        good = next((i for i, result in enumerate(results) if result is not Loaded.HIT), len(results))
        if good < len(results):
            self._manager.counters.add("restores_failed")
            restore.finish(RestoreEnd.MISSING if results[good] is Loaded.MISS else RestoreEnd.FAILED)
        skip = restore.sequence.num_computed // self._manager.block_size - piece.first
        if good > skip:
            self._write(restore, piece.data[skip:good], reservation)

    def _write(self, restore: Restore, data: PayloadBytes, reservation: Reservation | None) -> None:
        """Put blocks behind what the sequence has computed; if that can't be done, the request goes on without them."""
        size, sequence = self._manager.block_size, restore.sequence
        try:
            plan = sequence.prepare_write(len(data) * size, reservation)
            try:
                import_blocks(self._manager.pool, plan.slots[::size] // size, data)
            except BaseException:
                sequence.abandon_write(plan)
                raise
        except Exception as error:  # noqa: BLE001 - no room or no memory: if computing meets it too, the request says so
            _logger.warning("blocks that were read cannot be taken in: %s", error)
            self._manager.counters.add("restores_failed", int(restore.end is None))
            restore.finish(RestoreEnd.FAILED)
            return
        sequence.complete_write(plan)
        restore.restored_tokens += len(data) * size
        self._manager.counters.add("tokens_restored", len(data) * size)

    def patience_s(self, restores: Sequence[Restore]) -> float:
        """See ``Residency.patience_s``."""
        if any(restore.has_news for restore in restores):
            return 0.0
        return max(0.0, min(restore.deadline for restore in restores) - self._clock())
