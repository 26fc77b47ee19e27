"""One tier, with what is known of it: is it quick, does it fail, does it hang. Engine thread, but for ``report``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvos.policy.transfer import SpeedEstimate
from kvos.residency.breaker import CircuitBreaker
from kvos.residency.mover import Mover, Transfer
from kvos.residency.tickets import StoreTicket
from kvos.tiers import BlockKey, Stored, Tier, TierUsage

__all__ = ["Level", "StorePiece", "TierReport"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier, as ``kvos stats`` shows it.

    Attributes:
        lossless: blocks come back bit for bit.
        bytes_per_second: of loads; None before the first.
        switched_off: loads or stores are left out now, since they kept failing, or a call hangs.
    """

    name: str
    lossless: bool
    usage: TierUsage
    bytes_per_second: float | None
    switched_off: bool


@dataclass(slots=True, eq=False)
class StorePiece:
    """Blocks of one ticket on their way into one tier.

    Attributes:
        is_trial: the tier's breaker let it through to see whether the tier works again.
        given_up: the ticket no longer waits for it.
    """

    ticket: StoreTicket
    is_trial: bool
    transfer: Transfer[list[Stored]] | None = field(default=None)
    given_up: bool = False


class Level:
    """A tier with its mover, breakers and speed. Loads and stores fail apart: a full disk can still be read.

    Attributes:
        load_speed, store_speed: bytes per second, as they lie on the device.
        measured_at: when a load was last sent to find out, on the clock.
        storing: stores whose call has not returned.
    """

    def __init__(self, tier: Tier, clock: Callable[[], float]) -> None:
        self.tier = tier
        self.mover = Mover(f"kvos-{tier.name}", clock, at_end=lambda: self.tier.close())
        self.loads = CircuitBreaker(clock)
        self.stores = CircuitBreaker(clock)
        self.load_speed = SpeedEstimate()
        self.store_speed = SpeedEstimate()
        self.measured_at = clock()
        self.storing: list[StorePiece] = []

    def hangs(self, patience_s: float) -> bool:
        """Whether a call has not returned for so long."""
        return self.mover.running_s >= patience_s

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """As ``Tier.contains``; nothing, if that raises or makes no sense."""
        try:
            found = self.tier.contains(keys)
        except Exception:
            _logger.exception("the %s tier cannot say what it contains", self.tier.name)
            return [False] * len(keys)
        return found if len(found) == len(keys) else [False] * len(keys)

    def report(self, patience_s: float) -> TierReport:
        """Any thread."""
        off = self.loads.is_open or self.stores.is_open or self.hangs(patience_s)
        try:
            usage = self.tier.usage()
        except Exception:
            _logger.exception("the %s tier cannot say how full it is", self.tier.name)
            usage = TierUsage(0, 0, 0)
        return TierReport(self.tier.name, self.tier.lossless, usage, self.load_speed.per_second, off)
