"""Random histories of sessions, as in ``test_session_machine``, over three tiers in which everything goes wrong.

A faulty memory tier, a host tier and a disk tier, all too small. Sessions leave and come back, blocks are reclaimed,
time passes; calls fail, lie, raise and hang. Every reply is compared with a plain run, and after each step
the bookkeeping must agree with itself.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvos.errors import OutOfBlocksError
from kvos.serving import FinishReason, StepBudget
from kvos.testing import TierFault
from kvos.tiers import Tier
from kvos.tiers.codecs import RawCodec
from kvos.tiers.disk import DiskTier
from kvos.tiers.disk.index import CATALOG_BYTES
from kvos.tiers.host import HostTier
from kvos.tiers.memory import MemoryTier
from residency.tiered_bench import BLOCK, SOON, TieredBench
from serving.harness import Events
from serving.test_session_machine import MAX_BLOCKS, MOST_TOKENS, Expected, SessionMachine
from tiers.tier_suite import FAST_FOLDER

FAULTS = {
    "store": (
        TierFault.FULL,
        TierFault.FAIL,
        TierFault.LAST_ROW,
        TierFault.RAISE,
        TierFault.NONSENSE,
        TierFault.HANG,
    ),
    "load": tuple(fault for fault in TierFault if fault not in (TierFault.NONE, TierFault.FULL)),
    "contains": (TierFault.RAISE, TierFault.NONSENSE),
}
SPOILT = [(verb, fault) for verb, faults in FAULTS.items() for fault in faults]


class FaultyBench(TieredBench):
    """Steps never wait for a call that hangs; others have returned before a step begins."""

    def __init__(self, folder: Path) -> None:
        def disk(size: int) -> Tier:
            return DiskTier(
                folder,
                capacity_bytes=CATALOG_BYTES + 20 * size,
                bytes_per_block=size,
                block_size=BLOCK,
                codec=RawCodec(),
            )

        tiers = (lambda size: MemoryTier(size, 6 * size), lambda size: HostTier(size, 9 * size), disk)
        super().__init__(
            tiers=tiers,
            max_blocks=MAX_BLOCKS,
            blocks_per_segment=9,
            max_tokens=MOST_TOKENS,
            budget=StepBudget(24, 10, 4),
        )
        residents, prewarms = self.core.residents, self.core.moves.prewarms
        assert prewarms is not None
        residents._clock = prewarms._clock = self.clock
        residents._last_look = self.clock()

    def is_quiet(self) -> bool:
        restores = [r.restore for r in self.core._requests.values() if r.restore is not None]
        loads = [piece for restore in restores for piece in restore.pieces if piece.transfer is not None]
        stores = [(level, piece) for level in self.residency._levels for piece in level.storing]
        waits = [(piece.level, piece.transfer) for piece in loads] + [
            (level, piece.transfer) for level, piece in stores
        ]
        return all(
            level.tier.hanging.is_set() or transfer.state.value in ("done", "cancelled") for level, transfer in waits
        )

    def step(self, *, wait: bool = False) -> bool:
        until = time.monotonic() + SOON
        while not self.is_quiet():
            assert time.monotonic() < until, "a mover has stopped moving"
            time.sleep(0.0002)
        return super().step(wait=False)

    def run(self, most: int = 2000) -> None:
        """Time passes, so that nothing waits for ever."""
        for _ in range(most):
            if not self.step():
                return
            self.clock.advance(0.5)
        raise AssertionError(f"still running after {most} steps")


class TieredMachine(SessionMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=FAST_FOLDER))
        self.tiered = FaultyBench(self.folder)
        self.bench = self.tiered

    # -- leaving and coming back -------------------------------------------------------------------------------------

    @rule(one=SessionMachine.sessions)
    def store(self, one: Expected) -> None:
        if one.is_idle and one in self.live:
            self.tiered.core.moves.hibernate(one.session)

    @rule(one=SessionMachine.sessions, after_s=st.sampled_from([0.0, 2.0]))
    def prewarm(self, one: Expected, after_s: float) -> None:
        if one in self.live:
            self.tiered.core.moves.prewarm(one.session, after_s)

    @rule(
        one=SessionMachine.sessions, fault=st.sampled_from(FAULTS["load"]), tier=st.integers(0, 2), n=st.integers(1, 4)
    )
    def go_and_come_back(self, one: Expected, fault: TierFault, tier: int, n: int) -> None:
        """All of a session goes below and off the device, and is wanted again; one tier is not well by then."""
        if not one.is_idle or one not in self.live or not one.tokens or self.tiered.core.num_running:
            return
        with suppress(OutOfBlocksError):
            self.tiered.compute(one.session)
        storing = self.tiered.core.moves.hibernate(one.session)
        assert storing is not None
        while not storing.done():
            self.tiered.step()
            self.tiered.clock.advance(0.5)
        self.tiered.core.swap_out(one.session, one.session.sequence.revision)
        self.reclaim()
        self.tiered.tiers[tier].spoil("load", TierFault.NONE, fault)
        self.tiered.residency.prefill_speed.per_second = None
        self.generate(one, n)

    @rule(one=SessionMachine.sessions)
    def leave(self, one: Expected) -> None:
        if one.is_idle and one in self.live:
            self.tiered.core.swap_out(one.session, one.session.sequence.revision)

    @rule()
    def reclaim(self) -> None:
        with suppress(OutOfBlocksError):
            self.tiered.empty()

    @rule(steps=st.integers(1, 5))
    def gather(self, steps: int) -> None:
        for _ in range(steps):
            self.tiered.core.idle_work()

    # -- faults ------------------------------------------------------------------------------------------------------

    @rule(tier=st.integers(0, 2), what=st.sampled_from(SPOILT))
    def spoil(self, tier: int, what: tuple[str, TierFault]) -> None:
        self.tiered.tiers[tier].spoil(*what)

    @rule(tier=st.integers(0, 2))
    def heal(self, tier: int) -> None:
        self.tiered.tiers[tier].heal()

    @rule(seconds=st.sampled_from([0.05, 1.0, 6.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.tiered.clock.advance(seconds)

    # -- what must hold ----------------------------------------------------------------------------------------------

    @staticmethod
    def check_reply(one: Expected, events: Events, now: list[int]) -> None:
        SessionMachine.check_reply(one, events, now)
        if events.is_over and hasattr(events[-1], "usage"):
            usage = events.finished.usage
            assert usage.restored_tokens + usage.shared_tokens <= usage.reused_tokens
            if events.finished.reason is not FinishReason.CANCELLED:
                assert usage.reused_tokens + usage.computed_tokens == usage.prompt_tokens

    @invariant()
    def nobody_waits_longer_than_a_deadline(self) -> None:
        for request in self.tiered.core._requests.values():
            if request.restore is not None:
                assert request.restore.deadline - self.tiered.clock() <= 2.0

    def teardown(self) -> None:
        try:
            super().teardown()
            host, disk = self.tiered.tiers[1].tier, self.tiered.tiers[2].tier
            for tier in self.tiered.tiers:
                tier.heal()
            self.tiered.clock.advance(1000.0)
            self.tiered.settle()
            assert self.tiered.residency.unfinished_stores == 0
            assert isinstance(host, HostTier)
            assert isinstance(disk, DiskTier)
            host.check_invariants()
            disk.check_invariants()
        finally:
            self.tiered.close()
            shutil.rmtree(self.folder)


TestTieredMachine = TieredMachine.TestCase
