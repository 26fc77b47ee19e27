"""What the public API does not offer: blocks left where a history wants them, and tables moved at its word.

All of it runs on the engine thread, between two steps.
"""

from __future__ import annotations

import time

import numpy as np

from kvos.policy.transfer import SpeedEstimate
from kvos.residency import Residency
from kvos.runtime import Runtime, Session
from kvos.sequences import BlockManager, Compactor
from kvos.serving import EngineCore
from kvos.tiers import BlockKey
from kvos.verify.operations import Left

__all__ = ["TiersUnusableError", "always_restore", "compact", "leave", "published_keys", "scatter"]

SETTLE_DEADLINE_S = 60.0
MOST_TABLES = 16
"""Tables that are compacted at once: more than there are sessions."""


class TiersUnusableError(Exception):
    """There are none, or stores that were begun do not come to an end."""


class _Unmeasured(SpeedEstimate):
    """Computing is never known to be faster than a tier: whatever is found below comes back, however small a model."""

    def add(self, units: float, seconds: float) -> None:
        """Learn nothing."""


def always_restore(runtime: Runtime) -> None:
    """Have the runtime bring back whatever the tiers have, and wait for it until the deadline."""

    def stop_measuring(core: EngineCore) -> None:
        _residency(core).prefill_speed = _Unmeasured()

    runtime.inspect(stop_measuring)


def published_keys(runtime: Runtime, session: Session) -> tuple[BlockKey, ...]:
    """Keys of the full blocks that a session holds, in order."""
    return runtime.inspect(
        lambda core: tuple(BlockKey(e.address) for e in core.sessions.get(session.name).sequence.published())
    )


def leave(runtime: Runtime, keys: tuple[BlockKey, ...], left: Left) -> None:
    """Have blocks of these keys, all of which are stored below, only where ``left`` says.

    Raises:
        TiersUnusableError: stores do not come to an end.
    """
    if left is Left.DEVICE:
        return
    _settle(runtime)
    unwanted = {
        "host": {Left.DISK: keys, Left.IN_TURN: keys[1::2], Left.NOWHERE: keys}.get(left, ()),
        "disk": {Left.HOST: keys, Left.IN_TURN: keys[::2], Left.NOWHERE: keys}.get(left, ()),
    }
    for tier in runtime.inspect(lambda core: _residency(core).tiers):
        tier.drop(unwanted[tier.name])
    _forget_unheld(runtime)


def _forget_unheld(runtime: Runtime) -> None:
    """The device forgets every block that no session holds: content and address."""

    def forget(core: EngineCore) -> None:
        manager = core.manager
        _reclaim(manager, manager.allocator.num_blocks)
        while manager.scrub_some():  # what is not written back must not be right because it was there before
            pass

    runtime.inspect(forget)


def scatter(runtime: Runtime) -> None:
    """Move the blocks of tables apart, as far as there are free ones; a part of the unheld ones is let go for that."""

    def run(manager: BlockManager) -> None:
        _reclaim(manager, manager.allocator.num_blocks // 3)
        for _, table in list(manager.tables()):
            sources = table.copy()
            starts, lengths = manager.allocator.free_spans()
            free = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)] or [starts])
            if 1 < len(sources) <= len(free) and manager.movable(sources):
                manager.move(sources, free[::-1][: len(sources)])

    runtime.inspect(lambda core: run(core.manager))


def compact(runtime: Runtime) -> None:
    """Move tables together wherever that leaves fewer runs."""
    eager = Compactor(threshold=0.0, min_runs=2, min_interval=0.0)

    def run(manager: BlockManager) -> None:
        for _ in range(MOST_TABLES):
            if not eager.run(manager):
                return

    runtime.inspect(lambda core: run(core.manager))


def _reclaim(manager: BlockManager, most: int) -> None:
    unheld = manager.index.remove_coldest(most, manager.allocator.cached())
    manager.allocator.reclaim(np.array(unheld, np.int64))


def _settle(runtime: Runtime) -> None:
    """Wait until nothing is on its way down: what comes late would be where it was dropped already."""
    until = time.monotonic() + SETTLE_DEADLINE_S
    while runtime.inspect(lambda core: _residency(core).unfinished_stores):
        if time.monotonic() > until:
            raise TiersUnusableError(f"stores have not come to their end within {SETTLE_DEADLINE_S:.0f} s")
        time.sleep(0.001)


def _residency(core: EngineCore) -> Residency:
    if core.moves.residency is None:
        raise TiersUnusableError("the runtime was opened without any tier below the device; see the log for the reason")
    return core.moves.residency
