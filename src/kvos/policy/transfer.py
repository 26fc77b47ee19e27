"""Is bringing blocks back worth it, against computing them again: from measured speeds, as a pure function."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SpeedEstimate", "TransferCosts"]

SMOOTHING = 0.25
"""Weight of the newest measurement: a slow disk is known after a few transfers, one outlier is forgotten as soon."""


@dataclass(slots=True)
class SpeedEstimate:
    """Units per second, as an exponential moving average of what was measured; None before the first."""

    per_second: float | None = None

    def add(self, units: float, seconds: float) -> None:
        """Note that ``units`` took ``seconds``; nothing is learnt from no units or no time."""
        if units <= 0 or seconds <= 0:
            return
        now = units / seconds
        self.per_second = now if self.per_second is None else self.per_second + SMOOTHING * (now - self.per_second)

    def seconds_for(self, units: float) -> float | None:
        """How long ``units`` would take; None if nothing was measured."""
        return None if self.per_second is None else units / self.per_second


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """The two ways to the same blocks.

    Attributes:
        restore_s: seconds to bring them back; None if that was never measured.
        recompute_s: seconds to compute them; None likewise.
    """

    restore_s: float | None
    recompute_s: float | None

    @property
    def worth_restoring(self) -> bool:
        """Whether to bring them back. What was never measured is tried, since that is how it gets measured."""
        return self.restore_s is None or self.recompute_s is None or self.restore_s < self.recompute_s

    def patience_s(self, most: float, least: float) -> float:
        """How long a request may wait for them: as long as computing would take, between ``least`` and ``most``."""
        return most if self.recompute_s is None else min(most, max(least, self.recompute_s))
