"""Sessions that take turns on a pool too small for all of them: what tiers save, and what a slow one costs.

The same turns run with different memory below the device, one variant after the other in every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

import numpy as np

from kvos.bench.slow import SlowTier
from kvos.bench.workplace import Workplace, random_tokens
from kvos.runtime import Runtime
from kvos.serving import EngineCore

__all__ = ["Turns", "WorkloadRow", "measure_workload"]

SLOW_TIMES = 20
SHARE_OF_KV = 4
"""The workload's KV is so many times the small pool."""

ROUNDS = 3
SEED = 12


class Memory(Enum):
    """What a variant has."""

    LARGE = "pool with room for all"
    TIERS = "small pool, disk tier"
    SLOW = "small pool, slow disk tier"
    NONE = "small pool, no tier"


@dataclass(frozen=True, slots=True)
class Turns:
    """The workload: in every turn each session in its turn gets new tokens and generates some.

    Attributes:
        prompt_tokens: per turn and session, about; lengths vary by up to a block, so that ends fall anywhere.
    """

    sessions: int = 6
    prompt_tokens: tuple[int, ...] = (256, 64, 64)
    reply_tokens: int = 4
    block_size: int = 16

    def lengths(self, session: int) -> list[int]:
        """Prompt tokens of each turn of a session."""
        generator = np.random.default_rng((SEED, session))
        return [tokens + int(generator.integers(0, self.block_size)) for tokens in self.prompt_tokens]

    @property
    def tokens(self) -> int:
        """Of all sessions at the end."""
        return sum(sum(self.lengths(i)) + len(self.prompt_tokens) * self.reply_tokens for i in range(self.sessions))


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One variant beside the one that it is compared with; medians of rounds.

    Attributes:
        computed_tokens, other_computed_tokens: that went through the model.
        computed_ratio, wall_ratio: this over the other one; medians over rounds, each of a pair.
        longest_added_wait_s: how much later than the other one's a first token came at most; median over rounds.
        restored_tokens: that came back from the tier.
    """

    memory: str
    other: str
    tokens: int
    pool_tokens: int
    computed_tokens: float
    other_computed_tokens: float
    computed_ratio: float
    wall_s: float
    other_wall_s: float
    wall_ratio: float
    longest_added_wait_s: float
    restored_tokens: float
    restores_late: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One run. ``ttft_s`` of each turn in the order in which they ran."""

    wall_s: float
    ttft_s: tuple[float, ...]
    computed: int
    restored: int
    late: int


def measure_workload(
    place: Workplace, turns: Turns, rounds: int = ROUNDS, progress: Callable[[str], None] = lambda _: None
) -> tuple[WorkloadRow, WorkloadRow]:
    """With tiers beside a pool with room for all, and with a slow tier beside none."""
    pairs = []
    for memory, other in ((Memory.TIERS, Memory.LARGE), (Memory.SLOW, Memory.NONE)):
        outcomes = []
        for number in range(rounds):
            progress(f"{turns.sessions} sessions, {memory.value}, round {number + 1} of {rounds}")
            outcomes.append((_run(place, turns, memory, number), _run(place, turns, other, number)))
        pairs.append(_row(place, turns, memory, other, outcomes))
    return pairs[0], pairs[1]


def _small_pool(turns: Turns) -> int:
    """Tokens of room."""
    return turns.tokens // SHARE_OF_KV


def _run(place: Workplace, turns: Turns, memory: Memory, number: int) -> _Outcome:
    room = 2 * turns.tokens if memory is Memory.LARGE else _small_pool(turns)
    settings: dict[str, Any] = {"cache_bytes": place.room(room)}
    if memory in (Memory.LARGE, Memory.NONE):
        settings["disk_cache_bytes"] = 0
    with place.open(f"{memory.name.lower()}-{number}", **settings) as runtime:
        if memory is Memory.SLOW:
            runtime.inspect(_slow_down)
        return _play(runtime, turns)


def _slow_down(core: EngineCore) -> None:
    if core.moves.residency is not None:
        core.moves.residency.wrap_tiers(lambda tier: SlowTier(tier, SLOW_TIMES))


def _play(runtime: Runtime, turns: Turns) -> _Outcome:
    sessions = [runtime.session(f"agent-{i}") for i in range(turns.sessions)]
    prompts = [random_tokens(runtime, sum(turns.lengths(i)), seed=i) for i in range(turns.sessions)]
    starts = [0] * turns.sessions
    ttft: list[float] = []
    begin = time.perf_counter()
    for turn in range(len(turns.prompt_tokens)):
        for i, session in enumerate(sessions):
            end = starts[i] + turns.lengths(i)[turn]
            session.append_tokens(prompts[i][starts[i] : end])
            starts[i] = end
            ttft.append(session.generate(max_tokens=turns.reply_tokens, ignore_eos=True).usage.ttft_s)
    wall_s = time.perf_counter() - begin
    counts = runtime.stats().counters
    computed, restored, late = (counts.get(name, 0) for name in ("tokens_computed", "tokens_restored", "restores_late"))
    return _Outcome(wall_s, tuple(ttft), computed, restored, late)


def _row(
    place: Workplace, turns: Turns, memory: Memory, other: Memory, outcomes: list[tuple[_Outcome, _Outcome]]
) -> WorkloadRow:
    return WorkloadRow(
        memory=memory.value,
        other=other.value,
        tokens=turns.tokens,
        pool_tokens=_small_pool(turns),
        computed_tokens=median(mine.computed for mine, _ in outcomes),
        other_computed_tokens=median(its.computed for _, its in outcomes),
        computed_ratio=median(mine.computed / its.computed for mine, its in outcomes),
        wall_s=median(mine.wall_s for mine, _ in outcomes),
        other_wall_s=median(its.wall_s for _, its in outcomes),
        wall_ratio=median(mine.wall_s / its.wall_s for mine, its in outcomes),
        longest_added_wait_s=median(
            max(a - b for a, b in zip(mine.ttft_s, its.ttft_s, strict=True)) for mine, its in outcomes
        ),
        restored_tokens=median(mine.restored for mine, _ in outcomes),
        restores_late=median(mine.late for mine, _ in outcomes),
        deadline_s=place.source.restore_deadline_ms / 1000,
    )
