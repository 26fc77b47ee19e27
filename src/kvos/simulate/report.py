"""Hit rates of a trace per pool size, for a policy, the yardstick, and what nobody can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvos.errors import InvalidInputError
from kvos.policy import LRU, POLICIES
from kvos.simulate.belady import ceiling_hits, optimum_hits
from kvos.simulate.replay import Replay
from kvos.simulate.trace import Trace

__all__ = ["Report", "Row", "simulate"]


@dataclass(frozen=True, slots=True)
class Row:
    """One pool size, in blocks, and the shares of asked blocks that were hits, from 0 to 1."""

    blocks: int
    policy: float
    lru: float
    optimum: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation found.

    Attributes:
        policy: name of the policy.
        requests: requests in the trace.
        asked, distinct: blocks that all requests asked for, and how many different ones these are.
        ceiling: share of asked blocks that a cache without bounds hits.
        rows: one per pool size, in the order asked for.
    """

    policy: str
    requests: int
    asked: int
    distinct: int
    ceiling: float
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """Plain values, under the names of the attributes."""
        return asdict(self)


def simulate(trace: Trace, sizes: Sequence[int], policy: str = "expected-return") -> Report:
    """Replay ``trace`` for each pool size (blocks).

    Raises:
        InvalidInputError: an unknown policy, a size below 1, or a trace without blocks.
    """
    if policy not in POLICIES:
        raise InvalidInputError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    if not trace.asked:
        raise InvalidInputError("the trace has no blocks")
    for size in sizes:
        if size < 1:
            raise InvalidInputError(f"a pool of {size} blocks cannot be simulated; expected at least 1")
    return Report(
        policy=policy,
        requests=len(trace.paths),
        asked=trace.asked,
        distinct=len(trace.parents),
        ceiling=ceiling_hits(trace) / trace.asked,
        rows=tuple(_row(trace, size, policy) for size in sizes),
    )


def _row(trace: Trace, size: int, policy: str) -> Row:
    lru = Replay(trace, size, LRU()).run()
    chosen = lru if policy == "lru" else Replay(trace, size, POLICIES[policy]()).run()
    optimum = optimum_hits(trace, size)
    return Row(size, chosen / trace.asked, lru / trace.asked, optimum / trace.asked)
