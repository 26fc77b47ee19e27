"""Which idle sessions leave the device, and in which order, and a guard against thrashing. Times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ResidencyRules", "Resident", "ThrashGuard", "leaving_order"]


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """When idle sessions leave.

    Attributes:
        high: share of the pool that may be held; above it sessions leave, until it is ``low``.
        low: where they stop leaving.
        min_stay_s: a session stays so long after its last use, unless a request needs the room.
        dense_stay_s: the same for a dense dialogue, whose next turn is near.
        sessions: so many sessions may hold blocks; beyond that the least recently used leave.
    """

    high: float = 0.85
    low: float = 0.60
    min_stay_s: float = 30.0
    dense_stay_s: float = 120.0
    sessions: int = 8


@dataclass(frozen=True, slots=True)
class Resident:
    """An idle session that holds blocks.

    Attributes:
        idle_s: seconds since its last use.
        uses: times of its latest uses, in seconds, oldest first.
    """

    idle_s: float
    uses: tuple[float, ...] = ()

    @property
    def is_dense(self) -> bool:
        """A dialogue whose last three uses lie within two minutes: a person is typing, not away."""
        return len(self.uses) >= DENSE_USES and self.uses[-1] - self.uses[-DENSE_USES] <= DENSE_WITHIN_S


DENSE_USES = 3
DENSE_WITHIN_S = 120.0


def leaving_order(residents: Sequence[Resident], rules: ResidencyRules, *, pressed: bool) -> list[int]:
    """Indices of those that may leave, the one to go first first.

    The longest idle goes first. Whoever has not stayed for its time may leave only if ``pressed`` by a request that
    waits for room, and after all others.
    """

    def has_stayed(resident: Resident) -> bool:
        return resident.idle_s >= (rules.dense_stay_s if resident.is_dense else rules.min_stay_s)

    order = sorted(range(len(residents)), key=lambda i: (not has_stayed(residents[i]), -residents[i].idle_s))
    return order if pressed else [i for i in order if has_stayed(residents[i])]


@dataclass(slots=True)
class ThrashGuard:
    """Notices sessions that are brought back soon after they left, and says for how long nobody should leave.

    Attributes:
        soon_s: a return within this time after leaving was a bad choice.
        returns: so many bad choices within ``window_s`` are thrash.
        window_s: see above.
        pause_s: how long nobody leaves by rule; twice as long up to ``most_s`` if thrash goes on after a pause.
        times: how often it has backed off.
    """

    soon_s: float = 10.0
    returns: int = 4
    window_s: float = 20.0
    pause_s: float = 30.0
    most_s: float = 480.0
    times: int = 0
    _bad: deque[float] = field(default_factory=deque)
    _until: float = 0.0
    _next_pause: float = 0.0

    def returned(self, away_s: float, now: float) -> bool:
        """Note that a session came back after ``away_s``; True if that is thrash, and a pause begins."""
        if away_s > self.soon_s:
            return False
        self._bad.append(now)
        while self._bad and now - self._bad[0] > self.window_s:
            self._bad.popleft()
        if len(self._bad) < self.returns or self.is_pausing(now):
            return False
        quiet = now - self._until > self._next_pause
        self._next_pause = self.pause_s if quiet else min(2 * self._next_pause, self.most_s)
        self._until = now + self._next_pause
        self._bad.clear()
        self.times += 1
        return True

    def is_pausing(self, now: float) -> bool:
        """Whether nobody should leave by rule; a request that needs room goes before that."""
        return now < self._until
