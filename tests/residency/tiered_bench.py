"""The engine core with tiers below it, driven by hand: real movers, a clock that a test moves, faults when it wants."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvos.residency import Residency, StoreSummary
from kvos.sequences import BlockManager
from kvos.sessions import CacheSession
from kvos.testing import FakeClock, FaultyTier
from kvos.tiers import Tier
from kvos.tiers.memory import MemoryTier
from kvos.types import OwnerId
from serving.harness import Bench, Events, plain_greedy

SOON = 20.0
"""Seconds for another thread to get there; a test waits for them only when it fails."""

BLOCK = 8
PIECE = 2
"""Blocks in one transfer."""

DEADLINE_S = 2.0
ROOM = 1 << 30

TierFactory = Callable[[int], Tier]
"""A tier for blocks of so many bytes."""


def memory(bytes_per_block: int) -> Tier:
    return MemoryTier(bytes_per_block, ROOM)


class TieredBench(Bench):
    """``tiers`` are wrapped in faulty ones, fast to slow. Nothing moves but in ``step``, ``settle`` and on movers."""

    def __init__(self, *, tiers: Iterable[TierFactory] = (memory,), piece: int = PIECE, **settings: Any) -> None:
        self.clock = FakeClock()
        self.tiers: list[FaultyTier] = []
        self.wakes: queue.Queue[Callable[[], None]] = queue.Queue()

        def make(manager: BlockManager) -> Residency:
            size = manager.pool.layout.bytes_per_block
            self.tiers += [FaultyTier(factory(size)) for factory in tiers]
            return Residency(manager, self.tiers, restore_deadline_s=DEADLINE_S, clock=self.clock, piece_blocks=piece)

        super().__init__(block_size=BLOCK, residency=make, **settings)
        assert self.core.moves.residency is not None
        self.residency = self.core.moves.residency
        self.residency.connect(lambda work, _: self.wakes.put(work))

    @property
    def tier(self) -> FaultyTier:
        """The only one, or the slowest."""
        return self.tiers[-1]

    # -- time passes -------------------------------------------------------------------------------------------------

    def obey(self, *, wait: bool = False) -> None:
        """Run what movers have sent; ``wait`` for at least one."""
        try:
            while True:
                self.wakes.get(wait, SOON if wait else None)()
                wait = False
        except queue.Empty:
            assert not wait, "no mover has sent anything"

    def step(self, *, wait: bool = True) -> bool:
        """One step; while nobody can go on, it comes when a mover has sent something, unless told not to ``wait``."""
        self.obey(wait=wait and self.core.num_running > 0 and self.core.patience_s() != 0)
        more = self.core.step()
        self.core.check_invariants()
        return more

    def settle(self) -> None:
        """Gather what waits to be stored, until all of it has come back."""
        while True:
            if self.residency.work():
                continue
            if self.residency.seconds_to_give_up() is None:
                return
            self.obey(wait=True)

    def wait_for(self, tier: FaultyTier, calls: int, verb: str = "load") -> None:
        """Until the tier's verb has been called so often."""
        for _ in range(int(SOON * 1000)):
            if tier.calls[verb] >= calls:
                return
            tier.closed.wait(0.001)
        raise AssertionError(f"{tier.calls} calls, {calls} of {verb} were expected")

    # -- content -----------------------------------------------------------------------------------------------------

    def stored(self, ids: Sequence[int]) -> None:
        """All full blocks of ``ids`` are in the tiers, and nothing is on the device."""
        session = self.raw(ids)
        self.compute(session)
        summary = self.keep(session)
        assert summary.wanted == len(ids) // BLOCK
        self.core.forget(session)
        self.empty()

    def keep(self, session: CacheSession) -> StoreSummary:
        """Store what a session has published, and wait for it."""
        future = self.residency.keep(session.sequence.published())
        self.settle()
        return future.result(0)

    def empty(self) -> None:
        """Reclaim every block that nobody holds."""
        others = self.manager.pool.max_blocks - self.manager.allocator.counts().held
        self.manager.allocator.release(self.manager.allocate(others, OwnerId(99)))

    def ask(self, ids: Sequence[int], n: int = 3) -> tuple[CacheSession, Events]:
        """A request for ``n`` tokens behind ``ids``, not stepped yet; nobody knows how long computing takes."""
        self.residency.prefill_speed.per_second = None
        session = self.raw(ids)
        return session, self.generate(session, max_tokens=n, ignore_eos=True)

    def close(self) -> None:
        for tier in self.tiers:
            tier.heal()
        self.residency.close()


def assert_right(events: Events, ids: Sequence[int], n: int = 3) -> None:
    """The reply is what the plain model says."""
    assert list(events.finished.tokens) == plain_greedy(ids, n)
